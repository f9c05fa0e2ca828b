"""What callers get of failures, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from structlog.testing import capture_logs

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import inspector_pb2_grpc, scheduler_pb2_grpc
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.decision_log import DecisionLog
from moorage_server.api.interceptors import CallInterceptor
from moorage_server.api.rpc_stats import EDGES_S, MethodStats, RpcStats
from moorage_server.errors import InvalidField, LeaseStale, SessionUnknown, StoreUnavailable

ADMIT = "/moorage.v1.SchedulerService/Admit"
WATCH = "/moorage.v1.InspectorService/WatchEvents"

RETRYING = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 2, "initialBackoff": "0.01s",
 "maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Fails as it is told to."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.calls = 0
        self.entered = asyncio.Event()

    async def Admit(self, request: pb.AdmitRequest, context: Any) -> pb.AdmitResponse:
        self.calls += 1
        self.entered.set()
        if self.failures:
            raise self.failures.pop()
        if request.session_id == "aborts":
            await context.abort(grpc.StatusCode.DATA_LOSS, "own words")
        if request.session_id == "waits":
            await asyncio.sleep(60)
        return pb.AdmitResponse(decision=pb.DECISION_PLACE, placement=pb.Placement(instance_id="i"))


class Inspector(inspector_pb2_grpc.InspectorServiceServicer):
    """Streams two events, then fails if told to."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.closed = asyncio.Event()

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[ipb.WatchEventsResponse]:
        try:
            for kind in ("a", "b"):
                yield ipb.WatchEventsResponse(kind=kind)
            if self.failure is not None:
                raise self.failure
            if request.resume_token == "stay":
                await asyncio.sleep(60)
        finally:
            self.closed.set()


class Rig:
    """A server with the interceptor, and stubs to call it with."""

    def __init__(self, stats: RpcStats, scheduler: Scheduler, inspector: Inspector, channel: grpc.aio.Channel) -> None:
        self.stats = stats
        self.scheduler = scheduler
        self.inspector = inspector
        self.channel = channel
        self.admit: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel).Admit
        self.place: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel).Place
        self.watch: Any = inspector_pb2_grpc.InspectorServiceStub(channel).WatchEvents


