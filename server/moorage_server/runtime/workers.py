"""The processes of one server: each a fresh interpreter with the settings of its parent, never a fork of it.

gRPC does not survive a fork. All workers get one and the same configuration, whatever becomes of its file meanwhile.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import structlog

from moorage_server.runtime.addresses import shifted
from moorage_server.runtime.exits import EXIT_ERROR
from moorage_server.runtime.logs import configure_logging
from moorage_server.runtime.main import run_server
from moorage_server.runtime.section import Section
from moorage_server.runtime.server import AddressInUse
from moorage_server.runtime.settings import Settings
from moorage_server.runtime.shared_address import SharedAddress
from moorage_server.runtime.supervisor import Supervisor

SectionT = TypeVar("SectionT", bound=Section)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_spawn = multiprocessing.get_context("spawn")


def supervise(settings: Settings, announce: Callable[[str], None]) -> int:
    """Runs ``settings.processes`` workers until SIGTERM or SIGINT; the exit code. ``announce`` hears where they are."""
    try:
        listen = SharedAddress(settings.listen)
        health = None if settings.health.listen is None else SharedAddress(settings.health.listen)
    except AddressInUse as error:
        print(f"moorage serve: {error}", file=sys.stderr)
        return EXIT_ERROR
    shared = _with(settings, listen=listen.address)
    if health is not None:
        shared = _with(shared, health=_with(settings.health, listen=health.address))
    return asyncio.run(_supervise(shared, announce))


async def _supervise(settings: Settings, announce: Callable[[str], None]) -> int:
    supervisor = Supervisor(settings.processes, lambda number: WorkerProcess(settings, number), announce)
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, supervisor.on_signal, number)
    return await supervisor.run()


class WorkerProcess:
    """A running worker: see supervisor.Worker. Inside the supervisor's event loop."""

    def __init__(self, settings: Settings, number: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.serving: asyncio.Future[str] = self._loop.create_future()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._words, words = _spawn.Pipe(duplex=False)
        self._process = _spawn.Process(
            target=work, args=(settings_of(settings, number), number, words), name=f"worker {number}", daemon=True
        )
        # Ctrl-C goes to the whole group: until the worker can say so itself, this keeps it deaf. The tracker that
        # `start` would start first unblocks the signal.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        words.close()
        self.pid = self._process.pid
        self._loop.add_reader(self._words.fileno(), self._on_words)
        self._loop.add_reader(self._process.sentinel, self._on_end)

    def terminate(self) -> None:
        """Asks it to end in order."""
        if not self.ended.done():
            self._process.terminate()

    def kill(self) -> None:
        """Ends it at once."""
        if not self.ended.done():
            self._process.kill()

    def _on_words(self) -> None:
        self._loop.remove_reader(self._words.fileno())
        try:
            self.serving.set_result(self._words.recv())
        except (EOFError, OSError):
            # It ended before it served.
            return
        finally:
            self._words.close()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        # A moment at most: its last file is closed.
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        self.ended.set_result(EXIT_ERROR if code is None else code)


def settings_of(settings: Settings, number: int) -> Settings:
    """The settings of one worker: its metrics are its own, at the port above the one of the worker before it."""
    if settings.metrics.listen is None:
        return settings
    metrics = _with(settings.metrics, listen=shifted(settings.metrics.listen, number))
    return _with(settings, metrics=metrics)


def work(settings: Settings, number: int, words: Connection) -> None:
    """Serves as worker ``number``; sends ``words`` where it listens. Ends when told, or when its supervisor is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(settings.log)
    structlog.contextvars.bind_contextvars(worker=number)
    sys.exit(run_server(settings, words.send, _on_sigterm))


def _on_sigterm() -> asyncio.Event:
    """Set by SIGTERM, any number of them: a whole group may be told, and then the supervisor tells its workers too."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    supervisor = multiprocessing.parent_process()

    def orphaned(sentinel: int) -> None:
        loop.remove_reader(sentinel)
        stopping.set()

    if supervisor is not None:
        sentinel: Any = supervisor.sentinel
        loop.add_reader(sentinel, orphaned, sentinel)
    return stopping


def _with(section: SectionT, **values: object) -> SectionT:
    return section.model_copy(update=values)
