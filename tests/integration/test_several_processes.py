"""One server of several processes: they behave as one, and are kept alive and ended as one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from moorage.channel import open_aio_channel
from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import inspector_pb2_grpc, scheduler_pb2_grpc
from moorage.v1 import scheduler_pb2 as pb
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.processes import COMMAND, PATIENCE_S, Server, Start, environment, eventually, moorage
from tests.integration.steady_load import CALLERS, RATE, Load
from tests.ledger_audit import audit
from tests.unit.server.exposed import Exposed

POOLS = "{default: {policy: static, static_cap: %d, epoch_interval_s: 0.5}}"
#: A connection of its own: channels of one process would share one.
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
#: Connections that hardly ever all go to one of two processes.
CHANNELS = 12


@pytest.fixture
def prefix() -> str:
    return f"i{uuid.uuid4().hex}"


@pytest.fixture
def two(start: Start, redis_server: RedisServer, prefix: str) -> Callable[..., Server]:
    """Starts a server of two processes; returns once it is ready."""

    def run(*flags: str, cap: int = 1, **env: str) -> Server:
        ledger = {"MOORAGE_REDIS_URL": redis_server.url, "MOORAGE_REDIS_KEY_PREFIX": prefix}
        server = start(*flags, **({"MOORAGE_PROCESSES": "2"} | ledger | {"MOORAGE_POOLS": POOLS % cap} | env))
        eventually(server.api.ready)
        return server

    return run


def _events(server: Server, event: str) -> Iterator[dict[str, Any]]:
    lines = (json.loads(line) for line in server.log().splitlines() if line.startswith("{"))
    return (line for line in lines if line["event"] == event)


def _pids(server: Server) -> dict[int, int]:
    """Process of each worker; the latest one."""
    return {line["worker"]: line["pid"] for line in _events(server, "worker started")}


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _door(server: Server, worker: int, door: str) -> str | None:
    return next((line[door] for line in _events(server, "listening") if line["worker"] == worker), None)


def _calls(server: Server, worker: int, rpc: str) -> float:
    """Calls that a worker counted."""
    address = eventually(lambda: _door(server, worker, "metrics"))
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as page:
        return Exposed(page.read().decode()).value("moorage_rpc_seconds_count", rpc=rpc, code="OK") or 0


def _channel_to(server: Server, worker: int) -> grpc.Channel:
    """A channel whose connection the worker has."""
    for _ in range(50):
        before = _calls(server, worker, "GetPool")
        channel = grpc.insecure_channel(server.address, [OWN_CONNECTION])
        stub = inspector_pb2_grpc.InspectorServiceStub(channel)
        stub.GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S, wait_for_ready=True)
        if _calls(server, worker, "GetPool") > before:
            return channel
        channel.close()
    raise AssertionError(f"no connection goes to worker {worker}")


def test_connections_reach_both_and_it_is_said_once(two: Callable[..., Server]) -> None:
    server = two(MOORAGE_METRICS_LISTEN="127.0.0.1:0", MOORAGE_HEALTH_LISTEN="127.0.0.1:0")
    assert server.said.startswith(f"moorage listens on {server.address}, 2 processes, store redis://")
    with Engines(server.api, "engine-0"):
        for worker in (0, 1):
            _channel_to(server, worker).close()
        assert min(_calls(server, worker, "GetPool") for worker in (0, 1)) > 0
    doors = {eventually(lambda w=worker: _door(server, w, "health")) for worker in (0, 1)}
    assert len(doors) == 1
    with grpc.insecure_channel(doors.pop()) as probes:
        request = health_pb2.HealthCheckRequest(service="liveness")
        answer = health_pb2_grpc.HealthStub(probes).Check(request, timeout=PATIENCE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert server.terminate() == 0
    assert server.process.stdout is not None
    assert server.process.stdout.read() == ""
    assert sorted(line["worker"] for line in _events(server, "stopped")) == [0, 1]


def test_a_caller_that_waits_at_one_wakes_when_the_other_releases(two: Callable[..., Server]) -> None:
    server = two(MOORAGE_METRICS_LISTEN="127.0.0.1:0")
    with Engines(server.api, "engine-0"), ThreadPoolExecutor() as threads:
        living = eventually(lambda: a if (a := server.api.admit("living")).decision == pb.DECISION_PLACE else None)
        with _channel_to(server, 0) as first, _channel_to(server, 1) as second:
            request = pb.AdmitRequest(session_id="waiting", workload_class="rlvr", prompt_tokens=64)
            request.max_wait.FromSeconds(20)
            waiting = threads.submit(scheduler_pb2_grpc.SchedulerServiceStub(first).Admit, request, timeout=PATIENCE_S)
            inspector = inspector_pb2_grpc.InspectorServiceStub(second)
            eventually(lambda: inspector.GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S).held_sessions == 1)
            released = time.monotonic()
            release = pb.ReleaseRequest(
                session_id="living", lease_token=living.lease.token, outcome=pb.OUTCOME_COMPLETED
            )
            assert scheduler_pb2_grpc.SchedulerServiceStub(second).Release(release, timeout=PATIENCE_S).released
            answer = waiting.result(PATIENCE_S)
        assert answer.decision == pb.DECISION_PLACE
        # Woken, long before the wait is over.
        assert time.monotonic() - released < 5


class Crowd:
    """Load over many connections, as from many rollout workers, each with the service config that clients ship."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Crowd:
        channels = [
            await self._stack.enter_async_context(open_aio_channel(self._target, options=[OWN_CONNECTION]))
            for _ in range(CHANNELS)
        ]
        self.loads = [Load(channel, CALLERS // CHANNELS, RATE / CHANNELS) for channel in channels]
        self._running = [asyncio.create_task(load.run()) for load in self.loads]
        await asyncio.sleep(1.5)
        return self

    async def __aexit__(self, *_: object) -> None:
        for load in self.loads:
            load.ending = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._running)
        await self._stack.aclose()

    @property
    def failures(self) -> list[str]:
        return [failure for load in self.loads for failure in load.failures]

    @property
    def answers(self) -> int:
        return sum(load.answers.total() for load in self.loads)


async def _balanced(redis: RedisServer, prefix: str) -> None:
    async with Redis.from_url(redis.url) as client:
        assert await audit(client, prefix, "default") == []


async def test_a_killed_worker_fails_no_call_and_comes_back(
    two: Callable[..., Server], redis_server: RedisServer, prefix: str
) -> None:
    server = await asyncio.to_thread(two, cap=24)
    killed = _pids(server)
    with Engines(server.api, "engine-0", "engine-1", blocks=4096):
        async with Crowd(server.address) as crowd:
            for worker in (1, 0):
                os.kill(killed[worker], signal.SIGKILL)
                serving = f'"worker": {worker}'

                def back(serving: str = serving) -> bool:
                    # Once at the start, and once more.
                    return sum(serving in line for line in server.log().splitlines() if '"listening"' in line) == 2

                await asyncio.to_thread(eventually, back)
            await asyncio.sleep(1)
    assert crowd.failures == []
    assert crowd.answers > 300
    died = list(_events(server, "worker died, starts again"))
    assert [(line["worker"], line["code"]) for line in died] == [(1, -signal.SIGKILL), (0, -signal.SIGKILL)]
    assert not set(_pids(server).values()) & set(killed.values())
    assert await asyncio.to_thread(server.terminate) == 0
    await _balanced(redis_server, prefix)


async def test_sigterm_under_load_fails_no_call_where_another_server_is(
    two: Callable[..., Server], redis_server: RedisServer, prefix: str
) -> None:
    ending, staying = [await asyncio.to_thread(two, cap=24) for _ in range(2)]
    with Engines(staying.api, "engine-0", "engine-1", blocks=4096):
        async with Crowd(f"ipv4:{ending.address},{staying.address}") as crowd:
            assert await asyncio.to_thread(ending.terminate) == 0
            await asyncio.sleep(1)
    assert crowd.failures == []
    assert crowd.answers > 300
    assert sorted(line["worker"] for line in _events(ending, "stopped")) == [0, 1]
    await _balanced(redis_server, prefix)


async def test_sigterm_under_load_is_unavailable_where_no_other_server_is(
    two: Callable[..., Server], redis_server: RedisServer, prefix: str
) -> None:
    server = await asyncio.to_thread(two, cap=24)
    with Engines(server.api, "engine-0", "engine-1", blocks=4096):
        async with Crowd(server.address) as crowd:
            answered = crowd.answers
            assert await asyncio.to_thread(server.terminate) == 0
    assert answered > 100
    assert {failure.partition(":")[0] for failure in crowd.failures} == {"UNAVAILABLE"}
    await _balanced(redis_server, prefix)


def test_a_second_signal_ends_at_once(two: Callable[..., Server]) -> None:
    server = two(MOORAGE_SHUTDOWN_PRE_STOP_DELAY_S="60")
    workers = _pids(server)
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: len(list(_events(server, "stopping"))) == 3)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(5) == 130
    assert all(_gone(pid) for pid in workers.values())


