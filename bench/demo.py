"""The demo behind `make run`: moorage, two emulated engines and a mixed rollout, live in the terminal.

It starts the control plane as a child process (`--server` uses a running one), sends the engines' snapshots to it over
gRPC, plays rollouts through the Python client, and draws the pool every second. After the summary it goes on serving
until Ctrl-C, so that `moorage top`, `moorage get` and `moorage explain` have something to look at.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio

from bench import control_plane, report
from bench.backends import EmulatedBackend
from bench.children import cancel_on_sigterm
from bench.emulator import CostModel, EmulatedEngine, EngineConfig
from bench.moorage_router import MoorageRouter
from bench.player import PlayConfig, Player
from bench.summary import summarise
from bench.workload import Workload, WorkloadConfig
from moorage import AsyncClient, MoorageError
from moorage.channel import open_aio_channel
from moorage.cli import first as first_in_line
from moorage.cli.top import render
from moorage.v1 import inspector_pb2, inspector_pb2_grpc

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2_grpc import InspectorServiceAsyncStub

log = logging.getLogger(__name__)

DEFAULT_PORT = 50061
POOL = "default"
HEARTBEAT_S = 0.5
FRAME_S = 1.0
PLAIN_FRAME_S = 10.0
"""Time between two frames where there is no terminal to draw them in place."""
WARMUP_S = 15.0

# Sizes at which 100 sessions take a bit more than a minute, and about eight of them fill an engine.
WORKLOAD = WorkloadConfig(max_context=2_048, turn_seconds=0.1, token_seconds=0.02)
COSTS = CostModel(
    step_overhead_s=0.009,
    prefill_token_s=0.000_2,
    prefill_context_s=0.0,
    decode_seq_s=0.000_7,
    decode_context_s=7e-7,
)
BLOCK_SIZE = 16


def engine_config(number: int, incarnation: str) -> EngineConfig:
    """Return the configuration of one of the demo's engines."""
    return EngineConfig(
        instance_id=f"engine-{number}",
        endpoint=f"emulated://engine-{number}",
        incarnation=incarnation,
        num_blocks=385,
        block_size=BLOCK_SIZE,
        max_context=2_304,
        max_batched_tokens=512,
        max_sequences=32,
        costs=COSTS,
    )


