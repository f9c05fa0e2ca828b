"""Who may use the proxy."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from aiohttp import web

from moorage.proxy.errors import ProxyError

logger = logging.getLogger("moorage.proxy")


class TokenGate:
    """Lets requests with one of the file's tokens in, one a line; `#` begins a comment. The file may change.

    The token comes as `X-Moorage-Token`, or as `Authorization: Bearer`, which then is the proxy's and goes no further.
    Raises ValueError where the file can not be read, or has no token.
    """

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._stamp: tuple[int, int] | None = None
        self._digests: frozenset[bytes] = frozenset()
        self._read()

    def consumed(self, request: web.Request) -> tuple[str, ...]:
        """Headers that were meant for the proxy, in lower case. Raises ProxyError where the token is wrong."""
        self._refresh()
        if (own := request.headers.get("X-Moorage-Token")) is not None:
            if self._knows(own):
                return ()
        else:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() == "bearer" and self._knows(token.strip()):
                return ("authorization",)
        raise ProxyError(401, "no token, or a wrong one", kind="authentication_error", code="invalid_api_key")

    def _knows(self, token: str) -> bool:
        # Digests are compared: how long that takes says nothing about a token.
        return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest() in self._digests

    def _refresh(self) -> None:
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._stamp:
                self._read()
        except (OSError, ValueError) as error:
            logger.warning("event=token_file_unusable file=%s error=%s", self._file, error)

    def _read(self) -> None:
        try:
            stat = self._file.stat()
            lines = [line.strip() for line in self._file.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._file}: can not be read: {error}") from None
        tokens = [line for line in lines if line and not line.startswith("#")]
        if not tokens:
            raise ValueError(f"{self._file}: has no token")
        self._stamp = (stat.st_mtime_ns, stat.st_size)
        self._digests = frozenset(hashlib.sha256(token.encode()).digest() for token in tokens)