def test_a_signal_to_all_of_the_group_is_one_signal(two: Callable[..., Server]) -> None:
    server = two()
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in _pids(server).values():
            os.kill(pid, number)
    # Ctrl-C reaches the workers too; so does what systemd sends.
    assert server.terminate() == 0
    assert sorted(line["worker"] for line in _events(server, "stopped")) == [0, 1]


def test_ctrl_c_during_the_start_ends_it_in_order(redis_server: RedisServer, tmp_path: Path) -> None:
    command = [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--processes", "2", "--redis-url", redis_server.url]
    log = tmp_path / "serve.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=environment({}), stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    eventually(lambda: "worker started" in log.read_text("utf-8"))
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S) == (b"", None)
    assert process.returncode == 0
    assert "Traceback" not in log.read_text("utf-8")


def test_workers_do_not_outlive_their_supervisor(two: Callable[..., Server]) -> None:
    server = two()
    workers = _pids(server)
    server.process.kill()
    eventually(lambda: all(_gone(pid) for pid in workers.values()))
    assert sorted(line["worker"] for line in _events(server, "stopped")) == [0, 1]


def test_an_unusable_configuration_is_said_once(redis_server: RedisServer) -> None:
    env = {"MOORAGE_TLS_CERT_FILE": "nowhere.crt", "MOORAGE_TLS_KEY_FILE": "nowhere.key"}
    done = moorage("serve", "--listen", "127.0.0.1:0", "--processes", "3", "--redis-url", redis_server.url, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("unusable configuration") == 1
    assert "nowhere.crt" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_embedded_store_is_for_one_process() -> None:
    done = moorage("serve", "--listen", "127.0.0.1:0", "--processes", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "processes: must be 1 with the embedded ledger" in done.stderr
    assert "(--processes)" in done.stderr


def test_a_taken_address_ends_the_start(redis_server: RedisServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = moorage("serve", "--listen", address, "--processes", "2", "--redis-url", redis_server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count(f"can not listen on {address}") == 1


@pytest.mark.parametrize("processes", ["1", "2"])
def test_another_server_does_not_get_in_between(
    two: Callable[..., Server], redis_server: RedisServer, processes: str
) -> None:
    server = two()
    done = moorage("serve", "--listen", server.address, "--processes", processes, "--redis-url", redis_server.url)
    assert done.returncode == 1
    assert f"can not listen on {server.address}" in done.stderr
    assert server.api.ready()


def test_metrics_of_the_second_that_can_not_be_had_end_the_start(redis_server: RedisServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = {"MOORAGE_METRICS_LISTEN": f"127.0.0.1:{port - 1}", "MOORAGE_REDIS_URL": redis_server.url}
        done = moorage("serve", "--listen", "127.0.0.1:0", "--processes", "2", env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "can not listen on 127.0.0.1:" in done.stderr
