"""The three services on a real gRPC server, with answers that a test sets and requests that it can look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from moorage.v1 import inspector_pb2_grpc, operator_pb2_grpc, scheduler_pb2_grpc

Code = grpc.StatusCode


@dataclass
class Failure:
    """An error to answer with, details included."""

    code: grpc.StatusCode
    message: str = "it failed"
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    violations: dict[str, str] = field(default_factory=dict)
    retry_after_ms: int | None = None
    raw_details: bytes | None = None

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """The google.rpc.Status of the failure."""
        if self.raw_details is not None:
            return (("grpc-status-details-bin", self.raw_details),)
        details: list[Message] = []
        if self.reason:
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain="moorage.v1", metadata=self.metadata))
        if self.violations:
            details.append(
                error_details_pb2.BadRequest(
                    field_violations=[
                        error_details_pb2.BadRequest.FieldViolation(field=name, description=text)
                        for name, text in self.violations.items()
                    ]
                )
            )
        if self.retry_after_ms is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(self.retry_after_ms)
            details.append(retry)
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        return (("grpc-status-details-bin", status.SerializeToString()),)


Answer = Message | Failure | Callable[[Any], Any]


class FakeServer:
    """Answers by method name: a message, a Failure, or a function of the request; for a stream, what to send."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | Iterable[Message | Failure]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.deadlines: list[float | None] = []
        self.health = health.HealthServicer()
        self.address = ""

    def last(self, method: str) -> Any:
        """The last request of `method`."""
        return [request for name, request in self.requests if name == method][-1]

    def count(self, method: str) -> int:
        """Number of calls of `method`."""
        return sum(name == method for name, _ in self.requests)

    def set_health(self, readiness: str) -> None:
        """Alive, and ready or not."""
        self.health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        self.health.set("readiness", health_pb2.HealthCheckResponse.ServingStatus.Value(readiness))

    def __getattr__(self, method: str) -> Callable[[Message, grpc.ServicerContext], Any]:
        if not method[0].isupper():
            raise AttributeError(method)
        return (
            self._stream if method == "WatchEvents" else lambda request, context: self._unary(method, request, context)
        )

    def _unary(self, method: str, request: Message, context: grpc.ServicerContext) -> Message:
        self._record(method, request, context)
        answer = self.answers.get(method, Failure(Code.UNIMPLEMENTED, f"no answer for {method}"))
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Failure):
            _abort(context, answer)
        assert isinstance(answer, Message)
        return answer

    def _stream(self, request: Message, context: grpc.ServicerContext) -> Iterator[Any]:
        self._record("WatchEvents", request, context)
        answer = self.answers["WatchEvents"]
        for item in answer(request) if callable(answer) else answer:  # type: ignore[union-attr]
            if isinstance(item, Failure):
                _abort(context, item)
            yield item

    def _record(self, method: str, request: Message, context: grpc.ServicerContext) -> None:
        copy = type(request)()
        copy.CopyFrom(request)
        self.requests.append((method, copy))
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())


def _abort(context: grpc.ServicerContext, failure: Failure) -> None:
    context.set_trailing_metadata(failure.trailers())
    context.abort(failure.code, failure.message)


@contextmanager
def running(fake: FakeServer, credentials: grpc.ServerCredentials | None = None) -> Iterator[FakeServer]:
    """Serve `fake` on a free port of the loopback."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)  # type: ignore[arg-type]
    inspector_pb2_grpc.add_InspectorServiceServicer_to_server(fake, server)  # type: ignore[arg-type]
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(fake, server)  # type: ignore[arg-type]
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    fake.address = f"127.0.0.1:{port}"
    try:
        yield fake
    finally:
        server.stop(0).wait()
