"""Server CPU per Admit and per Place, against the floor: an empty unary RPC that runs one EVALSHA.

Also latencies at a fixed rate.

All servers run in the same session on the same Redis, and take turns in short rounds, so that whatever else the machine
does reaches all of them alike. Linux only: CPU times are read from /proc.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from bench import control_plane
from bench.children import Child, running
from moorage.channel import open_aio_channel
from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc

INSTANCES = 4
BLOCKS = 4_000_000
FLOOR_METHOD = "/floor/Call"


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def floor_server(port: int, redis_url: str) -> None:
    """The least that an honest RPC on a Redis ledger can cost in this stack."""
    from redis.asyncio import BlockingConnectionPool, Redis

    # A machine that stalls for a moment lets calls pile up: they wait for a connection, they do not fail.
    store = Redis.from_pool(BlockingConnectionPool.from_url(redis_url, max_connections=64))
    sha = await store.script_load("return 1")

    async def call(request: bytes, context: Any) -> bytes:
        await store.evalsha(sha, 1, "{floor}")
        return b""

    handlers: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def heartbeats(scheduler: Any) -> None:
    """Keeps the pool's instances fresh; they have room for everything."""
    sequence = time.time_ns()
    while True:
        sequence += 1
        snapshots = [
            pb.InstanceSnapshot(
                instance_id=f"engine-{n}",
                endpoint=f"http://engine-{n}:8000",
                incarnation="1",
                sequence=sequence,
                block_size=16,
                total_blocks=BLOCKS,
                used_blocks=0,
                max_context_tokens=131_072,
            )
            for n in range(INSTANCES)
        ]
        await scheduler.Heartbeat(pb.HeartbeatRequest(instances=snapshots), timeout=10)
        await asyncio.sleep(0.5)


async def closed_loop(calls: Sequence[Callable[[], Awaitable[Any]]], concurrency: int) -> list[Any]:
    """Runs all calls, ``concurrency`` at a time; their results in order."""
    results: list[Any] = [None] * len(calls)
    todo = iter(range(len(calls)))

    async def worker() -> None:
        for index in todo:
            results[index] = await calls[index]()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return results


