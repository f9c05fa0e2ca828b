"""What an answer says of the tokens it used: of whole answers, and of streams cut anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

#: An answer, or one event of a stream, beyond this is passed on unread, in bytes.
MAX_READ_BYTES = 16 << 20

_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request; None where the engine does not say, which is not zero."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


def usage_of(message: Any) -> TokenUsage | None:
    """The usage in an answer or an event of any of the three APIs; None where there is none.

    Example:
        >>> usage_of({"usage": {"prompt_tokens": 8, "completion_tokens": 2, "prompt_tokens_details": None}})
        TokenUsage(prompt_tokens=8, cached_tokens=None, output_tokens=2)
    """
    if not isinstance(message, Mapping):
        return None
    usage = message.get("usage")
    if usage is None and isinstance(message.get("response"), Mapping):
        usage = message["response"].get("usage")
    if not isinstance(usage, Mapping):
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return TokenUsage(
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        cached_tokens=_count(details, "cached_tokens") if isinstance(details, Mapping) else None,
        output_tokens=_count(usage, "completion_tokens", "output_tokens"),
    )


def _count(fields: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


class Tap(Protocol):
    """Reads an answer as it passes."""

    usage: TokenUsage | None

    def feed(self, chunk: bytes) -> bytes:
        """Takes what the engine sent; returns what the client gets now."""
        ...

    def end(self) -> bytes:
        """The engine is done; returns what the client still gets."""
        ...


class JsonTap:
    """Of an answer that is one JSON object; it is passed on as it comes."""

    def __init__(self) -> None:
        self.usage: TokenUsage | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> bytes:
        """See `Tap`."""
        self._size += len(chunk)
        if self._size <= MAX_READ_BYTES:
            self._parts.append(chunk)
        else:
            self._parts.clear()
        return chunk

    def end(self) -> bytes:
        """See `Tap`."""
        try:
            self.usage = usage_of(json.loads(b"".join(self._parts))) if self._parts else None
        except ValueError:
            self.usage = None
        return b""


class SseTap:
    """Of a stream of server-sent events, which are passed on whole.

    Args:
        hide_usage: the client did not ask for the last event that has nothing but the usage: it does not get it.

    Example:
        >>> tap = SseTap(hide_usage=True)
        >>> tap.feed(b'data: {"choices":[{"text":"a"}]}\\n\\ndata: {"choices":[],"usa')
        b'data: {"choices":[{"text":"a"}]}\\n\\n'
        >>> tap.feed(b'ge":{"prompt_tokens":3}}\\n\\n'), tap.usage.prompt_tokens
        (b'', 3)
    """

    def __init__(self, *, hide_usage: bool = False) -> None:
        self.usage: TokenUsage | None = None
        self._hide_usage = hide_usage
        self._rest = b""
        self._blind = False

    def feed(self, chunk: bytes) -> bytes:
        """See `Tap`."""
        if self._blind:
            return chunk
        text = self._rest + chunk if self._rest else chunk
        # A boundary may span two chunks, and an event is a few hundred bytes: looking at the rest again is cheap.
        cut = _last_boundary(text)
        whole, self._rest = text[:cut], text[cut:]
        if len(self._rest) > MAX_READ_BYTES:
            # Whatever this is, it shall not fill the memory.
            self._blind, rest, self._rest = True, self._rest, b""
            return self._read(whole) + rest
        return self._read(whole)

    def end(self) -> bytes:
        """See `Tap`. A last event without its blank line counts."""
        rest, self._rest = self._rest, b""
        return self._read(rest)

    def _read(self, events: bytes) -> bytes:
        if b'"usage"' not in events:
            return events
        kept, start = [], 0
        for boundary in (*_BOUNDARY.finditer(events), None):
            end = boundary.end() if boundary else len(events)
            event = events[start:end]
            if event and not self._is_hidden(event):
                kept.append(event)
            start = end
        return b"".join(kept)

    def _is_hidden(self, event: bytes) -> bool:
        if b'"usage"' not in event:
            return False
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        try:
            message = json.loads(b"\n".join(lines))
        except ValueError:
            return False
        usage = usage_of(message)
        self.usage = usage or self.usage
        return self._hide_usage and usage is not None and message.get("choices") == []


def _last_boundary(text: bytes) -> int:
    """Where the last whole event ends; 0 where there is none."""
    if text.endswith(b"\n\n"):
        return len(text)
    ends = (text.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n") if mark in text)
    return max(ends, default=0)
