"""How far the ledger is from the engines' own truth: plays the rollout workload and compares, once per second.

The ledger's side is `reserved_blocks` of each instance. The engine's side comes from its KV events: of all the blocks
that the living sessions' contexts fill, shared ones once, those that are in its cache at that moment. Engines must be
idle at the start and publish KV events; the other options are those of `bench.real`.
"""

import argparse
import asyncio
import logging
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, cast

import httpx
import numpy as np

from bench import real
from bench.backends import Backend, Completion, OnTokens, VllmBackend
from bench.children import cancel_on_sigterm, measured
from bench.player import PlayConfig, Player, RunRecord
from bench.workload import Workload, WorkloadConfig
from moorage import PrefixHasher
from moorage.channel import open_aio_channel
from moorage.collect.kv_sources import locate, read_vllm_sources
from moorage.collect.kv_subscriber import Subscriber, open_context
from moorage.collect.kv_tracker import Tracker
from moorage.v1 import inspector_pb2, inspector_pb2_grpc

if TYPE_CHECKING:
    import zmq.asyncio

    from moorage.v1.inspector_pb2_grpc import InspectorServiceAsyncStub

log = logging.getLogger(__name__)


@dataclass
class Context:
    """What one living session has in some engine: its context in whole blocks, and what it generates just now."""

    engine: str
    hasher: PrefixHasher
    length: int = 0
    generated: int = 0

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in the context so far, which begins with what was there before."""
        self.hasher.extend(tokens[self.length :])
        self.length = max(self.length, len(tokens))
        self.generated = 0


@dataclass
class WatchedBackend:
    """An engine whose sessions' contexts are noted on the way."""

    backend: VllmBackend
    contexts: dict[str, Context]
    block_size: int

    async def complete(
        self, request_id: str, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens
    ) -> Completion:
        """See `Backend.complete`."""
        session_id = request_id.rpartition("/")[0]
        context = self.contexts.setdefault(session_id, Context(self.backend.url, PrefixHasher(self.block_size)))
        context.engine = self.backend.url
        context.grow(prompt)

        def count(tokens: int) -> None:
            context.generated = tokens
            on_tokens(tokens)

        completion = await self.backend.complete(request_id, prompt, output_tokens, count)
        context.grow([*prompt, *completion.token_ids])
        return completion


@dataclass(frozen=True)
class Sample:
    """One instance at one moment, in blocks."""

    ledger: int
    held: int
    """Of the living sessions' blocks, those that are in the cache."""
    wanted: int
    """The living sessions' blocks, cached or not."""

    @property
    def error(self) -> float:
        """Of the ledger, relative to what is held."""
        return (self.ledger - self.held) / self.held


@dataclass
class Scales:
    """Weighs the ledger against the engines, once per second, until cancelled."""

    inspector: "InspectorServiceAsyncStub"
    pool: str
    block_size: int
    trackers: Mapping[str, Tracker]
    contexts: Mapping[str, Context]
    record: RunRecord
    samples: list[Sample] = field(default_factory=list)

    async def run(self, warmup_s: float) -> None:
        """Weigh from `warmup_s` on."""
        await asyncio.sleep(warmup_s)
        while True:
            answer = await self.inspector.ListInstances(inspector_pb2.ListInstancesRequest(pool=self.pool))
            for instance in answer.instances:
                self._weigh(instance.snapshot.endpoint.rstrip("/"), instance.reserved_blocks)
            await asyncio.sleep(1.0)

    def _weigh(self, engine: str, ledger: int) -> None:
        tracker = self.trackers[engine]
        living = {s.session_id for s in self.record.sessions if s.outcome == "living"}
        mine = [c for sid, c in self.contexts.items() if c.engine == engine and sid in living]
        hashes = {value for c in mine for value in c.hasher.hashes}
        # Blocks in the making are not in the events yet, but held: a running request references them.
        growing = sum((c.length % self.block_size + c.generated) // self.block_size for c in mine)
        held = sum(value in tracker.record for value in hashes) + growing
        if held and not tracker.behind:
            self.samples.append(Sample(ledger, held, len(hashes) + growing))


async def listen(url: str, context: "zmq.asyncio.Context") -> tuple[Tracker, Subscriber]:
    """A record of the engine's cache, and what keeps it. RuntimeError where the engine publishes nothing."""
    async with httpx.AsyncClient(trust_env=False) as http:
        told = read_vllm_sources((await http.get(f"{url}/kv_event_sources")).json())
    if 0 not in told:
        raise RuntimeError(f"{url} publishes no KV events")
    source = await locate(told[0], url)
    tracker = Tracker(can_replay=source.replay is not None)
    return tracker, Subscriber(context, source, tracker, lambda remark: log.warning("%s: %s", url, remark))


async def play(options: argparse.Namespace) -> list[Sample]:
    """Run the workload under moorage and weigh."""
    cancel_on_sigterm()
    workload = WorkloadConfig(max_context=options.max_context, group_size=options.group_size)
    urls = [url.rstrip("/") for url in options.engines]
    contexts: dict[str, Context] = {}
    async with AsyncExitStack() as stack:
        zmq_context = await stack.enter_async_context(open_context())
        heard = {url: await listen(url, zmq_context) for url in urls}
        tasks = [asyncio.create_task(subscriber.run()) for _, subscriber in heard.values()]
        stack.push_async_callback(end, tasks)
        engines: dict[str, Backend] = {}
        for url in urls:
            backend = await stack.enter_async_context(VllmBackend(url, options.model))
            await asyncio.sleep(0.5)
            await backend.reset_prefix_cache()
            engines[url] = WatchedBackend(backend, contexts, options.block_size)
        started = await real.moorage(options, urls, workload, stack)
        bounds = PlayConfig(live=options.live, sessions=options.sessions, duration_s=options.duration)
        player = Player(Workload(workload, options.seed), started.router, engines, bounds)
        channel = await stack.enter_async_context(open_aio_channel(started.server))
        inspector = cast("InspectorServiceAsyncStub", inspector_pb2_grpc.InspectorServiceStub(channel))
        trackers = {url: tracker for url, (tracker, _) in heard.items()}
        scales = Scales(inspector, options.pool, options.block_size, trackers, contexts, player.record)
        tasks.append(asyncio.create_task(scales.run(options.warmup)))
        await player.run()
    return scales.samples


async def end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel; what failed on the way is said."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            log.warning("weighing or listening failed: %r", result)


def report(samples: Sequence[Sample]) -> str:
    """The figures as Markdown."""
    errors = np.array([s.error for s in samples])
    kept = median(s.held / s.wanted for s in samples)
    sizes = defaultdict(list)
    for sample in samples:
        sizes["held"].append(sample.held)
        sizes["ledger"].append(sample.ledger)
    return (
        "| samples | ledger p50 | held p50 | error p50 | abs. error p50 | abs. error p95 | contexts held p50 |\n"
        "|---|---|---|---|---|---|---|\n"
        f"| {len(samples)} | {median(sizes['ledger']):.0f} | {median(sizes['held']):.0f} | {np.median(errors):+.1%} "
        f"| {np.median(abs(errors)):.1%} | {np.percentile(abs(errors), 95):.1%} | {kept:.1%} |"
    )


def main() -> int:
    """Play, print; return the exit code."""
    options = real.parse([*sys.argv[1:], "--router", "moorage"])
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    samples = measured(play(options))
    if not samples:
        print("error: no moment could be weighed", file=sys.stderr)
        return 1
    print(report(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