async def open_loop(calls: Sequence[Callable[[], Awaitable[Any]]], rate: float) -> list[float]:
    """Starts the calls at a fixed rate; their latencies in milliseconds, from when each was due."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    latencies: list[float] = []

    async def one(due: float, call: Callable[[], Awaitable[Any]]) -> None:
        await call()
        latencies.append(1000 * (loop.time() - due))

    tasks = []
    for n, call in enumerate(calls):
        due = begin + n / rate
        if (wait := due - loop.time()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(due, call)))
    await asyncio.gather(*tasks)
    return latencies


class Bench:
    """One run: the two servers, and the calls to them."""

    def __init__(
        self, options: argparse.Namespace, floor: Any, scheduler: Any, floor_pid: int, server_pid: int
    ) -> None:
        self.options = options
        self.floor = floor
        self.scheduler = scheduler
        self.pids = {"floor": floor_pid, "server": server_pid}
        self._count = 0

    def floor_calls(self, n: int) -> list[Callable[[], Awaitable[Any]]]:
        return [lambda: self.floor(b"", timeout=10)] * n

    def admit_calls(self, n: int) -> list[Callable[[], Awaitable[Any]]]:
        calls: list[Callable[[], Awaitable[Any]]] = []
        for _ in range(n):
            self._count += 1
            request = pb.AdmitRequest(
                session_id=f"session-{self._count}",
                workload_class=("agentic", "rlvr", "rlhf")[self._count % 3],
                prompt_tokens=1000,
                expected_output_tokens=2000,
            )
            calls.append(lambda request=request: self.scheduler.Admit(request, timeout=10))  # type: ignore[misc]
        return calls

    def place_calls(self, leases: Sequence[tuple[str, str]], n: int) -> list[Callable[[], Awaitable[Any]]]:
        calls: list[Callable[[], Awaitable[Any]]] = []
        for index in range(n):
            session_id, token = leases[index % len(leases)]
            request = pb.PlaceRequest(session_id=session_id, lease_token=token, turn=1, prompt_tokens=1500)
            calls.append(lambda request=request: self.scheduler.Place(request, timeout=10))  # type: ignore[misc]
        return calls

    async def release(self, leases: Sequence[tuple[str, str]]) -> None:
        requests = [
            pb.ReleaseRequest(session_id=sid, lease_token=token, outcome=pb.OUTCOME_COMPLETED) for sid, token in leases
        ]
        calls = [lambda r=r: self.scheduler.Release(r, timeout=10) for r in requests]
        await closed_loop(calls, self.options.concurrency)

    async def cost_ms(self, server: str, calls: Sequence[Callable[[], Awaitable[Any]]]) -> tuple[float, list[Any]]:
        """Server CPU per call in milliseconds, and the answers."""
        before = cpu_seconds(self.pids[server])
        answers = await closed_loop(calls, self.options.concurrency)
        return 1000 * (cpu_seconds(self.pids[server]) - before) / len(calls), answers

    async def rounds(self) -> dict[str, list[float]]:
        """Server CPU per call, one figure a round."""
        costs: dict[str, list[float]] = {"floor": [], "Admit": [], "Place": []}
        for _ in range(self.options.rounds):
            n = self.options.calls
            costs["floor"].append((await self.cost_ms("floor", self.floor_calls(n)))[0])
            admit_ms, answers = await self.cost_ms("server", self.admit_calls(n))
            costs["Admit"].append(admit_ms)
            leases = _leases(answers, self._count)
            costs["Place"].append((await self.cost_ms("server", self.place_calls(leases, n)))[0])
            await self.release(leases)
        return costs

    async def latencies(self) -> dict[str, list[float]]:
        """Latencies at the fixed rate, half of the decisions Admit and half Place."""
        rate, seconds = self.options.rate, self.options.seconds
        n = int(rate * seconds / 2)
        result = {"floor": await open_loop(self.floor_calls(2 * n), rate)}
        warm = await closed_loop(self.admit_calls(200), self.options.concurrency)
        leases = _leases(warm, self._count)
        admits = self.admit_calls(n)
        mixed = [call for pair in zip(admits, self.place_calls(leases, n), strict=True) for call in pair]
        result["Admit + Place"] = await open_loop(mixed, rate)
        await self.release(leases)
        return result


def _leases(answers: Sequence[pb.AdmitResponse], last: int) -> list[tuple[str, str]]:
    first = last - len(answers) + 1
    held = sum(a.decision != pb.DECISION_PLACE for a in answers)
    if held:
        raise RuntimeError(f"{held} of {len(answers)} sessions were not placed: the pool is too small for this bench")
    return [(f"session-{first + n}", a.lease.token) for n, a in enumerate(answers)]


@contextlib.asynccontextmanager
async def _ready(options: argparse.Namespace, stack: ExitStack) -> AsyncIterator[Bench]:
    logs = Path(tempfile.mkdtemp(prefix="bench-rpc-"))
    redis_url = stack.enter_context(control_plane.redis(logs / "redis.log"))
    floor_port, port = control_plane.free_port(), control_plane.free_port()
    command = [sys.executable, "-m", "bench.rpc", "--floor-server", str(floor_port), redis_url]
    floor_child: Child = stack.enter_context(running("floor", command, logs / "floor.log"))
    child = stack.enter_context(control_plane.serve(port, logs / "serve.log", redis_url))
    async with (
        open_aio_channel(f"127.0.0.1:{port}") as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{floor_port}") as floor_channel,
    ):
        await control_plane.wait_ready(channel, child)
        await asyncio.wait_for(floor_channel.channel_ready(), 30)
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        beats = asyncio.create_task(heartbeats(scheduler))
        await asyncio.sleep(3.0)
        try:
            floor: Any = floor_channel.unary_unary(FLOOR_METHOD)
            yield Bench(options, floor, scheduler, floor_child.process.pid, child.process.pid)
        finally:
            beats.cancel()


async def measure(options: argparse.Namespace) -> str:
    """Runs everything; returns the table."""
    with ExitStack() as stack:
        async with _ready(options, stack) as bench:
            await bench.rounds()
            costs = await bench.rounds()
            latencies = await bench.latencies()
    floor = statistics.median(costs["floor"])
    lines = ["| call | server CPU, ms (median of rounds, min to max) | times the floor |", "|---|---|---|"]
    for name, values in costs.items():
        middle = statistics.median(values)
        lines.append(f"| {name} | {middle:.3f} ({min(values):.3f} to {max(values):.3f}) | {middle / floor:.2f} |")
    lines += ["", f"| at {options.rate:g} decisions/s | p50 ms | p99 ms |", "|---|---|---|"]
    for name, values in latencies.items():
        cuts = statistics.quantiles(values, n=100)
        lines.append(f"| {name} | {cuts[49]:.2f} | {cuts[98]:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.rpc", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1500, help="calls per round and kind [1500]")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rate", type=float, default=500.0, help="decisions per second for the latencies [500]")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--floor-server", nargs=2, metavar=("PORT", "REDIS_URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.floor_server is not None:
        try:
            import uvloop
        except ImportError:
            asyncio.run(floor_server(int(options.floor_server[0]), options.floor_server[1]))
        else:
            uvloop.run(floor_server(int(options.floor_server[0]), options.floor_server[1]))
        return 0
    print(asyncio.run(measure(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
