"""Plays the rollout workload on real vLLM engines, under moorage or a plain router, and prints a table row.

Engines are given by URL (see `bench.engines` for starting some). With `--router moorage` and without `--server` the
control plane, a Redis and its collector run as children for the time of the run.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench import control_plane, report
from bench.backends import VllmBackend
from bench.children import cancel_on_sigterm, measured
from bench.moorage_router import MoorageRouter
from bench.player import PlayConfig, Player, RunRecord
from bench.routers import LeastLoadedRouter, Router, StickyRouter
from bench.summary import summarise
from bench.workload import Workload, WorkloadConfig
from moorage import AsyncClient
from moorage.channel import open_aio_channel

log = logging.getLogger(__name__)

BLOCK_SIZE = 32
COLLECT_INTERVAL_S = 1.0
DEFAULT_WARMUP_S = 60.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m bench.real", description=__doc__)
    add = parser.add_argument
    add("--engines", nargs="+", required=True, metavar="URL", help="vLLM servers")
    add("--router", choices=["moorage", "least-loaded", "sticky"], required=True)
    add("--server", metavar="HOST:PORT", help="running control plane [starts one]")
    add("--embedded", action="store_true", help="without --server: on the embedded store, not on a Redis of its own")
    add("--collect", action=argparse.BooleanOptionalAction, default=True, help="run the collector too [yes]")
    add("--pool", default="default")
    add("--policy", choices=["static", "session", "misa", "misa-t"], help="policy of the pool [as configured]")
    add("--cap", type=int, help="sessions per engine: static cap of moorage, or of the sticky router [none]")
    add("--model", default="tiny", help="served model name [tiny]")
    add("--sessions", type=int, help="end after that many sessions")
    add("--duration", type=float, help="end after that many seconds; living sessions are cancelled")
    add("--live", type=int, default=96, help="rollouts in hand at once, waiting ones included [96]")
    add("--warmup", type=float, default=DEFAULT_WARMUP_S, help="seconds before the steady window [60]")
    add("--seed", type=int, default=1)
    add("--max-context", type=int, default=WorkloadConfig().max_context, help="tokens that stand for 128K [7000]")
    add("--group-size", type=int, default=WorkloadConfig().group_size, help="samples of one prompt [4]")
    add("--block-size", type=int, default=BLOCK_SIZE, help="tokens per block of the engines [32]")
    add("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    if options.sessions is None and options.duration is None:
        parser.error("give --sessions or --duration, or both")
    return options


async def play(options: argparse.Namespace) -> RunRecord:
    """Run the workload as the options say."""
    cancel_on_sigterm()
    workload = WorkloadConfig(max_context=options.max_context, group_size=options.group_size)
    async with AsyncExitStack() as stack:
        engines = {url.rstrip("/"): VllmBackend(url, options.model) for url in options.engines}
        for engine in engines.values():
            await stack.enter_async_context(engine)
            await _empty_cache(engine)
        router = await _router(options, list(engines), workload, stack)
        bounds = PlayConfig(live=options.live, sessions=options.sessions, duration_s=options.duration)
        return await Player(Workload(workload, options.seed), router, engines, bounds).run()


async def _empty_cache(engine: VllmBackend) -> None:
    try:
        await engine.reset_prefix_cache()
    except httpx.HTTPStatusError as error:
        log.warning("prefix cache of %s is not reset (%s): hits may come from earlier runs", engine.url, error)


async def _router(
    options: argparse.Namespace, engines: list[str], workload: WorkloadConfig, stack: AsyncExitStack
) -> Router:
    if options.router == "least-loaded":
        return LeastLoadedRouter(engines)
    if options.router == "sticky":
        return StickyRouter(engines, options.cap)
    return (await moorage(options, engines, workload, stack)).router


@dataclass(frozen=True)
class Moorage:
    """A control plane at work, and the router that asks it."""

    server: str
    router: MoorageRouter


async def moorage(
    options: argparse.Namespace, engines: list[str], workload: WorkloadConfig, stack: AsyncExitStack
) -> Moorage:
    """Start what the options ask for: server, store, collector; tell it the mixture."""
    logs = Path(tempfile.mkdtemp(prefix="bench-real-"))
    child = None
    server = options.server
    if server is None:
        port = control_plane.free_port()
        redis_url = None
        if not options.embedded:
            redis_url = stack.enter_context(control_plane.redis(logs / "redis.log"))
        child = stack.enter_context(control_plane.serve(port, logs / "serve.log", redis_url))
        server = f"127.0.0.1:{port}"
    async with open_aio_channel(server) as channel:
        await control_plane.wait_ready(channel, child)
        await control_plane.configure(channel, options.pool, workload, options.policy, options.cap)
    if options.collect:
        stack.enter_context(
            control_plane.collect(engines, options.pool, server, COLLECT_INTERVAL_S, logs / "collect.log")
        )
    client = await stack.enter_async_context(AsyncClient(server, pool=options.pool))
    router = MoorageRouter(client, max_context=options.max_context, block_size=options.block_size)
    return Moorage(server, router)


def name_of(options: Mapping[str, object]) -> str:
    """Return the name of a run's row: router, policy, cap."""
    parts = [str(options["router"])]
    parts += [str(options["policy"])] if options.get("policy") else []
    parts += [f"cap {options['cap']}"] if options.get("cap") else []
    return " ".join(parts)


def main() -> int:
    """Play, print, write; return the exit code."""
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    run = measured(play(options))
    summary = summarise(run, options.warmup, options.block_size)
    print(report.table_header())
    print(report.table_row(name_of(vars(options)), summary))
    for line in report.text(summary):
        print(line, file=sys.stderr)
    if options.out is not None:
        report.write_json(options.out, vars(options), summary, run)
    return 0 if summary.outcomes.get("completed") else 1


if __name__ == "__main__":
    sys.exit(main())
