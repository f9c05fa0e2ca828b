"""The server of one process: options, health, reflection, and an orderly end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc
from moorage_server.errors import StoreUnavailable
from moorage_server.runtime.server import SERVICE_NAMES, AddressInUse, MoorageServer, server_options
from moorage_server.runtime.settings import Settings

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers when let go."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go = asyncio.Event()

    async def Admit(self, request: pb.AdmitRequest, context: Any) -> pb.AdmitResponse:
        self.entered.set()
        if request.session_id == "waits":
            await self.go.wait()
        return pb.AdmitResponse(workload_class="x" * request.group_size)


class Store:
    """Answers pings, or does not."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.hangs = False

    async def ping(self) -> None:
        if self.hangs:
            await asyncio.sleep(60)
        if self.failure is not None:
            raise self.failure


class Rig:
    """A running server, its store and servicer, and stubs."""

    def __init__(self, server: MoorageServer, store: Store, scheduler: Scheduler, channel: grpc.aio.Channel) -> None:
        self.server, self.store, self.scheduler, self.channel = server, store, scheduler, channel
        self.admit: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel).Admit

    async def health(self, service: str) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        status: int = response.status
        return status

    async def becomes(self, service: str, status: int) -> None:
        async with asyncio.timeout(5):
            while await self.health(service) != status:  # noqa: ASYNC110 - it is the polling that is tested
                await asyncio.sleep(0.01)


@asynccontextmanager
async def rig(store: Store | None = None, **changes: Any) -> AsyncIterator[Rig]:
    values = {"listen": "127.0.0.1:0", "health": {"check_interval_s": 0.05, "check_timeout_s": 0.05}, **changes}
    settings = Settings.model_validate(values)
    scheduler, store = Scheduler(), store or Store()

    def register(server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)

    server = MoorageServer(settings, register, store.ping)
    address = server.bind()
    await server.start()
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    try:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield Rig(server, store, scheduler, channel)
    finally:
        await server.stop()


async def test_ready_once_the_store_answers() -> None:
    store = Store()
    store.failure = StoreUnavailable()
    async with rig(store) as r:
        assert await r.health("liveness") == SERVING
        assert await r.health("readiness") == NOT_SERVING
        assert await r.health("") == NOT_SERVING
        store.failure = None
        await r.becomes("readiness", SERVING)
        assert await r.health("") == SERVING


@pytest.mark.parametrize("how", ["fails", "hangs", "breaks"])
async def test_an_outage_ends_readiness_not_liveness(how: str) -> None:
    async with rig() as r:
        await r.becomes("readiness", SERVING)
        r.store.failure = {"fails": StoreUnavailable(), "breaks": RuntimeError("any")}.get(how)
        r.store.hangs = how == "hangs"
        await r.becomes("readiness", NOT_SERVING)
        assert await r.health("") == NOT_SERVING
        assert await r.health("liveness") == SERVING
        r.store.failure, r.store.hangs = None, False
        await r.becomes("readiness", SERVING)


async def test_other_services_are_unknown_to_health() -> None:
    async with rig() as r:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.health("moorage")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_taken_address_is_refused() -> None:
    async with rig() as r:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            other = MoorageServer(Settings(listen=f"127.0.0.1:{taken.getsockname()[1]}"), lambda _: None, r.store.ping)
            with pytest.raises(AddressInUse, match="in use"):
                other.bind()
            await other.grpc.stop(None)


async def test_two_servers_never_share_a_port() -> None:
    store = Store()
    first = MoorageServer(Settings(listen="127.0.0.1:0"), lambda _: None, store.ping)
    second = MoorageServer(Settings(listen=first.bind()), lambda _: None, store.ping)
    with pytest.raises(AddressInUse):
        second.bind()
    await first.grpc.stop(None)
    await second.grpc.stop(None)


async def reflected(r: Rig) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(r.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    return {s.name for answer in [await call.read()] for s in answer.list_services_response.service}


async def test_reflection_lists_our_services() -> None:
    async with rig() as r:
        assert {*SERVICE_NAMES, "grpc.health.v1.Health"} <= await reflected(r)
    assert SERVICE_NAMES == (
        "moorage.v1.SchedulerService",
        "moorage.v1.InspectorService",
        "moorage.v1.OperatorService",
    )


async def test_reflection_can_be_off() -> None:
    async with rig(reflection=False) as r:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected(r)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_call_under_way_finishes_within_the_grace() -> None:
    async with rig() as r:
        call = asyncio.ensure_future(r.admit(pb.AdmitRequest(session_id="waits")))
        await r.scheduler.entered.wait()
        stopping = asyncio.create_task(r.server.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()
        r.scheduler.go.set()
        assert isinstance(await call, pb.AdmitResponse)
        await stopping


async def test_the_grace_ends() -> None:
    async with rig(shutdown={"grace_s": 0.1}) as r:
        call = asyncio.ensure_future(r.admit(pb.AdmitRequest(session_id="waits")))
        await r.scheduler.entered.wait()
        started = time.monotonic()
        await r.server.stop()
        assert 0.08 < time.monotonic() - started < 5
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_the_end_in_order() -> None:
    """Not ready first, still serving during the pause, then no new calls, and the drain within the grace."""
    order: list[str] = []
    async with rig(shutdown={"pre_stop_delay_s": 0.3, "grace_s": 5}) as r:
        await r.becomes("readiness", SERVING)
        waiting = asyncio.ensure_future(r.admit(pb.AdmitRequest(session_id="waits")))
        await r.scheduler.entered.wait()

        async def drain() -> None:
            order.append("drain")
            r.scheduler.go.set()

        stopping = asyncio.create_task(r.server.stop(drain))
        await r.becomes("readiness", NOT_SERVING)
        assert await r.health("liveness") == SERVING
        await r.admit(pb.AdmitRequest(session_id="in the pause"))
        order.append("answered")
        await waiting
        await stopping
        assert order == ["answered", "drain"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.admit(pb.AdmitRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_drain_that_hangs_does_not_stop_the_end() -> None:
    async with rig(shutdown={"grace_s": 0}) as r:
        started = time.monotonic()
        await r.server.stop(lambda: asyncio.sleep(60))
        assert 0.9 < time.monotonic() - started < 5


async def test_messages_are_bounded() -> None:
    async with rig(limits={"max_message_bytes": 65_536}) as r:
        await r.admit(pb.AdmitRequest(tenant="x" * 65_000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.admit(pb.AdmitRequest(tenant="x" * 66_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_under_way_are_bounded_where_asked() -> None:
    async with rig(limits={"max_concurrent_rpcs": 1}) as r:
        waiting = asyncio.ensure_future(r.admit(pb.AdmitRequest(session_id="waits")))
        await r.scheduler.entered.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.admit(pb.AdmitRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        r.scheduler.go.set()
        await waiting


def test_options() -> None:
    options = dict(server_options(Settings()))
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.max_receive_message_length"] == 4 * 1024 * 1024
    assert "grpc.max_connection_age_ms" not in options
    aged = dict(server_options(Settings.model_validate({"limits": {"max_connection_age_s": 90}})))
    assert aged["grpc.max_connection_age_ms"] == 90_000
    assert aged["grpc.max_connection_age_grace_ms"] > 600_000, "the longest wait ends by itself"
