"""Keeps secrets out of everything that is printed: lease tokens, passwords, authorization headers, URL credentials."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

SECRET_KEYS = frozenset(
    {"token", "lease_token", "authorization", "password", "passwd", "secret", "api_key", "credentials"}
)

# One cheap look decides whether a text needs the thorough ones.
_HINT = re.compile(r"://|token|passw|secret|authoriz|bearer|api_key", re.IGNORECASE)
# Greedy up to the last "@" of the word: passwords may hold "@" and "/" unescaped.
_URL_CREDENTIALS = re.compile(r"(?<=://)[^\s'\"]*@")
_ASSIGNMENT = re.compile(
    r"""(\b[\w.-]*(?:token|passw(?:or)?d|secret|authorization|api_key)["']?\s*[:=]\s*)"""
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?:bearer\s+)?[^\s&,;'"]+)""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]+", re.IGNORECASE)


def redact_text(text: str) -> str:
    """``text`` with credentials in URLs and the values of secret-looking assignments masked."""
    if _HINT.search(text) is None:
        return text
    text = _URL_CREDENTIALS.sub(f"{MASK}@", text)
    text = _ASSIGNMENT.sub(rf"\1{MASK}", text)
    return _BEARER.sub(rf"\1{MASK}", text)


def mask_url(url: str) -> str:
    """``url`` without its credentials, for people and logs."""
    before, at, host = url.rpartition("@")
    scheme = before.partition("://")[0] + "://" if "://" in before else ""
    return redact_text(f"{scheme}{MASK}@{host}" if at else url)


def redact(value: Any) -> Any:
    """``value`` with every secret in it masked, through mappings and sequences; other types pass as they are."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: MASK if _is_secret(key) else redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(item) for item in value]
    return value


def _is_secret(key: object) -> bool:
    return isinstance(key, str) and key.lower() in SECRET_KEYS
