"""moorage against its peers on the same real engines: the same sessions, interleaved runs, one table.

Every peer plays every seed at each of its caps (sessions in hand at once; those above it wait, first come first
served), in an order shuffled per seed and round. A finished run is written to `--out` at once and not played again, so
that a comparison can be stopped and taken up. Two are bounds: `clairvoyant` knows every plan in advance, `unlimited`
has KV memory for all; that one comes last, as it needs engines with more blocks.
"""

import argparse
import asyncio
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from bench import children, cpu, engines, peers_report, real, vllm_router
from bench.backends import Backend, VllmBackend
from bench.children import cancel_on_sigterm, measured
from bench.clairvoyant import ClairvoyantRouter
from bench.control_plane import free_port
from bench.player import PlayConfig, Player, RunRecord
from bench.routers import BoundedRouter, LeastLoadedRouter, Router, StickyRouter
from bench.summary import summarise
from bench.workload import Workload, WorkloadConfig

IDLE_TRIES, IDLE_PAUSE_S = 120, 0.5

REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")

DEFAULT_CAPS: Mapping[str, tuple[int | None, ...]] = {
    "cache_aware": (12, 16, 24),
    "cache_aware_balanced": (12, 16, 24),
    "sticky_least_loaded": (16, 20, 24),
    "program": (20, 32, None),
    "program_told_lengths": (20, 32, None),
    "round_robin": (None,),
    "least_loaded": (None,),
    "moorage": (None,),
    "clairvoyant": (None,),
    "unlimited": (48, 64, None),
}
"""Peers and the caps at which each plays; None is no bound but `--live`."""

DEFAULT_PEERS = (
    "moorage",
    "cache_aware",
    "sticky_least_loaded",
    "program",
    "round_robin",
    "least_loaded",
    "clairvoyant",
    "unlimited",
)


@dataclass(frozen=True, order=True)
class Run:
    """One run of the comparison."""

    seed: int
    round: int
    peer: str
    cap: int | None

    @property
    def file(self) -> str:
        """Name of the file that keeps it."""
        return f"{self.peer}-{self.cap or 'live'}-seed{self.seed}-round{self.round}.json"


def order(caps: Mapping[str, Sequence[int | None]], seeds: Sequence[int], rounds: int) -> list[Run]:
    """Return all runs: by round and seed, within them shuffled; those on unlimited engines last."""
    runs: list[Run] = []
    for number in range(1, rounds + 1):
        for seed in seeds:
            block = [Run(seed, number, peer, cap) for peer, choices in caps.items() for cap in choices]
            Random(f"{seed}/{number}").shuffle(block)
            runs += block
    return sorted(runs, key=lambda run: run.peer == "unlimited")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; `caps` becomes the caps by peer."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    add = parser.add_argument
    add("--peers", nargs="+", choices=DEFAULT_CAPS, default=list(DEFAULT_PEERS), metavar="NAME", help=_help_peers())
    add("--caps", nargs="+", default=[], metavar="NAME=N,N", help="caps of a peer, `live` for none but --live")
    add("--seeds", nargs="+", type=int, default=[1, 2], help="[1 2]")
    add("--rounds", type=int, default=1, help="runs of each peer, cap and seed [1]")
    add("--duration", type=float, default=150.0, help="seconds of a run [150]")
    add("--warmup", type=float, default=45.0, help="seconds before the steady window [45]")
    add("--live", type=int, default=96, help="rollouts in hand at once, waiting ones included [96]")
    add("--policy", default="misa-t", help="policy of moorage [misa-t]")
    add("--engines", nargs="+", metavar="URL", help="running engines of --blocks blocks [starts some on --ports]")
    add("--unlimited-blocks", type=int, default=6000, help="blocks of each engine of the bound [6000]")
    add("--block-size", type=int, default=real.BLOCK_SIZE, help="tokens per block of the engines [32]")
    add("--model", default="tiny", help="served model name [tiny]")
    engines.add_options(parser)
    router = os.environ.get("MOORAGE_VLLM_ROUTER")
    add("--vllm-router", type=Path, default=router, help="executable [MOORAGE_VLLM_ROUTER, or that of --vllm-dir]")
    add("--tokenizer", type=Path, help="tokenizer.json of the model [tiny/tokenizer.json in --vllm-dir]")
    add("--out", type=Path, required=True, metavar="DIR", help="where finished runs are kept")
    add("--result", type=Path, metavar="FILE", help="write the tables here too")
    options = parser.parse_args(arguments)
    options.vllm_router = options.vllm_router or options.vllm_dir / "venv" / "bin" / "vllm-router"
    options.tokenizer = options.tokenizer or options.vllm_dir / "tiny" / "tokenizer.json"
    try:
        given = dict(_caps(text) for text in options.caps)
    except ValueError as error:
        parser.error(f"--caps: {error}")
    if stray := given.keys() - set(options.peers):
        parser.error(f"--caps for peers that do not play: {', '.join(sorted(stray))}")
    for peer in (peers_report.SUBJECT, peers_report.CLAIRVOYANT):
        if peer in given:
            parser.error(f"--caps: {peer} admits by itself")
    if not 0 <= options.warmup < options.duration:
        parser.error(f"--warmup is {options.warmup:g}, and must be shorter than --duration, {options.duration:g}")
    options.caps = {peer: given.get(peer, DEFAULT_CAPS[peer]) for peer in options.peers}
    return options


