"""Errors of the client, built from the google.rpc.Status that the server attaches to a failed call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moorage.v1.scheduler_pb2 import CallError, Hold, HoldReason

#: Domain of the reasons that this package knows.
DOMAIN = "moorage.v1"

_STATUS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_HOLD_PREFIX = "HOLD_REASON_"

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One refused field of a request: its path and what is wrong with it."""

    field: str
    description: str


class MoorageError(Exception):
    """Base of all errors of this package.

    Attributes:
        message: what happened, for people.
        code: gRPC status code; None where no call failed (a hold, a rejection, a lease lost in the background).
        reason: stable upper-case reason, such as "LEASE_STALE"; None where the failure did not come from moorage.
        metadata: the values behind the reason.
        retry_after: seconds after which a retry may help; None where nobody said.
        field_violations: the refused fields.

    Example:
        >>> error = MoorageError("the store is away", reason="STORE_UNAVAILABLE", retry_after=0.5)
        >>> error.reason, error.retry_after
        ('STORE_UNAVAILABLE', 0.5)
    """

    def __init__(
        self,
        message: str = "",
        *,
        code: grpc.StatusCode | None = None,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        field_violations: Iterable[FieldViolation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        self.field_violations = tuple(field_violations)

    def __str__(self) -> str:
        label = self.reason or (self.code.name if self.code else None)
        return f"{self.message} [{label}]" if label else self.message


class InvalidArgument(MoorageError):
    """A field was refused; `field_violations` says which. The same request never succeeds."""


class NotFound(MoorageError):
    """What the request names does not exist."""


class SessionUnknown(NotFound):
    """The session was never admitted, or is over."""


class PoolUnknown(NotFound):
    """No snapshot and no configuration ever named the pool."""


class FailedPrecondition(MoorageError):
    """Not in this state."""


class PermissionDenied(MoorageError):
    """The token may not do this."""


class Unauthenticated(MoorageError):
    """No token, or a wrong one."""


class ResourceExhausted(MoorageError):
    """The server is too busy, or a message is too large. Lack of KV capacity is never an error: see `Held`."""


class Unavailable(MoorageError):
    """The control plane, or its store, can not be reached. The call may or may not have taken effect."""


class DeadlineExceeded(Unavailable):
    """No answer in time. The call may or may not have taken effect."""


class LeaseLost(MoorageError):
    """The session's lease is over: expired, evicted, released, or taken over by a newer admission."""


class _Refused(MoorageError):
    """A session did not get in; `hold` says why. `reason` is the hold's, without its prefix ("KV_BUDGET")."""

    def __init__(self, message: str = "", *, hold: Hold | None = None) -> None:
        self.hold = hold or Hold()
        retry = self.hold.retry_after
        super().__init__(
            message,
            reason=hold_reason(self.hold),
            retry_after=retry.ToTimedelta().total_seconds() if self.hold.HasField("retry_after") else None,
        )


class Held(_Refused):
    """The caller's wait is over and the session is still held.

    Attributes:
        hold: the server's last word: reason, position in the queue, what would release the session.

    Example:
        >>> from moorage.v1.scheduler_pb2 import HOLD_REASON_KV_BUDGET, Hold
        >>> Held("sess-1 is held", hold=Hold(reason=HOLD_REASON_KV_BUDGET, position=3)).reason
        'KV_BUDGET'
    """


class Rejected(_Refused):
    """The session can never get in: too large, its class refused, or too stale to be useful.

    Attributes:
        hold: reason and detail.

    Example:
        >>> from moorage.v1.scheduler_pb2 import HOLD_REASON_TOO_LARGE, Hold
        >>> Rejected("sess-1 is rejected", hold=Hold(reason=HOLD_REASON_TOO_LARGE)).reason
        'TOO_LARGE'
    """


_BY_REASON: dict[str, type[MoorageError]] = {
    "LEASE_STALE": LeaseLost,
    "POOL_UNKNOWN": PoolUnknown,
    "SESSION_UNKNOWN": SessionUnknown,
}

_BY_CODE: dict[grpc.StatusCode, type[MoorageError]] = {
    # Nobody on this side cancelled: the server sheds calls of a burst that it has not read yet.
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def hold_reason(hold: Hold) -> str | None:
    """The hold's reason without its prefix; a number that this version does not know as its digits."""
    if not hold.reason:
        return None
    try:
        return HoldReason.Name(hold.reason).removeprefix(_HOLD_PREFIX)
    except ValueError:
        return str(int(hold.reason))


def from_rpc_error(error: grpc.RpcError) -> MoorageError:
    """The error of this package for a failed call, sync or asyncio."""
    trailers: dict[str, str | bytes] = {}
    # Pairs, whatever the stubs say; dict() would take grpc.aio.Metadata for a mapping, which older ones are not.
    for key, value in cast(Any, error.trailing_metadata() or ()):
        trailers[key] = value
    message = error.details() or error.code().name
    return _of_kind(error.code(), message, trailers.get(_STATUS_KEY), trailers.get(_PUSHBACK_KEY))


def from_call_error(error: CallError) -> MoorageError:
    """The error of this package for a failed call of a stream."""
    code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
    # Its fields are those of a google.rpc.Status.
    return _of_kind(code, error.message or code.name, error.SerializeToString(), None)


def _of_kind(
    code: grpc.StatusCode, message: str, raw: str | bytes | None, pushback: str | bytes | None
) -> MoorageError:
    info, bad_request, retry_info = _details(raw)
    reason = info.reason if info and info.domain == DOMAIN else None
    kind = _BY_REASON.get(reason or "") or _BY_CODE.get(code, MoorageError)
    return kind(
        message,
        code=code,
        reason=reason,
        metadata=info.metadata if info else None,
        retry_after=_retry_after(retry_info, pushback),
        field_violations=[FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        if bad_request
        else (),
    )


def _details(
    raw: str | bytes | None,
) -> tuple[error_details_pb2.ErrorInfo | None, error_details_pb2.BadRequest | None, error_details_pb2.RetryInfo | None]:
    """What the status carries; nothing where a proxy or an old peer sent none, or sent rubbish."""
    try:
        status = status_pb2.Status.FromString(raw) if isinstance(raw, bytes) else status_pb2.Status()
        return (
            _unpack(status, error_details_pb2.ErrorInfo()),
            _unpack(status, error_details_pb2.BadRequest()),
            _unpack(status, error_details_pb2.RetryInfo()),
        )
    except DecodeError:
        return None, None, None


def _unpack(status: status_pb2.Status, message: M) -> M | None:
    return next((message for detail in status.details if detail.Unpack(message)), None)


def _retry_after(retry_info: error_details_pb2.RetryInfo | None, pushback: str | bytes | None) -> float | None:
    if retry_info is not None:
        return cast(float, retry_info.retry_delay.ToTimedelta().total_seconds())
    # A negative or malformed pushback means "do not retry", which is no time to wait.
    text = pushback.decode() if isinstance(pushback, bytes) else pushback or ""
    return int(text) / 1000 if text.isdigit() else None
