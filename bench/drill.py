"""A fire drill on real vLLM engines: weights change, a cache is reset, engines sleep, die and come back, under load.

Starts two engines, a Redis, a server and a collector; plays the rollout workload; carries out each exercise at its time
and prints, as Markdown, a timeline around it and what became of the sessions.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import httpx

from bench import control_plane, drill_report, engines
from bench.backends import VllmBackend
from bench.children import Child, cancel_on_sigterm, measured
from bench.drill_report import Exercise, Log, Moment
from bench.moorage_router import MoorageRouter
from bench.player import PlayConfig, Player
from bench.workload import Workload, WorkloadConfig
from moorage import AsyncClient
from moorage.channel import open_aio_channel
from moorage.v1 import inspector_pb2, inspector_pb2_grpc, operator_pb2, operator_pb2_grpc

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2_grpc import InspectorServiceAsyncStub
    from moorage.v1.operator_pb2_grpc import OperatorServiceAsyncStub

log = logging.getLogger(__name__)

POOL = "default"
BLOCK_SIZE = 32
#: First exercise, and time between two, in seconds of the run: long enough for rates to settle.
FIRST_S, APART_S = 45.0, 45.0
#: How long weights are loaded, an engine sleeps, a dead one stays away.
LOAD_S, SLEEP_S, AWAY_S = 6.0, 8.0, 12.0
READY_S = 240.0


@dataclass
class Engine:
    """One engine, which can be killed and started again under its address."""

    options: argparse.Namespace
    number: int
    log: Path
    stack: ExitStack
    child: Child | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.options.ports[self.number]}"

    def start(self) -> None:
        """Start it; `ready` waits for it."""
        o, port = self.options, self.options.ports[self.number]
        self.child = engines.start_engine(self.stack, o.vllm_dir, o.serve_script, port, o.blocks, self.number, self.log)

    async def ready(self) -> None:
        """Wait until it answers; RuntimeError if it ends or takes too long."""
        assert self.child is not None
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as http, asyncio.timeout(READY_S):
            while True:
                self.child.require_alive()
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{self.url}/health")).is_success:
                        return
                await asyncio.sleep(0.5)

    async def post(self, path: str) -> None:
        """Call one of its development endpoints; httpx.HTTPError where it refuses."""
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
            (await http.post(self.url + path)).raise_for_status()

    def kill(self) -> None:
        """End it at once, workers included."""
        assert self.child is not None
        self.child.signal_group(signal.SIGKILL)
        self.child.process.wait(10.0)


class Drill:
    """The exercises, each with what the trainer or an accident does."""

    def __init__(self, a: Engine, b: Engine, operator: "OperatorServiceAsyncStub", clock: Callable[[], float]) -> None:
        self._a, self._b = a, b
        self._operator = operator
        self._clock = clock
        self._steps: list[tuple[float, str]] = []
        self._victim = ""

    async def weight_update(self) -> None:
        """Both engines pause, load, resume; the cache stays."""
        await self._operator.BeginWeightUpdate(operator_pb2.BeginWeightUpdateRequest(pool=POOL, weight_version="1"))
        self._step("Begin")
        for engine in (self._a, self._b):
            await engine.post("/pause?mode=keep&clear_cache=false")
        self._step("paused")
        await asyncio.sleep(LOAD_S)
        for engine in (self._a, self._b):
            await engine.post("/resume")
        self._step("resumed")
        await self._operator.EndWeightUpdate(operator_pb2.EndWeightUpdateRequest(pool=POOL, weight_version="1"))
        self._step("End")

    async def reset_cache(self) -> None:
        """One engine loses its cache, running requests included, and nobody says so."""
        await self._a.post("/reset_prefix_cache?reset_running_requests=true")
        self._step("reset")

    async def sleep_and_wake(self) -> None:
        """One engine gives its memory up for a while."""
        await self._b.post("/sleep?level=1&mode=keep")
        self._step("asleep")
        await asyncio.sleep(SLEEP_S)
        await self._b.post("/wake_up")
        self._step("awake")

    async def kill_and_restart(self) -> None:
        """One engine dies without a word and comes back under its name."""
        self._a.kill()
        self._victim = "A"
        self._step("killed")
        await asyncio.sleep(AWAY_S)
        self._a.start()
        self._step("started again")
        await self._a.ready()
        self._step("answers")

    def _step(self, what: str) -> None:
        self._steps.append((self._clock(), what))

    async def carry_out(self, name: str, act: Callable[[], Awaitable[None]]) -> Exercise:
        """One exercise; what goes wrong in it is part of its record."""
        self._steps = []
        started = self._clock()
        try:
            await act()
        except (httpx.HTTPError, RuntimeError, TimeoutError) as error:
            self._step(f"failed: {error!r}")
        return Exercise(name, (act.__doc__ or "").strip(), started, self._clock(), tuple(self._steps), self._victim)


async def observe(inspector: "InspectorServiceAsyncStub", clock: Callable[[], float], book: Log) -> None:
    """Write down once per second what the control plane shows, until cancelled."""
    while True:
        instances = await inspector.ListInstances(inspector_pb2.ListInstancesRequest(pool=POOL))
        pool = await inspector.GetPool(inspector_pb2.GetPoolRequest(pool=POOL))
        book.moments.append(Moment(clock(), list(instances.instances), pool))
        await asyncio.sleep(1.0)


async def follow(inspector: "InspectorServiceAsyncStub", clock: Callable[[], float], book: Log) -> None:
    """Write down every event, until cancelled."""
    async for event in inspector.WatchEvents(inspector_pb2.WatchEventsRequest(pool=POOL)):
        book.events.append((clock(), event))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m bench.drill", description=__doc__)
    engines.add_options(parser)
    parser.add_argument("--live", type=int, default=48, help="rollouts in hand at once, waiting ones included [48]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="tiny", help="served model name [tiny]")
    parser.add_argument("--out", type=Path, help="write the report to this file too")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> Log:
    """Play, drill, and return what was seen."""
    cancel_on_sigterm()
    logs = Path(tempfile.mkdtemp(prefix="bench-drill-"))
    async with AsyncExitStack() as stack:
        children = stack.enter_context(ExitStack())
        pair = [Engine(options, n, logs / f"engine-{n}.log", children) for n in range(2)]
        for engine in pair:
            engine.start()
        await asyncio.gather(*(engine.ready() for engine in pair))
        redis_url = children.enter_context(control_plane.redis(logs / "redis.log"))
        port = control_plane.free_port()
        server = f"127.0.0.1:{port}"
        child = children.enter_context(control_plane.serve(port, logs / "serve.log", redis_url))
        channel = await stack.enter_async_context(open_aio_channel(server))
        await control_plane.wait_ready(channel, child)
        workload = WorkloadConfig()
        await control_plane.configure(channel, POOL, workload)
        children.enter_context(control_plane.collect([e.url for e in pair], POOL, server, 0.5, logs / "collect.log"))
        client = await stack.enter_async_context(AsyncClient(server, pool=POOL))
        router = MoorageRouter(client, max_context=workload.max_context, block_size=BLOCK_SIZE)
        backends = {e.url: await stack.enter_async_context(VllmBackend(e.url, options.model)) for e in pair}
        length = FIRST_S + 5 * APART_S + READY_S
        bounds = PlayConfig(live=options.live, duration_s=length, turn_retries=30)
        player = Player(Workload(workload, options.seed), router, backends, bounds)
        inspector = cast("InspectorServiceAsyncStub", inspector_pb2_grpc.InspectorServiceStub(channel))
        operator = cast("OperatorServiceAsyncStub", operator_pb2_grpc.OperatorServiceStub(channel))
        return await _drill(player, pair, inspector, operator)


async def _drill(
    player: Player,
    pair: list[Engine],
    inspector: "InspectorServiceAsyncStub",
    operator: "OperatorServiceAsyncStub",
) -> Log:
    begun = asyncio.get_running_loop().time()

    def clock() -> float:
        return asyncio.get_running_loop().time() - begun

    book = Log(player.record, names={e.url.removeprefix("http://"): "AB"[e.number] for e in pair})
    tasks = [
        asyncio.create_task(t) for t in (player.run(), observe(inspector, clock, book), follow(inspector, clock, book))
    ]
    drill = Drill(pair[0], pair[1], operator, clock)
    acts = (drill.weight_update, drill.reset_cache, drill.sleep_and_wake, drill.kill_and_restart)
    for number, act in enumerate(acts):
        await asyncio.sleep(max(0.0, FIRST_S + number * APART_S - clock()))
        book.exercises.append(await drill.carry_out(act.__name__.replace("_", " "), act))
        log.info("%s", book.exercises[-1])
    await asyncio.sleep(APART_S)
    book.end = clock()
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise RuntimeError(f"the drill could not be watched: {result!r}") from result
    return book


def main() -> int:
    """Drill, print, write; return the exit code: 0 only if every exercise could be carried out."""
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    book = measured(run(options))
    text = "\n".join(drill_report.markdown(book)) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, "utf-8")
    return 0 if all(not what.startswith("failed") for e in book.exercises for _, what in e.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
