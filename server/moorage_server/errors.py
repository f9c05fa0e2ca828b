"""What can go wrong with a call, in the words of the domain. ``api.errors`` turns these into statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

INVALID_FIELD = "INVALID_FIELD"
REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
SESSION_UNKNOWN = "SESSION_UNKNOWN"
POOL_UNKNOWN = "POOL_UNKNOWN"
INSTANCE_UNKNOWN = "INSTANCE_UNKNOWN"
LEASE_STALE = "LEASE_STALE"
WRONG_STATE = "WRONG_STATE"
STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
NOT_SUPPORTED = "NOT_SUPPORTED"
CREDENTIAL_MISSING = "CREDENTIAL_MISSING"
CREDENTIAL_INVALID = "CREDENTIAL_INVALID"
ROLE_MISSING = "ROLE_MISSING"
POOL_FORBIDDEN = "POOL_FORBIDDEN"
CLASS_FORBIDDEN = "CLASS_FORBIDDEN"
TENANT_FORBIDDEN = "TENANT_FORBIDDEN"
RATE_LIMITED = "RATE_LIMITED"
SERVER_DRAINING = "SERVER_DRAINING"
CALL_CANCELLED = "CALL_CANCELLED"
INTERNAL = "INTERNAL"

#: Characters of a refused value that an error repeats.
VALUE_CHARACTERS = 64


def shorten(value: object, characters: int = VALUE_CHARACTERS) -> str:
    """``value`` as text of at most ``characters`` characters; a cut one ends in three dots."""
    text = str(value)
    return text if len(text) <= characters else text[: characters - 3] + "..."


class MoorageFailure(Exception):
    """A call that can not be answered. ``reason`` is stable and machine-readable, as is each key of ``metadata``.

    ``retry_after_s``: seconds after which a retry has a chance, where one has.
    """

    retry_after_s: float | None = None

    def __init__(self, reason: str, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})


@dataclass(frozen=True, slots=True)
class Violation:
    """One field out of its limits. ``limit`` completes the sentence "must be ..."."""

    field: str
    value: str
    limit: str

    @classmethod
    def of(cls, field: str, value: object, limit: str) -> Violation:
        """A violation whose name and value are cut to what an error may repeat."""
        return cls(shorten(field, 2 * VALUE_CHARACTERS), shorten(value), limit)

    def __str__(self) -> str:
        return f"{self.field}: must be {self.limit}, got {self.value!r}"


class InvalidField(MoorageFailure):
    """One or more fields of a request are out of their limits; ``violations`` lists all of them."""

    def __init__(self, field: str, value: object, limit: str, *more: Violation) -> None:
        first = Violation.of(field, value, limit)
        metadata = {"field": first.field, "value": first.value, "limit": first.limit}
        message = str(first)
        if more:
            metadata["more"] = str(len(more))
            message += f" (and {len(more)} more)"
        super().__init__(INVALID_FIELD, message, metadata)
        self.violations = (first, *more)

    @classmethod
    def collected(cls, violations: Sequence[Violation]) -> InvalidField:
        """One failure for several violations (at least one). The first one gives the message and the metadata."""
        first, *more = violations
        return cls(first.field, first.value, first.limit, *more)


class RequestIdReused(MoorageFailure):
    """The request_id came before, with another body."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            REQUEST_ID_REUSED,
            f"request_id {request_id!r} was used before for another request",
            {"request_id": request_id},
        )


class PoolUnknown(MoorageFailure):
    """No snapshot and no configuration ever named the pool."""

    def __init__(self, pool: str) -> None:
        super().__init__(POOL_UNKNOWN, f"pool {pool!r} is not known", {"pool": pool})


class SessionUnknown(MoorageFailure):
    """The session never lived in the pool, or is over."""

    def __init__(self, pool: str, session_id: str) -> None:
        super().__init__(
            SESSION_UNKNOWN,
            f"session {session_id!r} is not known in pool {pool!r}",
            {"pool": pool, "session_id": session_id},
        )


class InstanceUnknown(MoorageFailure):
    """The pool has no such instance, or no such rank of it."""

    def __init__(self, pool: str, instance_id: str, dp_rank: int | None = None) -> None:
        metadata = {"pool": pool, "instance_id": instance_id}
        name = repr(instance_id)
        if dp_rank is not None:
            metadata["dp_rank"] = str(dp_rank)
            name += f" rank {dp_rank}"
        super().__init__(INSTANCE_UNKNOWN, f"instance {name} is not known in pool {pool!r}", metadata)


class LeaseStale(MoorageFailure):
    """The lease token was never issued to the session, or a newer one was. The token itself is never repeated."""

    def __init__(self, pool: str, session_id: str) -> None:
        super().__init__(
            LEASE_STALE,
            f"the lease token is not the one in force for session {session_id!r} in pool {pool!r}",
            {"pool": pool, "session_id": session_id},
        )


class WrongState(MoorageFailure):
    """The call makes no sense in the state that its object is in."""

    def __init__(self, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(WRONG_STATE, message, metadata)


class StoreUnavailable(MoorageFailure):
    """The store does not answer."""

    def __init__(self, retry_after_s: float = 1.0, message: str = "the store is unreachable") -> None:
        super().__init__(STORE_UNAVAILABLE, message, {"retry_after_s": f"{retry_after_s:g}"})
        self.retry_after_s = retry_after_s


class ServerDraining(MoorageFailure):
    """The server ends: what it has read is answered, the rest goes to another one, or to the next."""

    retry_after_s = 0.05

    def __init__(self) -> None:
        super().__init__(SERVER_DRAINING, "the server ends: go on over a new stream")


class CallCancelled(MoorageFailure):
    """Nobody waits for the call any more, and it left nothing behind."""

    def __init__(self) -> None:
        super().__init__(CALL_CANCELLED, "the caller has cancelled the call")


class NotSupported(MoorageFailure):
    """The call is part of the API, and this server does not do it."""

    def __init__(self, method: str) -> None:
        super().__init__(NOT_SUPPORTED, f"{method} is not supported by this server", {"method": method})


class Unauthenticated(MoorageFailure):
    """Nobody knows who calls. A credential is never repeated."""


class Forbidden(MoorageFailure):
    """The credential does not allow the call."""


class RateLimited(MoorageFailure):
    """The caller is faster than its credential allows."""

    def __init__(self, caller: str, calls_per_s: float, retry_after_s: float) -> None:
        super().__init__(
            RATE_LIMITED,
            f"{caller!r} may make {calls_per_s:g} calls per second at each server",
            {"caller": caller, "calls_per_s": f"{calls_per_s:g}", "retry_after_s": f"{retry_after_s:.3f}"},
        )
        self.retry_after_s = retry_after_s
