"""Several processes behave as one server: who is started, started again, and ended, and what the exit code is.

The supervisor serves no call. A first worker goes ahead, so that what is wrong with the configuration is said once;
then come the others. A worker that dies is started again. Signals go to the supervisor; it alone ends workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from moorage_server.runtime.exits import EXIT_CONFIGURATION, EXIT_ERROR, EXIT_OK

_log = structlog.get_logger("moorage.supervisor")


class Worker(Protocol):
    """A process that serves."""

    pid: int | None
    #: What it says once it serves; never done where it ends before that.
    serving: asyncio.Future[str]
    #: Its exit code; below zero the number of the signal that ended it.
    ended: asyncio.Future[int]

    def terminate(self) -> None:
        """Asks it to end in order."""

    def kill(self) -> None:
        """Ends it at once."""


@dataclass
class Backoff:
    """How long a worker that died is waited with, in seconds: twice as long each time, from ``first_s`` to ``most_s``.

    One that lived for ``healthy_s`` starts the count anew.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    healthy_s: float = 60.0
    deaths: int = 0

    def after(self, lived_s: float) -> float:
        """The pause after another death."""
        self.deaths = 1 if lived_s >= self.healthy_s else self.deaths + 1
        # The exponent is bounded: a worker that never comes up dies any number of times.
        return min(self.most_s, self.first_s * 2.0 ** min(self.deaths - 1, 32))


class Supervisor:
    """Keeps ``count`` workers, which ``start`` starts by number, from 0. Built and run once, inside an event loop.

    ``announce`` gets the words of the last one to come up, once, when all serve.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], Worker],
        announce: Callable[[str], None],
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._count = count
        self._start = start
        self._announce = announce
        self._backoff = backoff
        self._living: dict[int, Worker] = {}
        self._serving: set[int] = set()
        self._complete = False
        self._stopping = asyncio.Event()
        self._code = EXIT_OK

    async def run(self) -> int:
        """Until told to stop, or nothing can be served; all workers are gone then. The exit code."""
        async with asyncio.TaskGroup() as self._keepers:
            self._keepers.create_task(self._keep(0))
            await self._stopping.wait()
            for worker in self._living.values():
                worker.terminate()
        return self._code

    def on_signal(self, number: signal.Signals) -> None:
        """The first one ends all workers in order, all together; the next one at once."""
        if not self._stopping.is_set():
            _log.info("stopping", signal=number.name, workers=len(self._living))
            self._stopping.set()
            return
        self._code = 128 + number
        for worker in self._living.values():
            worker.kill()

    async def _keep(self, number: int) -> None:
        backoff = self._backoff()
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._life(number)
            if self._stopping.is_set():
                return
            if self._fatal(code):
                self._give_up(number, code)
                return
            pause = backoff.after(time.monotonic() - started)
            _log.warning("worker died, starts again", worker=number, code=code, pause_s=pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _life(self, number: int) -> int:
        """Starts a worker and sees it to its end; its exit code."""
        try:
            worker = self._start(number)
        except OSError as error:
            _log.error("no process could be started", worker=number, error=str(error))
            return EXIT_ERROR
        self._living[number] = worker
        _log.info("worker started", worker=number, pid=worker.pid)
        news: set[asyncio.Future[Any]] = {worker.serving, worker.ended}
        await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        if worker.serving.done():
            self._on_serving(number, worker.serving.result())
        code = await worker.ended
        self._serving.discard(number)
        del self._living[number]
        return code

    def _on_serving(self, number: int, words: str) -> None:
        self._serving.add(number)
        if self._complete or self._stopping.is_set():
            return
        if number == 0:
            for other in range(1, self._count):
                self._keepers.create_task(self._keep(other))
        if len(self._serving) == self._count:
            self._complete = True
            self._announce(words)

    def _fatal(self, code: int) -> bool:
        """Whether a worker's end is the end of all: at the start any is, as without a supervisor.

        Later an unusable configuration is, unless others serve on with the one they have.
        """
        return not self._complete or (code == EXIT_CONFIGURATION and not self._serving)

    def _give_up(self, number: int, code: int) -> None:
        _log.error("worker ended, and with it the server", worker=number, code=code)
        self._code = code if code > 0 else EXIT_ERROR
        self._stopping.set()
