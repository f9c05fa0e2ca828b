"""Child processes that end with their parent's block: engines, the control plane, its collector."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

TAIL_LINES = 20
STOP_SECONDS = 20.0
KILL_SECONDS = 5.0

T = TypeVar("T")

_running: dict[int, str] = {}


class Child:
    """A running child process, the leader of a process group of its own."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    def require_alive(self) -> None:
        """Raise RuntimeError, with the end of the child's log, if it has ended."""
        code = self.process.poll()
        if code is not None:
            tail = "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:])
            raise RuntimeError(f"{self.name} ended with exit code {code}:\n{tail}")

    def stop(self) -> None:
        """Ask the child to end, then end its whole group."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.signal_group(signal.SIGKILL)
                self.process.wait(KILL_SECONDS)
        # A leader that died early may have left workers behind.
        self.signal_group(signal.SIGKILL)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the child and all that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


@contextmanager
def running(
    name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Run a command with its output in `log`, and end it at the end of the block.

    It gets its own process group, so that Ctrl-C reaches only the parent, which ends its children in order. It stays in
    the parent's session: on Linux each session is scheduled as a group, and a quiet store alone in one was seen to wait
    seconds for its turn beside busy engines.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, **(environment or {})},
        )
    child = Child(name, process, log)
    _running[process.pid] = name
    try:
        yield child
    finally:
        child.stop()
        del _running[process.pid]


def started() -> dict[int, str]:
    """Return the names of the children that run now, by process id."""
    return dict(_running)


def wait_healthy(child: Child, url: str, timeout_s: float) -> None:
    """Wait until `url` answers 200; RuntimeError if the child ends or takes longer."""
    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while time.monotonic() < deadline:
            child.require_alive()
            try:
                if client.get(url).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
    raise RuntimeError(f"{child.name} did not answer at {url} within {timeout_s:.0f} s; its log is {child.log}")


def cancel_on_sigterm() -> None:
    """Make SIGTERM cancel the running task, as Ctrl-C does, so that its blocks end and its children with them."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def measured(work: Coroutine[Any, Any, T]) -> T:
    """Run a measurement; where there is nothing to show, end the process with a line that says why, and 1 or 130."""
    try:
        return asyncio.run(work)
    except (RuntimeError, TimeoutError, httpx.TransportError) as error:
        print(f"error: {str(error) or 'an engine was not ready in time'}", file=sys.stderr)
        raise SystemExit(1) from error
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        print("stopped, nothing measured", file=sys.stderr)
        raise SystemExit(130) from stop
