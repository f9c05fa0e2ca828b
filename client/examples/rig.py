"""What a trainer has before its rollouts start: a control plane, engines, a pool that is configured. Shared by all.

Everything is started with commands that one would type, and ended with the block; nothing of moorage is imported. With
`--server` and `--engines` the running ones are used.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOORAGE = (sys.executable, "-m", "moorage.cli.main")

#: Longest time that anything is waited for, in seconds.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Rig:
    """Where everything is."""

    server: str
    pool: str
    proxy: str | None

    def moorage(self, *arguments: str) -> str:
        """Runs a command of moorage's; its output. RuntimeError where it fails."""
        env = {**os.environ, "MOORAGE_SERVER": self.server, "MOORAGE_POOL": self.pool}
        done = subprocess.run(
            [*MOORAGE, *arguments], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"moorage {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


def options(what: str | None) -> argparse.ArgumentParser:
    """The options that all examples have."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", metavar="HOST:PORT", help="running `moorage serve` [starts one]")
    parser.add_argument("--pool", help="pool to use, and configure [one of its own]")
    parser.add_argument("--engines", nargs="+", default=(), metavar="URL", help="vLLM engines [starts emulated ones]")
    parser.add_argument("--steps", type=_steps, default=4, help="training steps; the last begins no groups [4]")
    parser.add_argument("--groups", type=int, default=2, help="groups that a step trains on [2]")
    parser.add_argument("--max-policy-lag", type=int, default=1, help="versions a sample may lag behind [1]")
    return parser


def _steps(text: str) -> int:
    if (steps := int(text)) < 2:
        raise argparse.ArgumentTypeError("at least 2, as the last one only finishes what others began")
    return steps


@contextmanager
def standing(
    chosen: argparse.Namespace, *pool_options: str, blocks: int = 192, proxy: Sequence[str] = ()
) -> Iterator[Rig]:
    """All that is missing, running; with `proxy` options also `moorage proxy`.

    `pool_options` go to `moorage config set`; `blocks` are the KV blocks of an emulated engine, of 16 tokens each.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended
    logs = Path(tempfile.mkdtemp(prefix="moorage-example-"))
    pool = chosen.pool or f"example-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        server = chosen.server
        if server is None:
            said = stack.enter_context(_child(logs / "serve.log", *MOORAGE, "serve", "--listen", "127.0.0.1:0"))
            server = said.split(" on ")[1].split(",")[0]
        rig = Rig(server, pool, None)
        rig.moorage("ping", "--wait", f"{PATIENCE_S:.0f}s")
        rig.moorage("config", "set", "--max-policy-lag", f"{chosen.max_policy_lag}", *pool_options)
        at = ("--server", server, "--pool", pool)
        if chosen.engines:
            urls = [part for url in chosen.engines for part in ("--url", url)]
            command = [*MOORAGE, "collect", "vllm", *urls, *at]
            stack.enter_context(_child(logs / "collect.log", *command, speaks=False))
        else:
            command = [sys.executable, "-m", "bench.emulated_server", "--blocks", f"{blocks}", *at]
            stack.enter_context(_child(logs / "engines.log", *command))
        wanted = len(chosen.engines) or 2
        _until(lambda: len(rig.moorage("get", "instances", "-o", "name").split()) >= wanted, "engines in the pool")
        if proxy:
            command = [*MOORAGE, "proxy", "--listen", "127.0.0.1:0", *at, *proxy]
            said = stack.enter_context(_child(logs / "proxy.log", *command))
            rig = Rig(server, pool, said.split(" on ")[1].split(",")[0])
        yield rig


@contextmanager
def _child(log: Path, *command: str, speaks: bool = True) -> Iterator[str]:
    """Runs a command until the block ends; yields its first line, if it `speaks`. RuntimeError if it ends before."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE if speaks else errors, stderr=errors, text=True, process_group=0
        )
    try:
        said = process.stdout.readline() if process.stdout is not None else ""
        if speaks and not said:
            raise RuntimeError(f"{' '.join(command[1:])} ended:\n{log.read_text('utf-8', 'replace')[-2000:]}")
        yield said
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()


def _until(probe: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not probe():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(0.2)
