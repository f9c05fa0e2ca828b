"""Errors as people and scripts see them: code, reason, field violations and a hint on stderr, an exit code behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import click

from moorage.cli import exits
from moorage.cli.cells import printable

if TYPE_CHECKING:
    import grpc
    from google.protobuf.any_pb2 import Any as AnyMessage

#: What to do next, by ErrorInfo reason.
_HINT_BY_REASON = {
    "SESSION_UNKNOWN": "`moorage get sessions` lists the sessions of the pool",
    "POOL_UNKNOWN": "name a pool with --pool; a pool exists once an instance reports or it is configured",
    "INSTANCE_UNKNOWN": "`moorage get instances` lists the instances of the pool",
    "LEASE_STALE": "another call moved or re-admitted the session: take the token of the last answer, or admit again",
    "REQUEST_ID_REUSED": "leave --request-id out, or repeat the call unchanged",
    "STORE_UNAVAILABLE": "the server runs, but its store does not answer; see `moorage ping`",
}
#: The same by status code, where the reason says nothing.
_HINT_BY_STATUS = {
    "UNAVAILABLE": "is `moorage serve` running at {server}? Name the server with --server or MOORAGE_SERVER",
    "DEADLINE_EXCEEDED": "allow more time with --timeout",
    "UNAUTHENTICATED": "give a token with MOORAGE_TOKEN, --token or --token-file, or a certificate with --cert",
    "PERMISSION_DENIED": "the credential does not allow this call",
    "UNIMPLEMENTED": "the server at {server} is not moorage, or another version",
    "OUT_OF_RANGE": "events that old are gone: start over with --since-start",
}
#: The same by what gRPC says of a connection that does not come about.
_HINT_BY_TEXT = {
    "Socket closed": "the server at {server} hangs up: where it has TLS, give --ca, or --tls where its CA is a public "
    "one, and --cert and --key where it asks for them",
    "CERTIFICATE_VERIFY_FAILED": "the certificate of {server} is not trusted: name its CA with --ca or MOORAGE_CA",
    "WRONG_VERSION_NUMBER": "{server} speaks no TLS: leave out --tls, --ca and --cert (MOORAGE_TLS, MOORAGE_CA, ...)",
}


class CliError(click.ClickException):
    """An error with an exit code and further lines; click prints it and leaves with the code."""

    def __init__(self, message: str, exit_code: int = exits.ERROR, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]
        self.details = tuple(details)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error, one line each for the message and the details, to stderr."""
        click.echo(f"error: {self.message}", file=file, err=file is None)
        for line in self.details:
            click.echo(f"  {line}", file=file, err=file is None)


class Interrupted(CliError):
    """Ctrl-C: leaves with 130 and says nothing."""

    def __init__(self) -> None:
        super().__init__("interrupted", exits.INTERRUPTED)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print nothing."""


class RpcFailure(CliError):
    """A call that failed; `status` is the name of its gRPC code, `retry_after` the server's advice in seconds."""

    def __init__(
        self, status: str, message: str, details: Sequence[str] = (), *, retry_after: float | None = None
    ) -> None:
        super().__init__(message, exits.BY_STATUS.get(status, exits.ERROR), details)
        self.status = status
        self.retry_after = retry_after


def from_rpc(error: grpc.RpcError, server: str) -> RpcFailure:
    """Read a failed call: status, and the google.rpc details that came along."""
    from google.rpc import error_details_pb2 as kinds  # type: ignore[import-untyped]

    status: str = error.code().name
    info, violations, retry = kinds.ErrorInfo(), kinds.BadRequest(), kinds.RetryInfo()
    for packed in _packed_details(error):
        for kind in (info, violations, retry):
            if packed.Is(kind.DESCRIPTOR):
                packed.Unpack(kind)
    message = f"{status}: {printable(error.details() or 'no message')}"
    lines = []
    if info.reason:
        metadata = "".join(f" {key}={printable(value)}" for key, value in sorted(info.metadata.items()))
        lines.append(f"reason: {info.reason}{metadata}")
    lines += [f"field {v.field}: {printable(v.description)}" for v in violations.field_violations]
    retry_after = retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None
    if retry_after is not None:
        lines.append(f"retry after: {retry_after:g}s")
    known = (text for key, text in _HINT_BY_TEXT.items() if status == "UNAVAILABLE" and key in message)
    hint = _HINT_BY_REASON.get(info.reason) or next(known, None) or _HINT_BY_STATUS.get(status)
    if hint:
        lines.append("hint: " + hint.format(server=server))
    return RpcFailure(status, message, lines, retry_after=retry_after)


def _packed_details(error: grpc.RpcError) -> Sequence[AnyMessage]:
    """The details of google.rpc.Status, which travels in the trailers; none where the failure is local."""
    from google.protobuf.message import DecodeError
    from google.rpc import status_pb2

    for trailer in error.trailing_metadata() or ():
        if trailer.key == "grpc-status-details-bin":
            try:
                status = status_pb2.Status.FromString(trailer.value)
                return tuple(status.details)
            except DecodeError:  # a proxy in between may answer with details of its own making
                return ()
    return ()
