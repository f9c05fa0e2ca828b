"""From failures to ``google.rpc.Status``: the one place that knows status codes and error details.

The details travel in a ``grpc-status-details-bin`` trailer written here, because ``context.abort_with_status`` drops
trailers that were set before, the retry pushback among them.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moorage.v1.scheduler_pb2 import CallError
from moorage_server import errors
from moorage_server.api.validation import pool_of
from moorage_server.errors import InvalidField, MoorageFailure, shorten

_log = structlog.get_logger("moorage.api")

DOMAIN = "moorage.v1"
DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"

#: Peers may drop trailers of more than 8 KiB: the list of violations ends before that.
_DETAILS_BYTES = 3_072
_METADATA_VALUE_CHARACTERS = 256

CODES: dict[str, grpc.StatusCode] = {
    errors.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    errors.REQUEST_ID_REUSED: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SESSION_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    errors.POOL_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    errors.INSTANCE_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    errors.LEASE_STALE: grpc.StatusCode.ABORTED,
    errors.WRONG_STATE: grpc.StatusCode.FAILED_PRECONDITION,
    errors.STORE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    errors.NOT_SUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    errors.CREDENTIAL_MISSING: grpc.StatusCode.UNAUTHENTICATED,
    errors.CREDENTIAL_INVALID: grpc.StatusCode.UNAUTHENTICATED,
    errors.ROLE_MISSING: grpc.StatusCode.PERMISSION_DENIED,
    errors.POOL_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    errors.CLASS_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    errors.TENANT_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    errors.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SERVER_DRAINING: grpc.StatusCode.UNAVAILABLE,
    errors.CALL_CANCELLED: grpc.StatusCode.CANCELLED,
    errors.INTERNAL: grpc.StatusCode.INTERNAL,
}


class RpcStatus(NamedTuple):
    """What an RPC ends with."""

    code: grpc.StatusCode
    details: str
    trailers: tuple[tuple[str, str | bytes], ...]


def status_of(failure: MoorageFailure) -> RpcStatus:
    """The status for ``failure``: code by its reason (INTERNAL for one without a code), details, and trailers."""
    status = _status(failure)
    pushback: tuple[tuple[str, str | bytes], ...] = ()
    if failure.retry_after_s is not None:
        pushback = ((PUSHBACK_TRAILER, str(_milliseconds(failure.retry_after_s))),)
    return RpcStatus(code_of(failure), failure.message, ((DETAILS_TRAILER, status.SerializeToString()), *pushback))


def code_of(failure: MoorageFailure) -> grpc.StatusCode:
    """The status code of ``failure``."""
    return CODES.get(failure.reason, grpc.StatusCode.INTERNAL)


def call_error(failure: MoorageFailure) -> CallError:
    """The same for one call of a stream."""
    # The fields of one are those of the other.
    return CallError.FromString(_status(failure).SerializeToString())


def _status(failure: MoorageFailure) -> status_pb2.Status:
    status = status_pb2.Status(code=code_of(failure).value[0], message=failure.message)
    metadata = {key: shorten(value, _METADATA_VALUE_CHARACTERS) for key, value in failure.metadata.items()}
    _attach(status, error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN, metadata=metadata))
    if isinstance(failure, InvalidField):
        _attach(status, _bad_request(failure, _DETAILS_BYTES - status.ByteSize()))
    elif failure.retry_after_s is not None:
        milliseconds = _milliseconds(failure.retry_after_s)
        delay = duration_pb2.Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], failure: MoorageFailure) -> NoReturn:
    """Ends the RPC with the status for ``failure``."""
    await context.abort(*status_of(failure))


def hidden(error: BaseException, rpc: str, request: Any) -> MoorageFailure:
    """Logs what nobody expected, once; what the caller learns of it."""
    correlation_id = uuid.uuid4().hex
    _log.error(
        "unexpected exception",
        exc_info=error,
        rpc=rpc,
        pool=pool_of(request) if request is not None else None,
        session=getattr(request, "session_id", None),
        correlation_id=correlation_id,
    )
    return internal(correlation_id)


def internal(correlation_id: str) -> MoorageFailure:
    """What a caller learns of an unexpected exception: an id to find it by in the server's log."""
    return MoorageFailure(
        errors.INTERNAL, f"internal error, correlation id {correlation_id}", {"correlation_id": correlation_id}
    )


def _attach(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _bad_request(failure: InvalidField, room: int) -> error_details_pb2.BadRequest:
    """The violations in order, as many as fit into ``room`` bytes, at least one."""
    request = error_details_pb2.BadRequest()
    for violation in failure.violations:
        request.field_violations.add(
            field=violation.field, description=f"must be {violation.limit}, got {violation.value!r}"
        )
        if request.ByteSize() > room and len(request.field_violations) > 1:
            del request.field_violations[-1]
            break
    return request
