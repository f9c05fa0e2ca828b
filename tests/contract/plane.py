"""Server processes for the tests of the API: a control plane each, over one store, answering real gRPC."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moorage.v1 import inspector_pb2_grpc, scheduler_pb2_grpc
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.decision_log import DecisionLog
from moorage_server.api.inspector import InspectorServicer
from moorage_server.api.interceptors import CallInterceptor
from moorage_server.api.rpc_stats import RpcStats
from moorage_server.api.scheduler import SchedulerServicer
from moorage_server.core.config import PoolConfig
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.tasks import end
from moorage_server.store.redis_store import RedisStore
from tests.conftest import Backend
from tests.ledger_audit import Books, audit, read

POOL = "p"


def capped(cap: int, **changes: Any) -> PoolConfig:
    """A pool that admits ``cap`` sessions per instance and goes through ten epochs a second."""
    values: dict[str, Any] = {"policy": "static", "static_cap": cap, "epoch_interval_s": 0.1, **changes}
    return PoolConfig(**values)


def seconds(value: float) -> Duration:
    """A protobuf duration."""
    return Duration(seconds=int(value), nanos=round(1e9 * (value - int(value))))


def new_id() -> str:
    """A request id."""
    return str(uuid.uuid4())


class Plane:
    """One server process, with a caller, an engine and a stub to talk to it."""

    def __init__(self, backend: Backend, pools: Mapping[str, PoolConfig]) -> None:
        self.backend = backend
        self.store: RedisStore = backend.open()
        self.control = ControlPlane(self.store, pools)
        self.stats, self.servicer = RpcStats(), SchedulerServicer(self.control)
        self._server = grpc.aio.server(interceptors=[CallInterceptor(self.stats, DecisionLog("none"))])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.servicer, self._server)
        inspector_pb2_grpc.add_InspectorServiceServicer_to_server(InspectorServicer(self.control), self._server)
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self.stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self.inspector: Any = inspector_pb2_grpc.InspectorServiceStub(self._channel)

    async def start(self) -> None:
        """Begins to serve."""
        await self.control.start()
        await self._server.start()

    async def stop(self) -> None:
        """Ends in order."""
        await self._channel.close()
        await self._server.stop(0)
        await self.control.stop()

    async def crash(self) -> None:
        """Ends everything at once: calls break, and nothing is handed over."""
        await self._server.stop(0)
        await self.die()

    async def die(self) -> None:
        """Ends all background work at once, without a word to the store."""
        await end(self.control._tasks)

    async def report(self, instance: str = "i", pool: str = POOL, **changes: Any) -> pb.InstanceAck:
        """One snapshot of an idle instance of 10,000 blocks of 16 tokens."""
        values: dict[str, Any] = {
            "endpoint": f"http://{instance}",
            "incarnation": "1",
            "sequence": time.monotonic_ns(),
            "block_size": 16,
            "total_blocks": 10_000,
            "used_blocks": 0,
            **changes,
        }
        snapshot = pb.InstanceSnapshot(instance_id=instance, **values)
        answer = await self.stub.Heartbeat(pb.HeartbeatRequest(pool=pool, instances=[snapshot]))
        ack: pb.InstanceAck = answer.instances[0]
        return ack

    def admit(self, sid: str, wait: float | None = None, timeout: float | None = None, **fields: Any) -> Any:
        """The call itself, so that it can be cancelled."""
        values: dict[str, Any] = {"pool": POOL, "prompt_tokens": 160, "workload_class": "a", **fields}
        request = pb.AdmitRequest(session_id=sid, **values)
        if wait is not None:
            request.max_wait.CopyFrom(seconds(wait))
        return self.stub.Admit(request, timeout=timeout)

    async def placed(self, sid: str, **fields: Any) -> str:
        """Admits a session that must get in; answers its token."""
        answer = await self.admit(sid, **fields)
        assert answer.decision == pb.DECISION_PLACE, answer
        token: str = answer.lease.token
        return token

    async def held(self, sid: str, **fields: Any) -> pb.Hold:
        """Asks for a session that must wait."""
        answer = await self.admit(sid, **fields)
        assert answer.decision == pb.DECISION_HOLD, answer
        hold: pb.Hold = answer.hold
        return hold

    def place(self, sid: str, token: str, wait: float | None = None, pool: str = POOL, **fields: Any) -> Any:
        """The next turn."""
        request = pb.PlaceRequest(pool=pool, session_id=sid, lease_token=token, **fields)
        if wait is not None:
            request.max_wait.CopyFrom(seconds(wait))
        return self.stub.Place(request)

    def release(self, sid: str, token: str = "", outcome: Any = pb.OUTCOME_COMPLETED, **fields: Any) -> Any:
        """The end of a session."""
        values: dict[str, Any] = {"pool": POOL, **fields}
        return self.stub.Release(pb.ReleaseRequest(session_id=sid, lease_token=token, outcome=outcome, **values))

    async def progress(self, sid: str, token: str, **fields: Any) -> pb.SessionAck:
        """One progress report."""
        report = pb.SessionProgress(session_id=sid, lease_token=token, phase=pb.PHASE_RUNNING, **fields)
        answer = await self.stub.Heartbeat(pb.HeartbeatRequest(pool=POOL, sessions=[report]))
        ack: pb.SessionAck = answer.sessions[0]
        return ack

    async def waits(self, sid: str, seconds_: float = 30.0, **fields: Any) -> Any:
        """A call that waits for its turn; returns once it stands in the queue."""
        call = self.admit(sid, wait=seconds_, **fields)
        waiting = asyncio.ensure_future(call)
        await eventually(lambda: self._is_held(sid))
        return waiting

    async def _is_held(self, sid: str) -> bool:
        return sid in (await self.books()).state("held")

    async def books(self) -> Books:
        """What the ledger holds; it may be in motion."""
        return await read(self.backend.client, self.backend.prefix, POOL)

    async def balanced(self) -> None:
        """Fails with every discrepancy."""
        assert await audit(self.backend.client, self.backend.prefix, POOL) == []


class Refusal:
    """How a call failed."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.trailers = dict(error.trailing_metadata() or ())
        self.info, self.retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        for packed in status_pb2.Status.FromString(self.trailers.get("grpc-status-details-bin", b"")).details:
            for kind in (self.info, self.retry):
                packed.Unpack(kind)
        self.reason = self.info.reason


async def refused(call: Any) -> Refusal:
    """The refusal of a call that must fail."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return Refusal(error)
    raise AssertionError(f"it was answered: {answer}")


async def eventually(probe: Callable[[], Awaitable[Any]], within: float = 10.0) -> Any:
    """Awaits the probe again and again until what it answers is true; answers that."""
    async with asyncio.timeout(within):
        while True:
            found = await probe()
            if found:
                return found
            await asyncio.sleep(0.02)
