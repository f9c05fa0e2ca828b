"""Renews the leases of all living sessions of a client in the background: a thread for threads, a task for asyncio.

Both live only as long as there are sessions, so that a client that is never closed leaves nothing running.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from moorage.errors import MoorageError
from moorage.flows import Call
from moorage.roster import Batch, Roster
from moorage.state import SessionState
from moorage.v1.scheduler_pb2 import HeartbeatResponse

logger = logging.getLogger("moorage")


class Renewer:
    """A daemon thread over a `Roster`.

    Example:
        >>> renewer = Renewer(client.perform, timeout=5.0)  # doctest: +SKIP
        >>> renewer.add(state)  # doctest: +SKIP
    """

    def __init__(self, perform: Callable[[Call], HeartbeatResponse], timeout: float) -> None:
        self.roster = Roster()
        self._perform = perform
        self._timeout = timeout
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, state: SessionState) -> None:
        """From now on the session is renewed."""
        with self._changed:
            self.roster.add(state)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="moorage-renewal", daemon=True)
                self._thread.start()
            self._changed.notify()

    def discard(self, state: SessionState) -> None:
        """The session is no longer renewed."""
        with self._changed:
            self.roster.discard(state)
            self._changed.notify()

    def report(self, state: SessionState) -> None:
        """The session has something to report soon."""
        with self._changed:
            self.roster.report(state)
            self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            for batch in self.roster.take_due():
                self._beat(batch)

    def _wait(self) -> bool:
        """Until a heartbeat is due; False, and the thread's end, once no session lives."""
        with self._changed:
            while (due_at := self.roster.due_at()) is not None:
                if (left := due_at - time.monotonic()) <= 0:
                    return True
                self._changed.wait(left)
            self._thread = None
            return False

    def _beat(self, batch: Batch) -> None:
        try:
            response = self._perform(Call("Heartbeat", batch.request, self.roster.timeout(self._timeout)))
        except MoorageError as error:
            self.roster.failed(batch, error)
        except Exception:
            # Whatever it was, the other sessions' leases must not run out for it.
            logger.exception("a heartbeat failed")
        else:
            self.roster.acknowledge(batch, response)


class AsyncRenewer:
    """A task over a `Roster`.

    Example:
        >>> renewer = AsyncRenewer(client.perform, timeout=5.0)  # doctest: +SKIP
        >>> renewer.add(state)  # doctest: +SKIP
    """

    def __init__(self, perform: Callable[[Call], Awaitable[HeartbeatResponse]], timeout: float) -> None:
        self.roster = Roster()
        self._perform = perform
        self._timeout = timeout
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, state: SessionState) -> None:
        """From now on the session is renewed."""
        self.roster.add(state)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="moorage-renewal")

    def discard(self, state: SessionState) -> None:
        """The session is no longer renewed."""
        self.roster.discard(state)
        self._changed.set()

    def report(self, state: SessionState) -> None:
        """The session has something to report soon."""
        self.roster.report(state)
        self._changed.set()

    async def _run(self) -> None:
        while (due_at := self.roster.due_at()) is not None:
            if (left := due_at - time.monotonic()) > 0:
                self._changed.clear()
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    pass
                continue
            await asyncio.gather(*(self._beat(batch) for batch in self.roster.take_due()))

    async def _beat(self, batch: Batch) -> None:
        try:
            response = await self._perform(Call("Heartbeat", batch.request, self.roster.timeout(self._timeout)))
        except MoorageError as error:
            self.roster.failed(batch, error)
        except Exception:
            # Whatever it was, the other sessions' leases must not run out for it.
            logger.exception("a heartbeat failed")
        else:
            self.roster.acknowledge(batch, response)
