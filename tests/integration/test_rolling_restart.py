"""Servers are replaced one after another under load, and no call fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import time
import uuid
from collections import Counter
from typing import Any

import grpc
from redis.asyncio import Redis

from moorage.channel import open_aio_channel
from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.processes import PATIENCE_S, Api, Server, Start, eventually
from tests.ledger_audit import audit

POOLS = "{default: {policy: static, static_cap: 24, epoch_interval_s: 0.5}}"
#: Callers that each have a session at any time, a third of them waiting, and decisions per second of all together.
CALLERS, RATE = 72, 300.0
DEADLINE_S = 15.0


class Load:
    """Sessions that come, take turns, and go, at a steady rate, over one channel to all servers.

    Every call must be answered: ``failures`` says which were not.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._numbers = itertools.count()
        self._due = time.monotonic()
        self.ending = False
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self) -> None:
        """Until told to end; then sessions end in order."""
        await asyncio.gather(*(self._caller() for _ in range(CALLERS)))

    async def _caller(self) -> None:
        while not self.ending:
            try:
                await self._session(f"s-{next(self._numbers)}")
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")

    async def _session(self, session_id: str) -> None:
        admitted = await self._admit(session_id)
        for turn in range(1, 5):
            token = admitted.lease.token
            placed = await self._call("Place", pb.PlaceRequest, session_id=session_id, lease_token=token, turn=turn)
            assert placed.decision == pb.DECISION_PLACE, placed
            assert placed.placement.instance_id == admitted.placement.instance_id
        released = await self._call(
            "Release", pb.ReleaseRequest, session_id=session_id, lease_token=token, outcome=pb.OUTCOME_COMPLETED
        )
        assert released.released, session_id

    async def _admit(self, session_id: str) -> pb.AdmitResponse:
        """Asks until it is let in, as the client does: a server that ends answers HOLD to those who wait there."""
        while True:
            request = pb.AdmitRequest(session_id=session_id, workload_class="rlvr", prompt_tokens=64)
            request.max_context_tokens = 128
            request.max_wait.FromSeconds(5)
            answer: pb.AdmitResponse = await self._call("Admit", request)
            if answer.decision == pb.DECISION_PLACE:
                return answer
            await asyncio.sleep(answer.hold.retry_after.ToTimedelta().total_seconds())

    async def _call(self, rpc: str, request: Any, **fields: Any) -> Any:
        await self._turn()
        message = request(**fields) if fields else request
        message.request_id = str(uuid.uuid4())
        answer = await getattr(self._scheduler, rpc)(message, timeout=DEADLINE_S)
        self.answers[rpc] += 1
        return answer

    async def _turn(self) -> None:
        """Returns when the next call is due: what falls behind is not made up for."""
        now = time.monotonic()
        self._due = max(self._due + 1 / RATE, now)
        await asyncio.sleep(self._due - now)


def _free_ports(count: int) -> list[int]:
    """Ports below those that the system gives away by itself: nobody gets one while its server is replaced."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


async def test_a_rolling_restart_fails_no_call(start: Start, redis_server: RedisServer) -> None:
    prefix = f"i{uuid.uuid4().hex}"
    ledger = {"MOORAGE_REDIS_URL": redis_server.url, "MOORAGE_REDIS_KEY_PREFIX": prefix, "MOORAGE_POOLS": POOLS}
    ports = _free_ports(2)

    def run(port: int) -> Server:
        return start("--listen", f"127.0.0.1:{port}", **ledger)

    servers = [run(port) for port in ports]
    for server in servers:
        await asyncio.to_thread(eventually, server.api.ready)
    addresses = ",".join(server.address for server in servers)
    both = Api(f"ipv4:{addresses}")
    with Engines(both, "engine-0", "engine-1", blocks=4096):
        async with open_aio_channel(f"ipv4:{addresses}") as channel:
            load = Load(channel)
            running = asyncio.create_task(load.run())
            await asyncio.sleep(1.5)
            for number, port in enumerate(ports):
                code = await asyncio.to_thread(servers[number].terminate)
                assert code == 0
                servers[number] = await asyncio.to_thread(run, port)
                await asyncio.to_thread(eventually, servers[number].api.ready)
            await asyncio.sleep(1.5)
            load.ending = True
            async with asyncio.timeout(PATIENCE_S):
                await running
    both.channel.close()
    assert load.failures == []
    assert min(load.answers[rpc] for rpc in ("Admit", "Place", "Release")) > 50
    async with Redis.from_url(redis_server.url) as client:
        assert await audit(client, prefix, "default") == []
