"""Actors for `actor_pool.py`: objects in processes of their own, Ray's or, where there is no Ray, this machine's.

A call gives a future at once; several run at the same time, in threads of the actor. When its process dies, so do its
calls.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol


class ActorDied(Exception):
    """The process of a local actor is gone."""


class Actor(Protocol):
    """What the driver needs of an actor."""

    died: type[Exception]

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Calls a method; the future has its result, or raises `died`."""
        ...


class RayActor:
    """An actor of Ray's."""

    def __init__(self, kind: type, arguments: tuple[Any, ...], threads: int) -> None:
        import ray

        self.died: type[Exception] = ray.exceptions.RayActorError
        self._handle = ray.remote(kind).options(max_concurrency=threads, num_cpus=0).remote(*arguments)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """See `Actor`."""
        future: Future[Any] = getattr(self._handle, method).remote(*arguments).future()
        return future


class LocalActor:
    """The same without Ray: an object in a process of its own, its methods called through a pipe."""

    died: type[Exception] = ActorDied

    def __init__(self, kind: type, arguments: tuple[Any, ...], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, kind, arguments, threads), daemon=True).start()
        theirs.close()  # so that the pipe ends with the process
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._dead = False
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """See `Actor`."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._dead:
                future.set_exception(ActorDied())
            else:
                self._pending[number] = future
                with suppress(OSError):  # `_listen` tells
                    self._pipe.send((number, method, arguments))
        return future

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, value, error = self._pipe.recv()
                future = self._pending.pop(number)
                future.set_result(value) if error is None else future.set_exception(error)
        with self._lock:
            self._dead = True
            for future in self._pending.values():
                future.set_exception(ActorDied())


def _serve(pipe: Connection, kind: type, arguments: tuple[Any, ...], threads: int) -> None:
    """The process of a local actor."""
    actor, lock = kind(*arguments), threading.Lock()

    def run(number: int, method: str, given: tuple[Any, ...]) -> None:
        value, error = None, None
        try:
            value = getattr(actor, method)(*given)
        except Exception as raised:
            error = raised
        with lock:
            pipe.send((number, value, error))

    with ThreadPoolExecutor(threads) as pool, suppress(EOFError):
        while True:
            pool.submit(run, *pipe.recv())
