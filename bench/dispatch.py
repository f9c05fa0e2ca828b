"""Server CPU per call and decisions per second: one stream (Dispatch) against unary calls.

Both are measured side by side: the same server on the same Redis, the same client process, the same calls with request
ids, by turns in short rounds. `Place` and `Admit` are those calls alone; `mix` is a router's loop, per session one
Admit, 15 times a Place and a progress report, and one Release; `mix, no reports` is the same without the reports,
which a unary caller may gather into one Heartbeat. Linux only: CPU times are read from /proc.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from bench import control_plane
from bench.rpc import cpu_seconds, heartbeats
from moorage import AsyncClient
from moorage.dispatch import AsyncDispatch
from moorage.v1 import scheduler_pb2 as pb

TURNS = 15
TIMEOUT_S = 30.0
CLASSES = ("agentic", "rlvr", "rlhf")


class Way(Protocol):
    """A way to make calls."""

    async def call(self, kind: str, request: Any) -> Any:
        """The answer to a request; ``kind`` is its name in DispatchItem."""
        ...


class Unary:
    """One RPC per call."""

    def __init__(self, scheduler: Any) -> None:
        self._methods = {"admit": scheduler.Admit, "place": scheduler.Place, "release": scheduler.Release}
        self._heartbeat = scheduler.Heartbeat

    async def call(self, kind: str, request: Any) -> Any:
        if kind == "progress":
            beat = pb.HeartbeatRequest(sessions=[request.session])
            return (await self._heartbeat(beat, timeout=TIMEOUT_S)).sessions[0]
        return await self._methods[kind](request, timeout=TIMEOUT_S)


class Stream:
    """All calls over one stream."""

    def __init__(self, dispatch: AsyncDispatch) -> None:
        self._dispatch = dispatch

    async def call(self, kind: str, request: Any) -> Any:
        return await self._dispatch.call(kind, request, TIMEOUT_S)


@dataclass(frozen=True)
class Cost:
    """What one round cost: milliseconds of CPU per call at the server and at the store, and calls per second."""

    server_ms: float
    store_ms: float
    per_second: float


class Bench:
    """One run: a server, its Redis, and both ways to it."""

    def __init__(self, options: argparse.Namespace, ways: dict[str, Way], server_pid: int, store_pid: int) -> None:
        self.options = options
        self.ways = ways
        self._pids = (server_pid, store_pid)
        self._count = 0

    async def admit(self, way: Way) -> tuple[str, str]:
        """A new session and its token."""
        self._count += 1
        request = pb.AdmitRequest(
            session_id=f"session-{self._count}",
            request_id=str(uuid4()),
            workload_class=CLASSES[self._count % len(CLASSES)],
            prompt_tokens=1000,
            expected_output_tokens=2000,
        )
        answer = await way.call("admit", request)
        if answer.decision != pb.DECISION_PLACE:
            raise RuntimeError(f"a session was not placed: the pool is too small for this bench\n{answer}")
        return request.session_id, answer.lease.token

    async def place(self, way: Way, session: tuple[str, str], turn: int) -> None:
        sid, token = session
        request = pb.PlaceRequest(
            session_id=sid, request_id=str(uuid4()), lease_token=token, turn=turn, prompt_tokens=1000 + 100 * turn
        )
        answer = await way.call("place", request)
        if answer.decision != pb.DECISION_PLACE:
            raise RuntimeError(f"a living session was not placed\n{answer}")

    async def report(self, way: Way, session: tuple[str, str], turn: int) -> None:
        progress = pb.SessionProgress(
            session_id=session[0],
            lease_token=session[1],
            phase=pb.PHASE_TOOL_WAIT,
            turn=turn,
            context_tokens=1080 + 100 * turn,
            cached_tokens=900 + 100 * turn,
        )
        answer = await way.call("progress", pb.ProgressReport(session=progress))
        if not answer.known:
            raise RuntimeError(f"a living session is not known\n{answer}")

    async def release(self, way: Way, session: tuple[str, str]) -> None:
        sid, token = session
        request = pb.ReleaseRequest(
            session_id=sid, request_id=str(uuid4()), lease_token=token, outcome=pb.OUTCOME_COMPLETED
        )
        await way.call("release", request)

    async def life(self, way: Way, reports: bool) -> None:
        """A session as a router's loop sees it."""
        session = await self.admit(way)
        for turn in range(1, TURNS + 1):
            await self.place(way, session, turn)
            if reports:
                await self.report(way, session, turn)
        await self.release(way, session)

    async def cost(self, calls: int, work: Iterable[Callable[[], Awaitable[Any]]]) -> Cost:
        """Runs work in a closed loop, and says what each of its ``calls`` cost."""
        todo = iter(work)

        async def worker() -> None:
            for one in todo:
                await one()

        before, began = [cpu_seconds(pid) for pid in self._pids], time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(self.options.concurrency)))
        seconds = time.perf_counter() - began
        server, store = (cpu_seconds(pid) - was for pid, was in zip(self._pids, before, strict=True))
        return Cost(1000 * server / calls, 1000 * store / calls, calls / seconds)

    async def round(self, way: Way) -> dict[str, Cost]:
        """One round of everything over one way."""
        n, living = self.options.calls, list[tuple[str, str]]()

        async def enter() -> None:
            living.append(await self.admit(way))

        costs = {"Admit": await self.cost(n, [enter] * n)}
        costs["Place"] = await self.cost(
            n,
            [lambda s=s: self.place(way, s, 1) for s in living],  # type: ignore[misc]
        )
        await self.cost(n, [lambda s=s: self.release(way, s) for s in living])  # type: ignore[misc]
        for name, reports in (("mix", True), ("mix, no reports", False)):
            per_life = 2 + TURNS * (2 if reports else 1)
            lives = max(self.options.concurrency, 2 * n // per_life)
            costs[name] = await self.cost(lives * per_life, [lambda r=reports: self.life(way, r)] * lives)  # type: ignore[misc]
        return costs

    async def rounds(self, count: int) -> dict[str, dict[str, list[Cost]]]:
        """By way and kind of work, one cost a round; the ways take turns."""
        costs: dict[str, dict[str, list[Cost]]] = {name: {} for name in self.ways}
        for _ in range(count):
            for name, way in self.ways.items():
                for kind, cost in (await self.round(way)).items():
                    costs[name].setdefault(kind, []).append(cost)
        return costs


@contextlib.asynccontextmanager
async def _ready(options: argparse.Namespace, stack: ExitStack) -> AsyncIterator[Bench]:
    logs = Path(tempfile.mkdtemp(prefix="bench-dispatch-"))
    url, store = stack.enter_context(control_plane.redis_process(logs / "redis.log"))
    port = control_plane.free_port()
    child = stack.enter_context(control_plane.serve(port, logs / "serve.log", url))
    async with AsyncClient(f"127.0.0.1:{port}") as client, client.dispatch() as dispatch:
        await control_plane.wait_ready(client._channel, child)
        beats = asyncio.create_task(heartbeats(client.scheduler))
        await asyncio.sleep(3.0)
        ways: dict[str, Way] = {"unary": Unary(client.scheduler), "stream": Stream(dispatch)}
        try:
            yield Bench(options, ways, child.process.pid, store.process.pid)
        finally:
            beats.cancel()


async def measure(options: argparse.Namespace) -> str:
    """Runs everything; returns the table."""
    with ExitStack() as stack:
        async with _ready(options, stack) as bench:
            await bench.rounds(1)
            costs = await bench.rounds(options.rounds)
    lines = [
        f"{options.concurrency} sessions at a time, medians of {options.rounds} rounds (smallest to largest)",
        "",
        "| work | unary: server CPU, ms per call | stream: server CPU, ms per call | ratio | calls/s per server core"
        " | calls/s in this run | store CPU, ms per call |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in costs["unary"]:
        unary, stream = costs["unary"][kind], costs["stream"][kind]
        one, other = (statistics.median(c.server_ms for c in side) for side in (unary, stream))
        rates = [statistics.median(c.per_second for c in side) for side in (unary, stream)]
        stores = [statistics.median(c.store_ms for c in side) for side in (unary, stream)]
        lines.append(
            f"| {kind} | {_range(unary)} | {_range(stream)} | {one / other:.1f}"
            f" | {1000 / one:.0f} -> {1000 / other:.0f} | {rates[0]:.0f} -> {rates[1]:.0f}"
            f" | {stores[0]:.3f} -> {stores[1]:.3f} |"
        )
    return "\n".join(lines)


def _range(costs: list[Cost]) -> str:
    values = [cost.server_ms for cost in costs]
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3000, help="calls per round, way and kind [3000]")
    parser.add_argument("--concurrency", type=int, default=64, help="sessions at a time [64]")
    print(asyncio.run(measure(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
