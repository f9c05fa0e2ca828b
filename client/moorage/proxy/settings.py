"""What a proxy is told at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moorage.credentials import Proof
from moorage.proxy.rules import Rules
from moorage.state import OnUnavailable


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Of one request to an engine, in seconds; None means for ever.

    Attributes:
        connect: until the connection stands.
        first_byte: from then until the answer begins, which without streaming is when all is generated.
        idle: between two pieces of an answer.
        total: of the whole, from the placement to the last byte.
    """

    connect: float = 5.0
    first_byte: float | None = 3600.0
    idle: float | None = 600.0
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Where to listen, whom to ask, how long to wait. Times in seconds; ValueError where something makes no sense.

    Attributes:
        listen: HOST:PORT; port 0 takes a free one.
        rules, session_headers, session_fields: see `Identifier`.
        max_hold: longest wait for a place.
        retries: further placements after an engine refused the connection.
        grace: time for running requests at the end.
        leave_sessions: at the end, sessions are left to other processes instead of being released.
        require_token_file: bearer tokens that clients must have one of, one a line; None lets everybody in.
        max_body: largest request, in bytes.
    """

    listen: str
    server: str
    pool: str = "default"
    proof: Proof = field(default_factory=Proof)
    rules: Rules = field(default_factory=Rules)
    session_headers: Sequence[str] = ()
    session_fields: Sequence[str] = ()
    max_hold: float = 300.0
    lease: float | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: int = 2
    on_unavailable: OnUnavailable = "fail"
    fallback: Sequence[str] = ()
    grace: float = 30.0
    leave_sessions: bool = True
    require_token_file: str | None = None
    max_body: int = 64 << 20

    def __post_init__(self) -> None:
        if (self.on_unavailable == "admit") != bool(self.fallback):
            raise ValueError("to admit while moorage is away takes fallback engines, and they are for that only")
        if self.lease is not None and not 1 <= self.lease <= 86_400:
            raise ValueError(f"lease: must be from 1 s to 24 h, not {self.lease:g} s")
        self.address()

    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        host, colon, port = self.listen.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"listen: {self.listen!r} is not HOST:PORT")
        return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)
