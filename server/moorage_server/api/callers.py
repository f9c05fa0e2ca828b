"""Callers: who they are, what each role may call, what their credentials limit, and how fast they may go."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

ROUTER, COLLECTOR, OPERATOR, VIEWER = "router", "collector", "operator", "viewer"

#: Server reflection, in whatever version.
REFLECTION = "/grpc.reflection."

_SCHEDULER, _INSPECTOR, _OPERATOR = (f"/moorage.v1.{name}Service/" for name in ("Scheduler", "Inspector", "Operator"))
_PLACING = frozenset({ROUTER, OPERATOR})
_REPORTING = frozenset({ROUTER, COLLECTOR, OPERATOR})
_READING = frozenset({ROUTER, VIEWER, OPERATOR})
_OPERATING = frozenset({OPERATOR})

#: Roles that may call a method. A method that is not listed is an operator's.
METHOD_ROLES: Mapping[str, frozenset[str]] = {
    _SCHEDULER + "Admit": _PLACING,
    _SCHEDULER + "Place": _PLACING,
    _SCHEDULER + "Release": _PLACING,
    # Who may send which of its items is another matter: HEARTBEAT_ROLES.
    _SCHEDULER + "Heartbeat": _REPORTING,
    # All that its items are calls of is open to the same roles.
    _SCHEDULER + "Dispatch": _PLACING,
    _INSPECTOR + "GetPool": _READING,
    _INSPECTOR + "ListInstances": _READING,
    _INSPECTOR + "ListSessions": _READING,
    _INSPECTOR + "GetSession": _READING,
    _INSPECTOR + "ListClasses": _READING,
    _INSPECTOR + "WatchEvents": _READING,
    _OPERATOR + "ConfigurePool": _OPERATING,
    _OPERATOR + "CordonInstance": _OPERATING,
    _OPERATOR + "UncordonInstance": _OPERATING,
    _OPERATOR + "DrainInstance": _OPERATING,
    _OPERATOR + "BeginWeightUpdate": _OPERATING,
    _OPERATOR + "EndWeightUpdate": _OPERATING,
    _OPERATOR + "EvictSession": _OPERATING,
}

#: Roles that may send what a Heartbeat holds.
HEARTBEAT_ROLES: Mapping[str, frozenset[str]] = {
    "sessions": frozenset({ROUTER, OPERATOR}),
    "instances": frozenset({COLLECTOR, OPERATOR}),
    "prefixes": frozenset({COLLECTOR, OPERATOR}),
}


def roles_for(method: str) -> frozenset[str]:
    """Roles that may call ``method``, a full name such as "/moorage.v1.SchedulerService/Admit"."""
    if method.startswith(REFLECTION):
        return _READING
    return METHOD_ROLES.get(method, _OPERATING)


#: Bytes of a hash by which it is found.
_PREFIX = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """Calls per second in the long run, and calls at once."""

    calls_per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Caller:
    """Who holds a credential, and what it grants. A list that is None does not limit."""

    name: str
    roles: frozenset[str]
    pools: frozenset[str] | None = None
    classes: frozenset[str] | None = None
    tenants: frozenset[str] | None = None
    rate: Rate | None = None


def token_digest(token: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


class Callers:
    """All callers: by the SHA-256 of their tokens, and by the names in their certificates."""

    def __init__(self, tokens: Mapping[bytes, Caller], certificates: Mapping[str, Caller]) -> None:
        # Found by a part of the hash, then compared whole in constant time.
        self._tokens = {digest[:_PREFIX]: (digest, caller) for digest, caller in tokens.items()}
        self._certificates = dict(certificates)

    def __len__(self) -> int:
        return len(self._tokens) + len(self._certificates)

    @property
    def certificates(self) -> Collection[str]:
        """The names by which certificates are known."""
        return self._certificates.keys()

    def holding(self, token: str) -> Caller | None:
        """Who holds a token."""
        digest = token_digest(token)
        known, caller = self._tokens.get(digest[:_PREFIX], (b"", None))
        return caller if hmac.compare_digest(known, digest) else None

    def certified(self, names: Iterable[str]) -> Caller | None:
        """Whose certificate has one of the names, the first that anybody has."""
        return next((self._certificates[name] for name in names if name in self._certificates), None)


class TokenBucket:
    """Lets calls through at a rate, and bursts up to what has gathered."""

    __slots__ = ("_at", "_left", "rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self._left = rate.burst
        self._at = now

    def take(self, now: float) -> float:
        """0 where a call may pass at ``now`` (seconds of a monotonic clock), else the seconds until one may."""
        self._left = min(self.rate.burst, self._left + (now - self._at) * self.rate.calls_per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self.rate.calls_per_s
        self._left -= 1
        return 0.0