@asynccontextmanager
async def rig(config: str | None = None) -> AsyncIterator[Rig]:
    stats, scheduler, inspector = RpcStats(), Scheduler(), Inspector()
    server = grpc.aio.server(interceptors=[CallInterceptor(stats, DecisionLog("all"))])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    inspector_pb2_grpc.add_InspectorServiceServicer_to_server(inspector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.service_config", config)] if config else [("grpc.enable_retries", 0)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield Rig(stats, scheduler, inspector, channel)
    finally:
        await server.stop(None)


def info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    found = error_details_pb2.ErrorInfo()
    assert any(packed.Unpack(found) for packed in status.details)
    return found


def counts(stats: MethodStats) -> dict[str, int]:
    return dict(stats.calls)


@pytest.mark.parametrize(
    ("failure", "code", "reason"),
    [
        (InvalidField("session_id", "", "1 to 256 bytes"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (SessionUnknown("p", "é{}"), grpc.StatusCode.NOT_FOUND, "SESSION_UNKNOWN"),
        (LeaseStale("p", "s"), grpc.StatusCode.ABORTED, "LEASE_STALE"),
    ],
)
async def test_a_failure_arrives_as_its_status(failure: Exception, code: grpc.StatusCode, reason: str) -> None:
    async with rig() as r:
        r.scheduler.failures = [failure]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.admit(pb.AdmitRequest(session_id="s"))
        assert caught.value.code() is code
        assert caught.value.details() == str(failure)
        assert info(caught.value).reason == reason
        await until(lambda: counts(r.stats.of(ADMIT)) == {code.name: 1})


@pytest.mark.parametrize("data", [b"\x1a\x02\xff\xfe", b"\xff\xff\xff"])
async def test_bytes_that_are_no_request_are_the_callers_fault(data: bytes) -> None:
    """A session_id that is no UTF-8, and garbage."""
    async with rig() as r:
        raw = r.channel.unary_unary(ADMIT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info(caught.value).reason == "INVALID_FIELD"
        assert r.scheduler.calls == 0


async def test_the_pushback_trailer_arrives() -> None:
    async with rig() as r:
        r.scheduler.failures = [StoreUnavailable(0.3)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.admit(pb.AdmitRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "300"
        assert info(caught.value).reason == "STORE_UNAVAILABLE"


async def test_the_pushback_is_honoured_by_a_retrying_client() -> None:
    async with rig(RETRYING) as r:
        r.scheduler.failures = [StoreUnavailable(0.3)]
        started = time.monotonic()
        response = await r.admit(pb.AdmitRequest())
        assert response.decision == pb.DECISION_PLACE
        assert r.scheduler.calls == 2
        assert time.monotonic() - started >= 0.28, "the policy's own backoff is 0.01 s"


async def test_the_longest_error_still_arrives() -> None:
    async with rig() as r:
        r.scheduler.failures = [InvalidField("labels[" + "😀" * 64, "😀" * 300, "short")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.admit(pb.AdmitRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info(caught.value).metadata["value"] == "😀" * 61 + "..."


async def test_the_unexpected_is_logged_once_and_hidden() -> None:
    async with rig() as r:
        r.scheduler.failures = [RuntimeError("hush: internals")]
        with capture_logs() as events, pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.admit(pb.AdmitRequest(pool="p", session_id="s"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "hush" not in str(caught.value)
        (event,) = [e for e in events if e["log_level"] == "error"]
        assert info(caught.value).metadata["correlation_id"] == event["correlation_id"]
        assert event["correlation_id"] in (caught.value.details() or "")
        assert (event["rpc"], event["pool"], event["session"]) == ("Admit", "p", "s")
        assert isinstance(event["exc_info"], RuntimeError)


async def test_a_handler_may_abort_by_itself() -> None:
    async with rig() as r:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.admit(pb.AdmitRequest(session_id="aborts"))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "own words")
        await until(lambda: counts(r.stats.of(ADMIT)) == {"DATA_LOSS": 1})


async def test_success_is_counted_and_logged() -> None:
    async with rig() as r:
        with capture_logs() as events:
            for _ in range(3):
                await r.admit(pb.AdmitRequest(session_id="s"))
        stats = r.stats.of(ADMIT)
        await until(lambda: counts(stats) == {"OK": 3})
        assert stats.latencies["OK"].total > 0
        assert stats.under_way == 0
        assert [e["event"] for e in events] == ["Admit"] * 3
        assert all(e["latency_ms"] > 0 for e in events)


async def test_a_cancelled_call_is_counted_as_such() -> None:
    async with rig() as r:
        call = r.admit(pb.AdmitRequest(session_id="waits"))
        task = asyncio.ensure_future(call)
        await asyncio.wait_for(r.scheduler.entered.wait(), 5)
        assert r.stats.of(ADMIT).under_way == 1
        task.cancel()
        await until(lambda: counts(r.stats.of(ADMIT)) == {"CANCELLED": 1})
        assert r.stats.of(ADMIT).under_way == 0


async def test_unimplemented_stays_unimplemented() -> None:
    async with rig() as r:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.place(pb.PlaceRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert info(caught.value).metadata["method"] == "Place"


async def test_a_stream_flows_and_is_counted() -> None:
    async with rig() as r:
        assert [e.kind async for e in r.watch(ipb.WatchEventsRequest())] == ["a", "b"]
        await until(lambda: counts(r.stats.of(WATCH)) == {"OK": 1})


async def test_a_stream_fails_with_its_status() -> None:
    async with rig() as r:
        r.inspector.failure = StoreUnavailable(0.5)
        call = r.watch(ipb.WatchEventsRequest())
        assert [(await call.read()).kind for _ in range(2)] == ["a", "b"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert info(caught.value).reason == "STORE_UNAVAILABLE"
        assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "500"


async def test_a_cancelled_stream_closes_its_source() -> None:
    async with rig() as r:
        call = r.watch(ipb.WatchEventsRequest(resume_token="stay"))
        await call.read()
        call.cancel()
        await asyncio.wait_for(r.inspector.closed.wait(), 5)
        await until(lambda: counts(r.stats.of(WATCH)) == {"CANCELLED": 1})


def test_latency_buckets_hold_their_upper_edge() -> None:
    stats = MethodStats()
    for seconds in (EDGES_S[0], EDGES_S[0] + 1e-6, EDGES_S[-1], EDGES_S[-1] * 2):
        stats.observe(grpc.StatusCode.OK, seconds)
    latencies = stats.latencies["OK"]
    buckets = latencies.buckets
    assert (buckets[0], buckets[1], buckets[-2], buckets[-1]) == (1, 1, 1, 1)
    assert latencies.total == pytest.approx(2 * EDGES_S[0] + 1e-6 + 3 * EDGES_S[-1])


def test_stats_of_all_methods_can_be_listed() -> None:
    stats = RpcStats()
    stats.of("/a").observe(grpc.StatusCode.OK, 1.0)
    assert counts(stats.methods()["/a"]) == {"OK": 1}


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - counters have no event to wait for
            await asyncio.sleep(0.005)
