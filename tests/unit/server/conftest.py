"""A whole server in the test's own process: embedded store, real control plane, all servicers, stubs over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from moorage.v1 import inspector_pb2_grpc, operator_pb2_grpc, scheduler_pb2_grpc
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import PoolConfig
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.main import Services
from moorage_server.runtime.server import MoorageServer
from moorage_server.runtime.settings import Settings
from moorage_server.store.connect import open_store
from moorage_server.store.keys import instance_key


class World:
    """Stubs of a running server, and short ways to fill its pools."""

    def __init__(
        self, control: ControlPlane, services: Services, server: MoorageServer, channel: Any, address: str
    ) -> None:
        self.control, self.services, self.server = control, services, server
        self.channel, self.address = channel, address
        self.scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self.inspector: Any = inspector_pb2_grpc.InspectorServiceStub(channel)
        self.operator: Any = operator_pb2_grpc.OperatorServiceStub(channel)
        self._sequence = 0

    async def instance(self, instance_id: str = "i", pool: str = "", **changes: Any) -> None:
        """Reports an idle instance of 1,000 blocks of 16 tokens, changed as told."""
        self._sequence += 1
        values = {
            "endpoint": f"http://{instance_id}",
            "incarnation": "1",
            "sequence": self._sequence,
            "block_size": 16,
            "total_blocks": 1_000,
            "used_blocks": 0,
            **changes,
        }
        snapshot = pb.InstanceSnapshot(instance_id=instance_id, **values)
        answer = await self.scheduler.Heartbeat(pb.HeartbeatRequest(pool=pool, instances=[snapshot]))
        assert answer.instances[0].accepted, answer.instances[0].reason
        key = instance_key(instance_id, snapshot.dp_rank)
        desk = self.control.desk(pool or "default")
        async with asyncio.timeout(10):
            # The next decision must not rest on a view from before.
            while key not in (await desk.view()).instances:  # noqa: ASYNC110 - views are not announced
                await asyncio.sleep(0.02)

    async def admit(self, session_id: str, **changes: Any) -> pb.AdmitResponse:
        """Admits a session that declares a small context."""
        values = {"prompt_tokens": 100, "expected_output_tokens": 100, "max_context_tokens": 200, **changes}
        response: pb.AdmitResponse = await self.scheduler.Admit(pb.AdmitRequest(session_id=session_id, **values))
        return response

    async def placed(self, session_id: str, **changes: Any) -> str:
        """Admits a session, and answers its lease token."""
        response = await self.admit(session_id, **changes)
        assert response.decision == pb.DECISION_PLACE, response
        return response.lease.token


Open = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def world() -> Open:
    """``async with world(pools, credentials of a TLS channel, keys of the settings) as w``."""

    @asynccontextmanager
    async def run(
        pools: Mapping[str, PoolConfig] | None = None, credentials: Any = None, **changes: Any
    ) -> AsyncIterator[World]:
        store = await open_store(None, embedded=True)
        control = ControlPlane(store, pools or {})
        services = Services(control)
        settings = Settings.model_validate({"listen": "127.0.0.1:0", **changes})
        server = MoorageServer(settings, services.register, store.ping)
        address = server.bind()
        for name in pools or {}:
            # The control plane does this in the background; the tests' first call should not race it.
            await store.name(name)
        await control.start()
        await server.start()
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        try:
            async with _channel(address, credentials, options) as channel:
                yield World(control, services, server, channel, address)
        finally:
            await server.stop(services.drain)
            await store.close()

    return run


def _channel(address: str, credentials: Any, options: Any) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


class Refusal:
    """How a call failed."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        trailers = dict(error.trailing_metadata())
        info = error_details_pb2.ErrorInfo()
        for packed in status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b"")).details:
            packed.Unpack(info)
        self.details = error.details()
        self.pushback = trailers.get("grpc-retry-pushback-ms")
        self.reason = info.reason
        self.metadata = dict(info.metadata)


@pytest.fixture
def refusal() -> Callable[[Any], Any]:
    """``(await refusal(call)).reason`` of a call that must fail."""

    async def of(call: Any) -> Refusal:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return Refusal(caught.value)

    return of


async def until(probe: Callable[[], Any]) -> None:
    """Returns once the probe, which may be a coroutine, answers true."""
    async with asyncio.timeout(20):
        while True:
            found = probe()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.02)


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    """Awaits the probe again and again until what it answers is true; answers that."""

    async def wait(probe: Callable[[], Any]) -> Any:
        async with asyncio.timeout(10):
            while not (found := await probe()):  # noqa: ASYNC110 - it is the polling that callers do
                await asyncio.sleep(0.02)
        return found

    return wait
