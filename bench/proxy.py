"""What `moorage proxy` adds to a request, and how many requests one core takes, against direct calls in the same run.

A fake engine that answers at once is called directly and through the proxy, which asks a `moorage serve` on a Redis of
its own. Direct and proxied calls take turns, so that whatever else the machine does reaches both alike. Engine, proxy
and server are processes of their own; the proxy is pinned to one core. Linux only: CPU times are read from /proc.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import aiohttp
import grpc.aio
from aiohttp import web

from bench import control_plane
from bench.children import Child, running
from bench.control_plane import MOORAGE, free_port
from bench.rpc import cpu_seconds
from moorage import AsyncClient
from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc

if TYPE_CHECKING:
    from moorage.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

STREAM_TOKENS = 64
PROMPT = "word " * 500
PATH = "/v1/chat/completions"
BLOCKS = 4_000_000
READY_SECONDS = 30.0


def fake_engine(port: int) -> None:
    """Answer at once: whole, or as a stream of `STREAM_TOKENS` events."""
    usage = {"prompt_tokens": 500, "completion_tokens": 64, "prompt_tokens_details": {"cached_tokens": 480}}
    whole = json.dumps({"choices": [{"message": {"role": "assistant", "content": "word " * 64}}], "usage": usage})
    piece = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.Response(text=whole, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(STREAM_TOKENS):
            await response.write(piece)
            await asyncio.sleep(0)
        await response.write(last)
        await response.write_eof()
        return response

    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post(PATH, generate)
    app.router.add_get("/health", healthy)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


@dataclass(slots=True)
class Case:
    """One way to ask, and the latencies in seconds, directly and through the proxy."""

    name: str
    stream: bool
    new_sessions: bool
    direct: list[float] = field(default_factory=list)
    proxied: list[float] = field(default_factory=list)


CASES = (
    ("turns of living sessions", False, False),
    ("turns of living sessions, streamed", True, False),
    ("a session for each request", False, True),
)


class Caller:
    """Sends the requests of one case to one address."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def call(self, case: Case, session: str) -> float:
        """Seconds from sending a request to the end of its answer; RuntimeError where it is no success."""
        body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "stream": case.stream}
        headers = {} if case.new_sessions else {"X-Session-ID": session}
        begun = time.perf_counter()
        async with self._http.post(f"{self._url}{PATH}", json=body, headers=headers) as answer:
            content = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{self._url} answered {answer.status}: {content[:200]!r}")
        return time.perf_counter() - begun


async def compare(case: Case, direct: Caller, proxied: Caller, rounds: int) -> None:
    """Take turns, one request at a time."""
    for number in range(rounds + 20):
        one, two = await direct.call(case, "s-0"), await proxied.call(case, f"s-{number % 8}")
        if number >= 20:  # What comes before opens connections and sessions.
            case.direct.append(one)
            case.proxied.append(two)


async def bare_places(server: str, rounds: int) -> list[float]:
    """Seconds that one Place takes without a proxy."""
    taken = []
    async with AsyncClient(server) as client:
        token = (await client.admit("bare", prompt_tokens=500)).lease.token
        for number in range(rounds):
            begun = time.perf_counter()
            await client.place("bare", lease_token=token, turn=number)
            taken.append(time.perf_counter() - begun)
    return taken


