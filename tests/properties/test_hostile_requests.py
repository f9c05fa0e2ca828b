"""Whatever is sent: the server answers with a status, stays alive, logs no error, and the pools' books balance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from moorage.v1 import inspector_pb2, operator_pb2
from moorage.v1 import scheduler_pb2 as pb
from moorage_server import limits
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.main import Services
from moorage_server.runtime.server import MoorageServer
from moorage_server.runtime.settings import Settings
from tests.conftest import Backend
from tests.ledger_audit import audit
from tests.properties import hostile

# What is tested is in front of the store: a Cluster adds nothing but time.
pytestmark = pytest.mark.parametrize("backend", ["fakeredis", "redis"], indirect=True)

Code = grpc.StatusCode

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (pb.DESCRIPTOR, inspector_pb2.DESCRIPTOR, operator_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
#: What a server may answer to anything. Not UNKNOWN, INTERNAL or UNAVAILABLE: those are its own failures.
PROPER = {
    Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.ABORTED, Code.OUT_OF_RANGE,
    Code.UNIMPLEMENTED, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED,
}  # fmt: skip
WATCH = "/moorage.v1.InspectorService/WatchEvents"
#: Short: some requests are good ones, and wait.
TIMEOUT_S = 0.2
ROUNDS = 80


class Target:
    """A whole server with its store, and a way to send it anything."""

    def __init__(self, backend: Backend, channel: grpc.aio.Channel) -> None:
        self.backend = backend
        self._channel = channel
        #: Of the leases that were granted.
        self.leases: list[tuple[str, str, str]] = []

    async def send(self, method: str, data: bytes, metadata: Any = (), timeout: float = TIMEOUT_S) -> grpc.StatusCode:
        """The status that bytes are answered with."""
        if METHODS[method].server_streaming:
            stream = self._channel.unary_stream(method)(data, metadata=metadata, timeout=timeout)
            try:
                while await stream.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
            return await stream.code()
        call = self._channel.unary_unary(method)(data, metadata=metadata, timeout=timeout)
        code = await call.code()
        if code is Code.OK and method.endswith("/Admit"):
            asked, answer = pb.AdmitRequest.FromString(data), pb.AdmitResponse.FromString(await call)
            if answer.lease.token:
                self.leases.append((asked.pool, asked.session_id, answer.lease.token))
        return code

    async def sane(self) -> None:
        """A good session still comes and goes, and the books of every pool balance."""
        snapshot = pb.InstanceSnapshot(
            instance_id="good", incarnation="1", sequence=1, block_size=16, total_blocks=1000, used_blocks=0
        )
        pool = f"sane-{random.getrandbits(64):x}"
        beat = pb.HeartbeatRequest(pool=pool, instances=[snapshot])
        assert (
            await self.send("/moorage.v1.SchedulerService/Heartbeat", beat.SerializeToString(), timeout=20) is Code.OK
        )
        admit = pb.AdmitRequest(pool=pool, session_id="good", prompt_tokens=10, max_context_tokens=100)
        admit.max_wait.FromSeconds(10)
        call = self._channel.unary_unary("/moorage.v1.SchedulerService/Admit")
        answer = pb.AdmitResponse.FromString(await call(admit.SerializeToString(), timeout=20))
        assert answer.decision == pb.DECISION_PLACE, answer
        store = self.backend.open()
        for name in await store.pools():
            assert await audit(self.backend.client, self.backend.prefix, name) == [], name


@asynccontextmanager
async def serving(backend: Backend, settings: Settings) -> AsyncIterator[Target]:
    """A running server. AssertionError at its end where anything was logged at level error."""
    store = backend.open()
    control = ControlPlane(store, {})
    services = Services(control)
    server = MoorageServer(settings, services.register, store.ping)
    with capture_logs() as logs:
        address = server.bind()
        await control.start()
        await server.start()
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        options += [("grpc.max_send_message_length", 64 << 20)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield Target(backend, channel)
        await server.stop(services.drain)
    assert [entry for entry in logs if entry["log_level"] in ("error", "critical")] == []


@pytest.fixture
async def target(backend: Backend) -> AsyncIterator[Target]:
    """A server that takes requests of everybody."""
    async with serving(backend, Settings(listen="127.0.0.1:0")) as running:
        yield running


@pytest.mark.parametrize("seed", range(2))
async def test_bytes_that_are_no_message(target: Target, seed: int) -> None:
    sender = hostile.Sender(seed)
    for method in METHODS:
        calls = [target.send(method, sender.rubbish(), sender.metadata()) for _ in range(15)]
        assert set(await asyncio.gather(*calls)) <= PROPER, method
    await target.sane()


@pytest.mark.parametrize("seed", range(2))
async def test_messages_with_hostile_values(target: Target, seed: int) -> None:
    sender = hostile.Sender(100 + seed)
    succeeded = set()
    for _ in range(ROUNDS):
        sent = [(name, sender.encoded(method.input_type)) for name, method in METHODS.items()]
        codes = await asyncio.gather(*(target.send(name, data, sender.metadata()) for name, data in sent))
        bad = [(name, code, data) for (name, data), code in zip(sent, codes, strict=True) if code not in PROPER]
        assert bad == []
        succeeded |= {name for (name, _), code in zip(sent, codes, strict=True) if code is Code.OK}
        sender.leases = target.leases[-8:]
    await target.sane()
    # It would prove little, were every request refused for its form.
    assert succeeded >= set(METHODS) - {WATCH}, set(METHODS) - succeeded


async def test_the_largest_messages(target: Target) -> None:
    """4 MiB of one field: what fits is answered like anything else, one byte too many is RESOURCE_EXHAUSTED."""
    most = limits.MESSAGE_BYTES
    hashes = pb.AdmitRequest(session_id="s", prefix_hashes=[1] * (most // 8 - 4)).SerializeToString()
    labels = pb.AdmitRequest(session_id="s", labels={f"{n:0100}": "x" * 100 for n in range(19_000)}).SerializeToString()
    text = pb.AdmitRequest(session_id="x" * (most - 8)).SerializeToString()
    items = pb.HeartbeatRequest(instances=[pb.InstanceSnapshot()] * (most // 2)).SerializeToString()
    reports = pb.HeartbeatRequest(sessions=[pb.SessionProgress(session_id="\0")] * (most // 5)).SerializeToString()
    config = operator_pb2.ConfigurePoolRequest()
    for number in range(60_000):
        config.config.classes[f"class-{number}"].aliases.extend(["a", "b"])
    admit, heartbeat = (f"/moorage.v1.SchedulerService/{name}" for name in ("Admit", "Heartbeat"))
    for method, data in (
        (admit, hashes),
        (admit, labels),
        (admit, text),
        (heartbeat, items),
        (heartbeat, reports),
        ("/moorage.v1.OperatorService/ConfigurePool", config.SerializeToString()),
    ):
        assert 1_000_000 < len(data) <= most
        assert await target.send(method, data, timeout=30) is Code.INVALID_ARGUMENT
    assert await target.send(admit, b"\0" * (most + 1), timeout=30) is Code.RESOURCE_EXHAUSTED
    # Groups within groups, a thousand deep: more than a parser follows.
    assert await target.send(admit, b"\x0b" * 1000, timeout=30) is Code.INVALID_ARGUMENT
    await target.sane()


async def test_strangers_with_hostile_headers(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("[{name: a, token: 0123456789abcdef, roles: [operator]}]")
    settings = Settings.model_validate({"listen": "127.0.0.1:0", "auth": {"tokens_file": str(tmp_path / "tokens")}})
    sender = hostile.Sender(7)
    async with serving(backend, settings) as target:
        for name, method in METHODS.items():
            calls = [target.send(name, sender.encoded(method.input_type), sender.metadata()) for _ in range(15)]
            assert set(await asyncio.gather(*calls)) == {Code.UNAUTHENTICATED}, name
