"""Who may call: the credentials' file and the configured certificates. Tokens become hashes here and go no further."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from moorage_server.api.callers import Caller, Callers, Rate, token_digest
from moorage_server.runtime.security_settings import AuthSettings, Credential, Grant
from moorage_server.runtime.settings_sources import SettingsError, read_yaml

_ENTRIES: TypeAdapter[list[Credential]] = TypeAdapter(list[Credential])


def read_callers(auth: AuthSettings) -> Callers:
    """All callers. Raises SettingsError with every problem; none of them quotes a token."""
    book = _Book()
    for name, grant in auth.certificates.items():
        book.add(_caller(grant.name or name, grant), f"auth.certificates.{name}", certificate=name)
    if auth.tokens_file is not None:
        for number, entry in enumerate(_entries(auth.tokens_file)):
            digest = _digest(entry)
            book.add(_caller(entry.name, entry), f"{auth.tokens_file}: {number}", digest, entry.certificate)
    if book.problems:
        raise SettingsError(*book.problems)
    return Callers(book.tokens, book.certificates)


class _Book:
    """Callers as they are read, and what contradicts itself in them."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, Caller] = {}
        self.certificates: dict[str, Caller] = {}
        self.problems: list[str] = []
        self._by_name: dict[str, Caller] = {}

    def add(self, caller: Caller, where: str, digest: bytes | None = None, certificate: str | None = None) -> None:
        if self._by_name.setdefault(caller.name, caller) != caller:
            self.problems.append(f"{where}: another entry of the name {caller.name!r} grants something else")
        if digest is not None:
            if digest in self.tokens:
                self.problems.append(f"{where}: the token is in another entry as well")
            self.tokens[digest] = caller
        if certificate is not None:
            if certificate in self.certificates:
                self.problems.append(f"{where}: the certificate {certificate!r} is in another entry as well")
            self.certificates[certificate] = caller


def _entries(name: str) -> list[Credential]:
    data: Any = read_yaml(name)
    try:
        return _ENTRIES.validate_python([] if data is None else data)
    except ValidationError as error:
        # Neither the input nor the error itself: both may hold a token.
        told = [(".".join(str(part) for part in one["loc"]), one) for one in error.errors(include_input=False)]
    raise SettingsError(*(f"{name}: {path or 'must be a list'}: {_complaint(one)}" for path, one in told))


def _complaint(details: Any) -> str:
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    return str(details["msg"])


def _digest(entry: Credential) -> bytes | None:
    if entry.token is not None:
        return token_digest(entry.token.get_secret_value())
    if entry.token_sha256 is not None:
        return bytes.fromhex(entry.token_sha256.get_secret_value())
    return None


def _caller(name: str, grant: Grant) -> Caller:
    def listed(values: tuple[str, ...] | None) -> frozenset[str] | None:
        return None if values is None else frozenset(values)

    limit = grant.rate_limit
    rate = None if limit is None else Rate(limit.calls_per_s, limit.burst or max(1.0, limit.calls_per_s))
    roles = frozenset(grant.roles)
    return Caller(name, roles, listed(grant.pools), listed(grant.classes), listed(grant.tenants), rate)
