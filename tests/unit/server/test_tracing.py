"""Spans of calls and of the scripts they run, by an exporter that keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc
from moorage_server.core.config import PoolConfig
from moorage_server.errors import StoreUnavailable
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.main import Services
from moorage_server.runtime.server import MoorageServer
from moorage_server.runtime.settings import Settings
from moorage_server.runtime.tracing import Tracing
from moorage_server.store.connect import open_store

ADMIT = "moorage.v1.SchedulerService/Admit"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)


class Rig:
    """A traced server, and what it exported."""

    def __init__(self, control: ControlPlane, exporter: InMemorySpanExporter, scheduler: Any) -> None:
        self.control, self.scheduler = control, scheduler
        self._exporter = exporter

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def children(self, parent: ReadableSpan) -> set[str]:
        return {
            span.name
            for span in self._exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        }


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    store = await open_store(None, embedded=True)
    store.meter.listener = tracing.script
    control = ControlPlane(store, {"p": PoolConfig(epoch_interval_s=0.1)})
    services = Services(control)
    settings = Settings(listen="127.0.0.1:0")
    server = MoorageServer(settings, services.register, store.ping, None, control.meters, tracing)
    address = server.bind()
    await store.name("p")
    await control.start()
    await server.start()
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    try:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield Rig(control, exporter, scheduler_pb2_grpc.SchedulerServiceStub(channel))
    finally:
        await server.stop(services.drain)
        await store.close()
        tracing.stop()


async def test_a_call_continues_its_callers_trace() -> None:
    async with rig() as r:
        request = pb.AdmitRequest(pool="p", session_id="s", workload_class="rlvr")
        await r.scheduler.Admit(request, metadata=TRACEPARENT)
        (span,) = r.spans(ADMIT)
        children = r.children(span)
    assert (span.context.trace_id, span.parent and span.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert span.kind is SpanKind.SERVER
    assert dict(span.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": "moorage.v1.SchedulerService",
        "rpc.method": "Admit",
        "rpc.grpc.status_code": 0,
        "moorage.pool": "p",
        "moorage.workload_class": "rlvr",
        "moorage.decision": "hold",
        "moorage.reason": "NO_INSTANCE",
    }
    assert "script admit" in children


async def test_a_call_without_a_trace_begins_one_and_so_does_the_next() -> None:
    async with rig() as r:
        for name in ("s", "t"):
            await r.scheduler.Admit(pb.AdmitRequest(pool="p", session_id=name))
        first, second = r.spans(ADMIT)
    assert first.parent is None
    assert first.context.trace_id != second.context.trace_id


async def test_scripts_that_nobody_called_for_have_no_span(eventually: Any) -> None:
    async with rig() as r:

        async def epochs() -> bool:
            return r.control.meters.epochs["p"] > 1

        await eventually(epochs)
        assert r.spans("script tick") == []


@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [(None, 3, StatusCode.UNSET), (StoreUnavailable(), 14, StatusCode.ERROR)],
)
async def test_a_failure_is_the_servers_or_the_callers(
    failure: Exception | None, code: int, status: StatusCode, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    async def away(*_: Any, **__: Any) -> Any:
        raise failure or AssertionError("an empty session_id is refused before")

    async with rig() as r:
        monkeypatch.setattr(r.control.store, "admit", away)
        with pytest.raises(grpc.aio.AioRpcError):
            await r.scheduler.Admit(pb.AdmitRequest(pool="p", session_id="s" if failure else ""))

        async def spans() -> list[ReadableSpan]:
            # The caller may hear of the failure before the span ends.
            return r.spans(ADMIT)

        (span,) = await eventually(spans)
    assert (span.attributes or {})["rpc.grpc.status_code"] == code
    assert span.status.status_code is status
    assert not span.events, "what went wrong inside is not for the trace"