def _help_peers() -> str:
    return f"of {', '.join(DEFAULT_CAPS)} [{' '.join(DEFAULT_PEERS)}]"


def _caps(text: str) -> tuple[str, tuple[int | None, ...]]:
    peer, _, values = text.partition("=")
    caps = tuple(None if value == "live" else int(value) for value in values.split(","))
    if any(cap is not None and cap < 1 for cap in caps):
        raise ValueError(f"{text} has a cap below 1")
    return peer, caps


def settings(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Return what a run is made of: a kept one is only taken up where this is the same."""
    return {
        **asdict(run),
        "duration": options.duration,
        "warmup": options.warmup,
        "live": options.live,
        "policy": options.policy if run.peer == "moorage" else None,
        "blocks": options.unlimited_blocks if run.peer == "unlimited" else options.blocks,
    }


def kept(options: argparse.Namespace, run: Run) -> dict[str, Any] | None:
    """Return a run that was finished before; RuntimeError if it was made with other settings."""
    path = options.out / run.file
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if document["settings"] != settings(options, run):
        raise RuntimeError(f"{path} was made with other settings: {document['settings']}")
    del document["run"]
    return document


async def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Play what is not yet kept; return the documents of all runs."""
    cancel_on_sigterm()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = order(options.caps, options.seeds, options.rounds)
    documents = {run: document for run in runs if (document := kept(options, run)) is not None}
    for unlimited in (False, True):
        missing = [run for run in runs if run not in documents and (run.peer == "unlimited") == unlimited]
        if not missing:
            continue
        with _engines(options, unlimited) as urls:
            for run in missing:
                print(f"{len(documents) + 1} of {len(runs)}: {run.file}", file=sys.stderr, flush=True)
                documents[run] = await _play_and_keep(options, run, urls)
    return [documents[run] for run in runs]


@contextmanager
def _engines(options: argparse.Namespace, unlimited: bool) -> Iterator[list[str]]:
    """Yield the engines to play on, started where none were given."""
    if options.engines and not unlimited:
        yield [url.rstrip("/") for url in options.engines]
        return
    # Engines that were given keep their ports, and idle.
    ports = [free_port() for _ in options.engines] if options.engines else options.ports
    blocks = options.unlimited_blocks if unlimited else options.blocks
    with engines.vllm_engines(options.vllm_dir, options.serve_script, ports, blocks) as urls:
        yield urls


async def _play_and_keep(options: argparse.Namespace, run: Run, urls: Sequence[str]) -> dict[str, Any]:
    record, used = await _play(options, run, urls)
    summary = summarise(record, options.warmup, options.block_size)
    document = {"settings": settings(options, run), "summary": asdict(summary), "cpu_seconds": used}
    path = options.out / run.file
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({**document, "run": asdict(record)}) + "\n", "utf-8")
    draft.replace(path)
    print(peers_report.line(document), file=sys.stderr, flush=True)
    return document


