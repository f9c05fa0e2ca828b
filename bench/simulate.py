"""The control plane in virtual time: the very desk, epochs and scripts that serve, over emulated engines.

Nothing is left out but gRPC: decisions come from the core, the ledger is the Lua scripts on an in-process store whose
clock is the virtual one. Ten minutes of rollouts play in about one.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType, SimpleNamespace, TracebackType
from typing import Self
from unittest.mock import patch

from bench import report, virtual_time
from bench.backends import EmulatedBackend
from bench.cache_aware import CacheAwareRouter
from bench.clairvoyant import ClairvoyantRouter
from bench.conditions import Shift, carry_out, collector
from bench.control_plane import PRIOR_SAMPLE
from bench.emulator import COSTS, EmulatedEngine, EngineConfig
from bench.player import PlayConfig, Player, Published, RunRecord
from bench.quick_lua import quick_lua
from bench.routers import BoundedRouter, LeastLoadedRouter, Progress, RoutedSession, Router, StickyRouter
from bench.summary import summarise
from bench.workload import SessionPlan, Workload, WorkloadConfig
from moorage_server.core.config import INFER_OFF, INFERENCES, ClassConfig, PoolConfig
from moorage_server.core.view import Ask
from moorage_server.runtime import arrivals
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.desk import Desk
from moorage_server.runtime.tasks import end
from moorage_server.store import records
from moorage_server.store.connect import open_store
from moorage_server.store.keys import instance_key
from moorage_server.store.records import Placed, Request

POOL = "default"
#: Virtual time starts here, so that no time stamp is zero.
EPOCH_S = 1_800_000_000.0
REPORT_S = 1.0


@contextlib.contextmanager
def virtual_store_clock() -> Iterator[None]:
    """Lets the in-process store read the running loop's clock, while the block lasts.

    All of it: where keys expired by the real clock, a busy machine would take the epochs' lease away.
    """

    # Loaded on first use otherwise, and then with the real clock.
    importlib.import_module("fakeredis")
    shim = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    shim.time = now_s
    users = [
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "fakeredis" and getattr(module, "time", None) is time
    ]
    with contextlib.ExitStack() as stack:
        for module in users:
            stack.enter_context(patch.object(module, "time", shim))
        yield


class SimulatedRouter:
    """moorage without the wire: what MoorageRouter says through the client, said to the desk."""

    def __init__(self, desk: Desk, max_context: int) -> None:
        self.desk = desk
        self.max_context = max_context
        self.reports: dict[str, list[records.Progress]] = {}
        self.moved = 0
        """Sessions that were given another engine."""

    def session(self, plan: SessionPlan) -> RoutedSession:
        """See `Router.session`."""
        return _Session(self, plan)

    async def send_reports(self) -> None:
        """One batch of progress per interval, as the client sends it. Also keeps the leases."""
        while True:
            await asyncio.sleep(REPORT_S)
            items, self.reports = self.reports, {}
            flat = [item for group in items.values() for item in group]
            if flat:
                await self.desk.store.progress(POOL, flat)


class _Session:
    def __init__(self, router: SimulatedRouter, plan: SessionPlan) -> None:
        self._router = router
        self._plan = plan
        self._placed: Placed | None = None
        self._context: int | None = None
        self._asked = False

    async def __aenter__(self) -> Self:
        desk, plan = self._router.desk, self._plan
        ask = Ask(
            plan.session_id,
            plan.declared_class,
            group_id=plan.group_id,
            prompt_tokens=len(plan.prompt),
            max_context_tokens=self._router.max_context,
        )
        while self._placed is None:
            arrival = arrivals.arrival(ask, await desk.view(), request=Request(), lease_ttl_ms=600_000)
            result, _ = await desk.admit(arrival, max_wait_s=30.0)
            self._placed = result if isinstance(result, Placed) else None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        placed = self._placed
        if placed is not None:
            sid = self._plan.session_id
            last = self._router.reports.pop(sid, [])
            if last:
                await self._router.desk.store.progress(POOL, last)
            outcome = "COMPLETED" if kind is None else "ABORTED"
            await self._router.desk.release(Request(), sid, placed.token, outcome, self._context)

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        assert self._placed is not None
        # The first request goes where admission said, unless it failed there.
        if turn or self._asked:
            sid, token = self._plan.session_id, self._placed.token
            result = await self._router.desk.place(Request(), sid, token, turn, len(prompt), 60.0)
            if not isinstance(result, Placed):
                raise RuntimeError(f"no home for {sid}: {result.reason}")
            self._router.moved += result.instance != self._placed.instance
            self._placed = result
        self._asked = True
        return self._placed.instance

    def report(self, progress: Progress) -> None:
        assert self._placed is not None
        self._context = progress.context_tokens
        item = records.Progress(
            self._plan.session_id,
            self._placed.token,
            "TOOL_WAIT" if progress.turn_done else "RUNNING",
            progress.turn,
            progress.context_tokens,
            progress.cached_tokens,
        )
        pending = self._router.reports.setdefault(self._plan.session_id, [])
        # A finished turn is kept, a moment of a running one is overtaken by the next.
        if pending and pending[-1].cached_tokens is None:
            pending.pop()
        pending.append(item)


def now_s() -> float:
    """Return virtual time as the store has it: Unix time, in seconds."""
    return EPOCH_S + asyncio.get_running_loop().time()


async def watch(desk: Desk, record: RunRecord) -> None:
    """Write down once per second what the control plane publishes, until cancelled."""
    started = asyncio.get_running_loop().time()
    while True:
        view = await desk.view()
        held = sum(known.held for known in view.classes.values())
        for key, i in view.instances.items():
            why = next((detail for name, _, _, detail in json.loads(i.signals or "[]") if name == "brake"), "")
            need = max(i.need[:-1], default=None)
            time = asyncio.get_running_loop().time() - started
            record.published.append(
                Published(
                    time, key, view.freshness(i), i.budget, need, i.cap, i.brake, why, i.sessions, i.used_blocks,
                    i.preemptions, held,
                )
            )  # fmt: skip
        await asyncio.sleep(1.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated run: `router` is moorage's policy name, or sticky, cache-aware, least-loaded or clairvoyant."""

    router: str
    cap: int | None = None
    engines: int = 2
    blocks: int = 768
    live: int = 96
    duration_s: float = 300.0
    seed: int = 1
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    shift: Shift | None = None
    """What happens half way, under moorage's policies."""
    costs: str = "cpu"
    """Kind of engine, see `emulator.COSTS`."""