class Screen:
    """Draws the pool: in place on a terminal, else now and then as plain lines."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cast("InspectorServiceAsyncStub", inspector_pb2_grpc.InspectorServiceStub(channel))
        self._in_place = sys.stdout.isatty()

    async def run(self) -> None:
        """Draw until cancelled. A frame that can not be had is left out."""
        while True:
            try:
                lines = await self._frame()
            except grpc.aio.AioRpcError as error:
                log.warning("no frame: %s", error.details())
            else:
                self._draw(lines)
            await asyncio.sleep(FRAME_S if self._in_place else PLAIN_FRAME_S)

    async def last(self) -> None:
        """One more frame: how the pool ended up."""
        self._draw(await self._frame())

    async def _frame(self) -> list[str]:
        pool = await self._stub.GetPool(inspector_pb2.GetPoolRequest(pool=POOL), timeout=5.0)
        instances = await self._stub.ListInstances(inspector_pb2.ListInstancesRequest(pool=POOL), timeout=5.0)
        classes = await self._stub.ListClasses(inspector_pb2.ListClassesRequest(pool=POOL), timeout=5.0)
        held = await self._stub.ListSessions(inspector_pb2.ListSessionsRequest(pool=POOL, held=True), timeout=5.0)
        first = first_in_line.choose([await self._now(one) for one in first_in_line.candidates(held.sessions)])
        width = shutil.get_terminal_size((120, 40)).columns
        return render(pool, instances, classes, width, datetime.now(), list(held.sessions), first)

    async def _now(self, session: inspector_pb2.Session) -> inspector_pb2.Session:
        request = inspector_pb2.GetSessionRequest(pool=POOL, session_id=session.session_id)
        with contextlib.suppress(grpc.RpcError):  # it may have entered, or gone
            return (await self._stub.GetSession(request, timeout=5.0)).session
        return inspector_pb2.Session()

    def _draw(self, lines: list[str]) -> None:
        if self._in_place:
            # Home, each line cleared to its end, and all that is left of the last frame below.
            print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="", flush=True)
        else:
            print("\n".join(lines), end="\n\n", flush=True)


async def send_snapshots(client: AsyncClient, engines: list[EmulatedEngine]) -> None:
    """Tell the control plane what the engines look like, until cancelled."""
    while True:
        now = time.time()
        try:
            answer = await client.heartbeat(instances=[engine.snapshot(now) for engine in engines])
        except MoorageError as error:
            log.warning("snapshots not delivered: %s", error)
        else:
            for ack in answer.instances:
                if not ack.accepted:
                    log.warning("snapshot of %s not taken: %s", ack.instance_id, ack.reason)
        await asyncio.sleep(HEARTBEAT_S)


async def demo(options: argparse.Namespace) -> int:
    """Run the demo; return the exit code."""
    cancel_on_sigterm()
    async with AsyncExitStack() as stack:
        child = None
        server = options.server
        if server is None:
            _require_free(options.port)
            logs = Path(tempfile.mkdtemp(prefix="moorage-demo-"))
            child = stack.enter_context(control_plane.serve(options.port, logs / "serve.log"))
            server = f"127.0.0.1:{options.port}"
        channel = await stack.enter_async_context(open_aio_channel(server))
        await control_plane.wait_ready(channel, child)
        await control_plane.configure(channel, POOL, WORKLOAD)
        client = await stack.enter_async_context(AsyncClient(server, pool=POOL))
        incarnation = uuid.uuid4().hex[:8]
        engines = [EmulatedEngine(engine_config(number, incarnation)) for number in range(2)]
        backends = {engine.config.endpoint: EmulatedBackend(engine) for engine in engines}
        for backend in backends.values():
            await stack.enter_async_context(backend)
        heartbeats = asyncio.create_task(send_snapshots(client, engines))
        stack.push_async_callback(_ended, heartbeats)
        router = MoorageRouter(client, max_context=WORKLOAD.max_context, block_size=BLOCK_SIZE)
        bounds = PlayConfig(live=options.live, sessions=options.sessions)
        player = Player(Workload(WORKLOAD, options.seed), router, backends, bounds)
        screen = Screen(channel)
        drawing = asyncio.create_task(screen.run())
        stack.push_async_callback(_ended, drawing)
        run = await player.run()
        await _ended(drawing)
        await screen.last()
        summary = summarise(run, WARMUP_S, BLOCK_SIZE)
        print("\n".join(["", *report.text(summary)]), flush=True)
        if not options.once:
            print(
                f"\nStill serving at {server}: try `{_command()} top`, `{_command()} get sessions`. Ctrl-C ends it.",
                flush=True,
            )
            await heartbeats
    return 0 if summary.outcomes.get("completed") == options.sessions else 1


def _require_free(port: int) -> None:
    """RuntimeError where somebody listens already: the demo would set up and fill a pool that is not its own."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise RuntimeError(
                f"something listens on 127.0.0.1:{port} already; give another --port, or --server to use it"
            )


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--once", action="store_true", help="leave after the summary")
    parser.add_argument("--sessions", type=int, default=100, help="rollouts to play [100]")
    parser.add_argument("--live", type=int, default=48, help="rollouts in hand at once, waiting ones included [48]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port of the control plane [{DEFAULT_PORT}]")
    parser.add_argument("--server", metavar="HOST:PORT", help="running control plane [starts one]")
    return parser.parse_args(arguments)


def _command() -> str:
    """The `moorage` beside this interpreter, as one types it here."""
    beside = Path(sys.executable).with_name("moorage")
    return os.path.relpath(beside) if beside.exists() else "moorage"


def main() -> int:
    """Run the demo until its end or Ctrl-C; return the exit code."""
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    if sys.stdout.isatty():
        print("\x1b[2J", end="")
    try:
        return asyncio.run(demo(options))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nstopped", flush=True)
        return 0


if __name__ == "__main__":
    sys.exit(main())