async def _play(options: argparse.Namespace, run: Run, urls: Sequence[str]) -> tuple[RunRecord, dict[str, float]]:
    """Return what happened, and the CPU seconds of all that took part."""
    async with AsyncExitStack() as stack:
        direct = [await stack.enter_async_context(VllmBackend(url, options.model)) for url in urls]
        for engine in direct:
            await _prepare(engine, settings(options, run)["blocks"])
        router, backends = await _peer(options, run, direct, stack)
        workload = Workload(WorkloadConfig(), run.seed)
        bounds = PlayConfig(live=options.live, duration_s=options.duration)
        meter = cpu.Meter(_engine_processes(urls))
        record = await Player(workload, BoundedRouter(router, run.cap), backends, bounds).run()
        return record, meter.seconds()


async def _prepare(engine: VllmBackend, blocks: int) -> None:
    """Wait until an engine is idle, and empty its prefix cache; RuntimeError if it does not come to that."""
    for _ in range(IDLE_TRIES):
        samples = await engine.metrics()
        if not sum(sample.value for sample in samples if sample.name in REQUESTS):
            break
        await asyncio.sleep(IDLE_PAUSE_S)
    else:
        raise RuntimeError(f"{engine.url} was not idle within {IDLE_TRIES * IDLE_PAUSE_S:.0f} s: who else uses it?")
    found = [sample.labels["num_gpu_blocks"] for sample in samples if sample.name == "vllm:cache_config_info"]
    if found != [str(blocks)]:
        raise RuntimeError(f"{engine.url} has {' and '.join(found) or 'no'} KV blocks, and {blocks} are asked for")
    await engine.reset_prefix_cache()


async def _peer(
    options: argparse.Namespace, run: Run, direct: Sequence[VllmBackend], stack: AsyncExitStack
) -> tuple[Router, dict[str, Backend]]:
    """Start what a peer needs; return the router to ask, and the backends by the addresses it answers with."""
    urls = [engine.url for engine in direct]
    backends: dict[str, Backend] = {engine.url: engine for engine in direct}
    if run.peer == "moorage":
        chosen = ["--router", "moorage", "--policy", options.policy, "--duration", str(options.duration)]
        arguments = real.parse([*chosen, "--block-size", str(options.block_size), "--engines", *urls])
        return (await real.moorage(arguments, urls, WorkloadConfig(), stack)).router, backends
    if run.peer == "least_loaded":
        return LeastLoadedRouter(urls), backends
    if run.peer == "unlimited":
        return StickyRouter(urls), backends
    if run.peer == "clairvoyant":
        return ClairvoyantRouter(urls, options.blocks, options.block_size), backends
    logs = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    capacity = options.blocks * options.block_size
    url = stack.enter_context(vllm_router.vllm_router(options.vllm_router, run.peer, urls, capacity, logs))
    words = vllm_router.vocabulary(options.tokenizer)
    peer = vllm_router.VllmRouterBackend(url, options.model, vllm_router.DIALECTS[run.peer], words)
    await stack.enter_async_context(peer)
    return peer, {url: peer}


def _engine_processes(urls: Sequence[str]) -> dict[int, str]:
    """Return the engines that were given, by process, as far as they run on this machine."""
    ours = children.started().values()
    ports = [port for url in urls if (port := urlsplit(url).port) is not None and f"engine {port}" not in ours]
    return {pid: f"engine {port}" for port in ports if (pid := cpu.listener(port)) is not None}


def main() -> int:
    """Compare, print, write; return the exit code."""
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    documents = measured(compare(options))
    text = peers_report.markdown(documents, f"python -m bench.peers {shlex.join(sys.argv[1:])}")
    print(text)
    if options.result is not None:
        options.result.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
