"""What a client proves itself with: a bearer token, a certificate, or both.

What a caller does not give comes from the environment: MOORAGE_TOKEN or MOORAGE_TOKEN_FILE; MOORAGE_TLS, MOORAGE_CA,
MOORAGE_CERT and MOORAGE_KEY. A token is sent in clear text to this machine only, unless told otherwise.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

#: Seconds between two looks at a token's file.
LOOK_EVERY = 1.0

_TRUE = ("1", "true", "yes", "on")

logger = logging.getLogger("moorage")


class Token:
    """A bearer token, given as it is or in a file that is read again when it changes. Raises ValueError where unusable.

    Example:
        >>> Token("secret").header()
        ('authorization', 'Bearer secret')
    """

    def __init__(
        self, value: str | None = None, *, file: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._stamp = _stamp(file) if file else None
        self._value = _read(file) if file else _checked(value or "", "the token")

    def __repr__(self) -> str:
        return f"Token(file={self._file!r})" if self._file else "Token(***)"

    def header(self) -> tuple[str, str]:
        """Metadata of a call, by what the file holds now; one that became unusable leaves what it held before."""
        if self._file and self._clock() - self._looked >= LOOK_EVERY:
            self._looked = self._clock()
            self._look(self._file)
        return "authorization", f"Bearer {self._value}"

    def _look(self, file: str) -> None:
        stamp = _stamp(file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._value = _read(file)
        except ValueError as error:
            logger.warning("%s: the old token is kept", error)


def _read(file: str) -> str:
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"token file {file}: can not be read: {error.strerror}") from None
    return _checked(content.decode("ascii", "replace").strip(), f"token file {file}: the token")


def _checked(token: str, name: str) -> str:
    # gRPC would quote the token in its own complaint.
    if not token or any(not "!" <= character <= "~" for character in token):
        raise ValueError(f"{name} must be printable ASCII without blanks, and not empty")
    return token


def _stamp(file: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass(frozen=True, slots=True)
class Proof:
    """What a caller gives to prove itself; absent values come from the environment, see :meth:`resolved`.

    Attributes:
        token: bearer token.
        token_file: file that holds it, read again when it changes.
        tls: use TLS, with the CAs that gRPC trusts; implied by the next two.
        ca: file of CA certificates to trust, PEM.
        cert: file of the client's certificate, PEM, together with `key`.
        key: file of its key, PEM.
        plaintext_token: send the token without TLS to other machines too.
    """

    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    plaintext_token: bool = False

    def resolved(self, environ: Mapping[str, str] = os.environ) -> Proof:
        """The same, completed from the environment. Raises ValueError where it contradicts itself."""

        def said(name: str) -> bool:
            return environ.get(name, "").lower() in _TRUE

        if self.token is not None and self.token_file is not None:
            raise ValueError("give a token or a token file, not both")
        token, token_file = self.token, self.token_file
        if token is None and token_file is None:
            token = environ.get("MOORAGE_TOKEN") or None
            token_file = None if token else environ.get("MOORAGE_TOKEN_FILE") or None
        cert, key = self.cert, self.key
        if cert is None and key is None:
            cert, key = environ.get("MOORAGE_CERT") or None, environ.get("MOORAGE_KEY") or None
        if (cert is None) != (key is None):
            raise ValueError("a client certificate and its key go together")
        ca = self.ca or environ.get("MOORAGE_CA") or None
        tls = self.tls or bool(ca or cert) or said("MOORAGE_TLS")
        plaintext_token = self.plaintext_token or said("MOORAGE_PLAINTEXT_TOKEN")
        return Proof(token, token_file, tls, ca, cert, key, plaintext_token)

    def to_token(self, target: str, secure: bool) -> Token | None:
        """The token for `target`, None where there is none. Raises ValueError where it would travel in clear text."""
        if self.token is None and self.token_file is None:
            return None
        if not (secure or self.plaintext_token or is_local(target)):
            raise ValueError(
                f"the token would travel to {target} in clear text: use TLS, or say plaintext_token"
                " (--plaintext-token, MOORAGE_PLAINTEXT_TOKEN=1) where the network encrypts"
            )
        return Token(self.token, file=self.token_file)

    def to_credentials(self) -> grpc.ChannelCredentials | None:
        """TLS by what the files hold now; None means plain text. Raises ValueError where one can not be read."""
        if not self.tls:
            return None
        import grpc

        ca, key, cert = _content(self.ca), _content(self.key), _content(self.cert)
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _content(file: str | None) -> bytes | None:
    try:
        return Path(file).read_bytes() if file else None
    except OSError as error:
        raise ValueError(f"{file}: can not be read: {error.strerror}") from None


def is_local(target: str) -> bool:
    """Whether a gRPC target is this machine itself.

    Example:
        >>> is_local("127.0.0.1:50061"), is_local("dns:///[::1]:1"), is_local("moorage:50061")
        (True, True, False)
    """
    scheme, colon, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("dns", "ipv4", "ipv6", "passthrough") and colon and not rest.isdecimal():
        target = rest.rpartition("/")[2]
    return all(is_loopback(address) for address in target.split(","))


def is_loopback(address: str) -> bool:
    """Whether an address, HOST:PORT with an IPv6 host in brackets, is one that only this machine reaches."""
    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