def pool_config(case: Case) -> PoolConfig:
    """The pool as `bench.control_plane.configure` would set it: shares, and the mean final context as prior."""
    sample = Workload(case.workload, seed=0)
    classes = {}
    for name, share in sample.target.items():
        prior = fmean(sample.session(name, index).final_context for index in range(PRIOR_SAMPLE))
        classes[name] = ClassConfig(target_share=share, prior_context_tokens=round(prior))
    config = replace(case.pool, policy=case.router, classes=MappingProxyType(classes))
    return config if case.cap is None else replace(config, static_cap=case.cap)


async def play(case: Case) -> RunRecord:
    """Plays one case; call it through `run`."""
    backends = {
        instance_key(f"engine-{n}", 0): EmulatedBackend(
            EmulatedEngine(EngineConfig(num_blocks=case.blocks, costs=COSTS[case.costs]))
        )
        for n in range(case.engines)
    }
    # Only an engine that dies fails a request.
    bounds = PlayConfig(live=case.live, duration_s=case.duration_s, turn_retries=60)
    workload = Workload(case.workload, case.seed)
    async with contextlib.AsyncExitStack() as stack:
        for backend in backends.values():
            await stack.enter_async_context(backend)
        router: Router
        if case.router == "sticky":
            router = StickyRouter(list(backends), case.cap)
        elif case.router == "cache-aware":
            router = BoundedRouter(
                CacheAwareRouter(list(backends)), None if case.cap is None else case.cap * case.engines
            )
        elif case.router == "least-loaded":
            router = LeastLoadedRouter(list(backends))
        elif case.router == "clairvoyant":
            router = ClairvoyantRouter(list(backends), case.blocks, EngineConfig().block_size)
        else:
            store = await open_store(None, embedded=True)
            config = pool_config(case)
            control = ControlPlane(store, {POOL: config})
            await control.start()
            stack.push_async_callback(control.stop)
            simulated = SimulatedRouter(control.desk(POOL), case.workload.max_context)
            collecting = collector(store, POOL, backends, now_s)
            tasks = [asyncio.create_task(w) for w in (collecting.run(), simulated.send_reports())]
            stack.push_async_callback(end, tasks)
            await asyncio.sleep(2.0)
            player = Player(workload, simulated, backends, bounds)
            tasks.append(asyncio.create_task(watch(control.desk(POOL), player.record)))
            if case.shift is not None:
                tasks.append(asyncio.create_task(carry_out(case.shift, workload, collecting, config)))
            record = await player.run()
            for task in tasks:
                # What went wrong beside the run made it another one.
                if task.done():
                    task.result()
            record.moved = simulated.moved
            return record
        return await Player(workload, router, backends, bounds).run()


def run(case: Case) -> RunRecord:
    """Plays one case in virtual time; the same case plays the same run."""
    # Polling intervals are jittered.
    random.seed(case.seed)
    with virtual_store_clock(), quick_lua():
        return virtual_time.run(play(case))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    parser.add_argument(
        "routers",
        nargs="+",
        metavar="ROUTER",
        help="static session misa misa-t sticky cache-aware least-loaded clairvoyant",
    )
    parser.add_argument("--cap", type=int, help="sessions per engine of static and sticky")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=768)
    parser.add_argument("--live", type=int, default=96)
    parser.add_argument("--duration", type=float, default=300.0)
    parser.add_argument("--warmup", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inference", choices=INFERENCES, default=INFER_OFF, help="whose class behaviour may tell")
    parser.add_argument("--mislabelled", type=float, default=0.0, help="share of sessions that declare a wrong class")
    parser.add_argument("--unlabelled", type=float, default=0.0, help="share of sessions that declare no class")
    options = parser.parse_args()
    print(report.table_header())
    for router in options.routers:
        case = Case(
            router,
            options.cap,
            options.engines,
            options.blocks,
            options.live,
            options.duration,
            options.seed,
            WorkloadConfig(mislabelled=options.mislabelled, unlabelled=options.unlabelled),
            PoolConfig(class_inference=options.inference),
        )
        record = run(case)
        print(report.table_row(router, summarise(record, options.warmup)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
