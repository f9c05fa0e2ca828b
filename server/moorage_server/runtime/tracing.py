"""OpenTelemetry traces: a span per unary call, and one per script that it runs. Imported only where asked for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.validation import DEFAULT_POOL

_DECISIONS = {int(n): name.removeprefix("DECISION_").lower() for name, n in pb.Decision.items()}
_REASONS = {int(n): name.removeprefix("HOLD_REASON_") for name, n in pb.HoldReason.items()}
#: How long sending may take, seconds: an absent collector must not keep a server from its end.
_SEND_S = 3
#: Codes that tell of a fault of the server; the others are the caller's.
_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}

Behaviour = Callable[[Any, Any], Awaitable[Any]]


class Tracing:
    """Makes spans with one provider, whose exporter works in a thread of its own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("moorage")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Traces for a collector that takes OTLP over gRPC. The SDK's OTEL_* variables apply."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "moorage"}))
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_SEND_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def traced(self, method: str, behaviour: Behaviour) -> Behaviour:
        """``behaviour`` of a unary method, in a span that continues the caller's trace (W3C traceparent)."""
        service, _, rpc = method.removeprefix("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": rpc}
        name = f"{service}/{rpc}"

        async def call(data: Any, context: Any) -> Any:
            metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            with self._tracer.start_as_current_span(
                name,
                self._propagator.extract(metadata),
                SpanKind.SERVER,
                attributes,
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                try:
                    response = await behaviour(data, context)
                except BaseException:
                    _failed(span, context)
                    raise
                _answered(span, response)
                return response

        return call

    def seen(self, request: Any) -> None:
        """Names the pool in the span of the call under way."""
        trace.get_current_span().set_attribute("moorage.pool", getattr(request, "pool", "") or DEFAULT_POOL)

    def began(self, method: str, request: Any, metadata: Any) -> trace.Span:
        """A span for one call of a stream, which continues the stream's trace."""
        service, _, rpc = method.removeprefix("/").partition("/")
        carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
        return self._tracer.start_span(
            f"{service}/{rpc}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": rpc,
                "moorage.pool": getattr(request, "pool", "") or DEFAULT_POOL,
            },
        )

    def within(self, span: trace.Span) -> AbstractContextManager[Any]:
        """Makes the span the current one, for the scripts that the call runs alone; those it shares have no span."""
        return trace.use_span(span, record_exception=False, set_status_on_exception=False)

    def ended(self, span: trace.Span, response: Any, code: grpc.StatusCode) -> None:
        """Ends the span of one call of a stream; ``response`` None where it failed."""
        if response is None:
            _failed_with(span, code)
        else:
            _answered(span, response)
        span.end()

    def script(self, name: str, seconds: float) -> None:
        """A script call of the call under way has ended. Scripts that nobody called for have no span."""
        if not trace.get_current_span().is_recording():
            return
        ended = time.time_ns()
        started = ended - int(seconds * 1e9)
        span = self._tracer.start_span(f"script {name}", kind=SpanKind.CLIENT, start_time=started)
        span.set_attribute("db.system", "redis")
        span.end(ended)

    def stop(self) -> None:
        """Sends what is left. Blocks."""
        self._provider.shutdown()


def _answered(span: trace.Span, response: Any) -> None:
    span.set_attribute("rpc.grpc.status_code", 0)
    if isinstance(response, pb.AdmitResponse | pb.PlaceResponse):
        span.set_attribute("moorage.decision", _DECISIONS.get(response.decision, ""))
        span.set_attribute("moorage.workload_class", response.workload_class)
        if response.HasField("hold"):
            span.set_attribute("moorage.reason", _REASONS.get(response.hold.reason, ""))


def _failed(span: trace.Span, context: Any) -> None:
    code = context.code()
    if isinstance(code, int):
        code = next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.UNKNOWN)
    # Without a code it was cancelled.
    _failed_with(span, code or grpc.StatusCode.CANCELLED)


def _failed_with(span: trace.Span, code: grpc.StatusCode) -> None:
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code in _FAULTS:
        span.set_status(Status(StatusCode.ERROR, code.name))
