"""From failures to ``google.rpc.Status``: the one place that knows status codes and error details.

The details travel in a ``grpc-status-details-bin`` trailer written here, because ``context.abort_with_status`` drops
trailers that were set before, the retry pushback among them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moorage_server import errors
from moorage_server.errors import InvalidField, MoorageFailure, shorten

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
    errors.INTERNAL: grpc.StatusCode.INTERNAL,
}


class RpcStatus(NamedTuple):
    """What an RPC ends with."""

    code: grpc.StatusCode
    details: str
    trailers: tuple[tuple[str, str | bytes], ...]


def status_of(failure: MoorageFailure) -> RpcStatus:
    """The status for ``failure``: code by its reason (INTERNAL for one without a code), details, and trailers."""
    code = CODES.get(failure.reason, grpc.StatusCode.INTERNAL)
    status = status_pb2.Status(code=code.value[0], message=failure.message)
    metadata = {key: shorten(value, _METADATA_VALUE_CHARACTERS) for key, value in failure.metadata.items()}
    _attach(status, error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN, metadata=metadata))
    pushback: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(failure, InvalidField):
        _attach(status, _bad_request(failure, _DETAILS_BYTES - status.ByteSize()))
    elif failure.retry_after_s is not None:
        milliseconds = max(1, round(failure.retry_after_s * 1000))
        delay = duration_pb2.Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
        pushback = ((PUSHBACK_TRAILER, str(milliseconds)),)
    return RpcStatus(code, failure.message, ((DETAILS_TRAILER, status.SerializeToString()), *pushback))


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], failure: MoorageFailure) -> NoReturn:
    """Ends the RPC with the status for ``failure``."""
    await context.abort(*status_of(failure))


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