async def throughput(case: Case, caller: Caller, workers: int, seconds: float) -> float:
    """Requests per second of so many callers that ask one after the other."""
    until, done = time.perf_counter() + seconds, 0

    async def work(worker: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await caller.call(case, f"w-{worker}")
            done += 1

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for worker in range(workers):
            group.create_task(work(worker))
    return done / (time.perf_counter() - begun)


@asynccontextmanager
async def fresh(server: str, endpoint: str) -> AsyncIterator[None]:
    """Heartbeats for the engine, while the block lasts."""
    async with grpc.aio.insecure_channel(server) as channel:
        await control_plane.wait_ready(channel, None)
        scheduler = cast("SchedulerServiceAsyncStub", scheduler_pb2_grpc.SchedulerServiceStub(channel))

        async def beat() -> None:
            while True:
                snapshot = pb.InstanceSnapshot(
                    instance_id="engine-0", endpoint=endpoint, incarnation="1", sequence=time.time_ns(),
                    block_size=16, total_blocks=BLOCKS, used_blocks=0, max_context_tokens=32_768,
                )  # fmt: skip
                await scheduler.Heartbeat(pb.HeartbeatRequest(instances=[snapshot]), timeout=10)
                await asyncio.sleep(0.5)

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()


async def measure(arguments: argparse.Namespace) -> None:
    """Run all and print Markdown."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port() for _ in range(3)]
        engine, server, proxy = (f"127.0.0.1:{port}" for port in ports)
        command = [sys.executable, "-m", "bench.proxy", "--engine", str(ports[0])]
        stack.enter_context(running("engine", command, folder / "engine.log"))
        redis_url = stack.enter_context(control_plane.redis(folder / "redis.log"))
        stack.enter_context(control_plane.serve(ports[1], folder / "serve.log", redis_url))
        front = stack.enter_context(_proxy(proxy, server, arguments.core, folder / "proxy.log"))
        async with fresh(server, f"http://{engine}"), aiohttp.ClientSession() as http:
            await _answers(http, f"http://{engine}/health", front)
            await _answers(http, f"http://{proxy}/health", front)
            callers = Caller(http, f"http://{engine}"), Caller(http, f"http://{proxy}")
            cases = [Case(*case) for case in CASES]
            for case in cases:
                await compare(case, *callers, arguments.rounds)
            print(_latencies(cases))
            low, high = _percentiles(await bare_places(server, arguments.rounds))
            print(f"A bare Place, which each of those turns contains: {low:.2f} / {high:.2f} ms.\n")
            print(_header("requests/s", "direct", "proxied", "ratio", "proxy CPU per request"))
            for case in cases:
                plain = await throughput(case, callers[0], arguments.workers, arguments.seconds)
                before = cpu_seconds(front.process.pid)
                through = await throughput(case, callers[1], arguments.workers, arguments.seconds)
                spent = (cpu_seconds(front.process.pid) - before) / (through * arguments.seconds)
                print(
                    f"| {case.name} | {plain:.0f} | {through:.0f} | {through / plain:.2f} | {spent * 1000:.2f} ms,"
                    f" {1 / spent:.0f}/s on a core of its own |"
                )


def _proxy(address: str, server: str, core: int, log: Path) -> AbstractContextManager[Child]:
    pinned = ["taskset", "-c", str(core)]
    return running("moorage proxy", [*pinned, *MOORAGE, "proxy", "--listen", address, "--server", server], log)


async def _answers(http: aiohttp.ClientSession, url: str, child: Child) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        child.require_alive()
        try:
            async with http.get(url) as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not answer within {READY_SECONDS:.0f} s")


def _latencies(cases: Sequence[Case]) -> str:
    rows = [_header("latency", "direct p50 / p99", "proxied p50 / p99", "ratio", "added p50 / p99")]
    for case in cases:
        (low, high), (slow_low, slow_high) = _percentiles(case.direct), _percentiles(case.proxied)
        rows.append(
            f"| {case.name} | {low:.2f} / {high:.2f} ms | {slow_low:.2f} / {slow_high:.2f} ms |"
            f" {slow_low / low:.1f} / {slow_high / high:.1f} | {slow_low - low:.2f} / {slow_high - high:.2f} ms |"
        )
    return "\n".join(rows) + "\n"


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


def _header(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="requests each way for the latencies [400]")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each throughput run [5]")
    parser.add_argument("--workers", type=int, default=16, help="callers of a throughput run [16]")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="core of the proxy")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        fake_engine(arguments.engine)
    else:
        asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
