"""Decisions per second of one server with one process and with several, in turns, on one machine.

The client is one process with many connections, in a closed loop: a third each of Admit, Place and Release. It, the
Redis and the servers share the cores, so what several processes gain is bounded by what the others leave them: read
the ratio together with the cores that each part used. Linux only: CPU times are read from /proc.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc

from bench import control_plane
from bench.children import running
from bench.rpc import cpu_seconds, heartbeats
from moorage.channel import open_aio_channel
from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc

#: A connection of its own: channels of one process would share one, and so be served by one process.
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
TIMEOUT_S = 30


class Served:
    """A server of so many processes, and connections to it."""

    def __init__(self, processes: int, pid: int, channels: Sequence[grpc.aio.Channel]) -> None:
        self.processes = processes
        self.pid = pid
        self.schedulers: list[Any] = [scheduler_pb2_grpc.SchedulerServiceStub(channel) for channel in channels]
        self.rates: list[float] = []
        self._numbers = itertools.count()

    def cpu_seconds(self) -> float:
        """CPU time of the server, its workers included."""
        workers = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(cpu_seconds(pid) for pid in (self.pid, *map(int, workers)))

    async def play(self, concurrency: int, seconds: float) -> float:
        """Decisions per second over the next seconds."""
        end, decisions = time.monotonic() + seconds, 0

        async def caller(scheduler: Any) -> None:
            nonlocal decisions
            while time.monotonic() < end:
                await self._session(scheduler)
                decisions += 3

        started = time.monotonic()
        await asyncio.gather(*(caller(self.schedulers[n % len(self.schedulers)]) for n in range(concurrency)))
        return decisions / (time.monotonic() - started)

    async def _session(self, scheduler: Any) -> None:
        name = f"session-{next(self._numbers)}"
        admit = pb.AdmitRequest(session_id=name, workload_class="rlvr", prompt_tokens=1000, expected_output_tokens=2000)
        admitted = await scheduler.Admit(admit, timeout=TIMEOUT_S)
        if admitted.decision != pb.DECISION_PLACE:
            raise RuntimeError(f"{name} was not placed: {admitted.hold}")
        token = admitted.lease.token
        place = pb.PlaceRequest(session_id=name, lease_token=token, turn=1, prompt_tokens=1500)
        await scheduler.Place(place, timeout=TIMEOUT_S)
        release = pb.ReleaseRequest(session_id=name, lease_token=token, outcome=pb.OUTCOME_COMPLETED)
        await scheduler.Release(release, timeout=TIMEOUT_S)


async def _served(stack: AsyncExitStack, processes: int, connections: int, redis_url: str, logs: Path) -> Served:
    address = f"127.0.0.1:{control_plane.free_port()}"
    command = [*control_plane.MOORAGE, "serve", "--listen", address, "--redis-url", redis_url]
    child = stack.enter_context(
        running(
            f"moorage serve --processes {processes}",
            [*command, "--processes", str(processes)],
            logs / f"serve-{processes}.log",
            {"MOORAGE_REDIS_KEY_PREFIX": f"p{processes}", "MOORAGE_LOG_DECISIONS": "none"},
        )
    )
    channels = [
        await stack.enter_async_context(open_aio_channel(address, options=[OWN_CONNECTION])) for _ in range(connections)
    ]
    for channel in channels:
        await control_plane.wait_ready(channel, child)
    served = Served(processes, child.process.pid, channels)
    beats = asyncio.create_task(heartbeats(served.schedulers[0]))
    stack.callback(beats.cancel)
    return served


async def measure(options: argparse.Namespace) -> str:
    """Runs everything; returns the table."""
    logs = Path(tempfile.mkdtemp(prefix="bench-processes-"))
    async with AsyncExitStack() as stack:
        redis_url = stack.enter_context(control_plane.redis(logs / "redis.log"))
        servers = [
            await _served(stack, processes, options.connections, redis_url, logs) for processes in options.processes
        ]
        await asyncio.sleep(3.0)
        used: dict[int, list[tuple[float, float]]] = {processes: [] for processes in options.processes}
        for number in range(options.rounds + 1):
            for server in servers:
                before = (server.cpu_seconds(), cpu_seconds(os.getpid()))
                rate = await server.play(options.concurrency, options.seconds)
                after = (server.cpu_seconds(), cpu_seconds(os.getpid()))
                # The first round warms up.
                if number:
                    server.rates.append(rate)
                    used[server.processes].append(
                        ((after[0] - before[0]) / options.seconds, (after[1] - before[1]) / options.seconds)
                    )
    first = statistics.median(servers[0].rates)
    lines = [
        "| processes | decisions/s (median of rounds, min to max) | ratio | cores: server | client |",
        "|---|---|---|---|---|",
    ]
    for server in servers:
        middle = statistics.median(server.rates)
        cores = [statistics.median(column) for column in zip(*used[server.processes], strict=True)]
        lines.append(
            f"| {server.processes} | {middle:.0f} ({min(server.rates):.0f} to {max(server.rates):.0f})"
            f" | {middle / first:.2f} | {cores[0]:.2f} | {cores[1]:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.processes", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="processes of each server [1 2]")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a round [4]")
    with contextlib.suppress(KeyboardInterrupt):
        print(asyncio.run(measure(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
