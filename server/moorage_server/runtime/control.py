"""The control plane of one server process: a desk and an epoch driver per pool, over one store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any

import structlog

from moorage_server.core.config import PoolConfig
from moorage_server.errors import StoreUnavailable
from moorage_server.meters import Meters
from moorage_server.runtime.desk import Desk
from moorage_server.runtime.epochs import Epochs
from moorage_server.runtime.tasks import end
from moorage_server.store.base import Store

log = structlog.get_logger("moorage.control")

#: How often pools that other processes brought up are looked for, and how long to wait after an outage.
_DISCOVER_S, _RETRY_S = 2.0, 0.5


class ControlPlane:
    """Owns the desks. ``pools`` gives the configuration of pools that the store has none of."""

    def __init__(self, store: Store, pools: Mapping[str, PoolConfig]) -> None:
        self.store = store
        self._configured = dict(pools)
        self._desks: dict[str, Desk] = {}
        self._epochs: dict[str, Epochs] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.meters = Meters()
        for name in self._configured:
            self.meters.pools.know(name)

    async def start(self) -> None:
        """Starts listening, and serving the configured pools. Does not wait for the store."""
        for name in self._configured:
            self.desk(name)
        self._spawn(self._listen())
        self._spawn(self._discover())

    async def stop(self) -> None:
        """Ends all background work and hands the epochs over."""
        await end(self._tasks)
        await asyncio.gather(*(e.stop() for e in self._epochs.values()), return_exceptions=True)
        for desk in self._desks.values():
            await desk.close()

    def desk(self, pool: str) -> Desk:
        """The desk of a pool; its epochs start with it."""
        desk = self._desks.get(pool)
        if desk is None:
            desk = self._desks[pool] = Desk(self.store, pool, self._configured.get(pool, PoolConfig()), self.meters)
            self._epochs[pool] = Epochs(self.store, desk)
            self._spawn(self._run_epochs(pool))
        return desk

    def serving(self) -> list[tuple[Desk, bool]]:
        """The desks at work, and whether this process drives the controller of their pool."""
        return [(desk, self._epochs[pool].holds) for pool, desk in self._desks.items()]

    async def _run_epochs(self, pool: str) -> None:
        await self._epochs[pool].run()
        # Nobody ever named the pool, and nothing is in it: a misspelt name must not be served for ever.
        del self._desks[pool], self._epochs[pool]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wake(self, pool: str, why: str) -> None:
        if pool in self._desks:
            self._desks[pool].wake()
            self._epochs[pool].wake(why)

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                async for _ in self.store.listen(self._wake):
                    # What was said before we listened is lost: look once.
                    for pool in self._desks:
                        self._wake(pool, "listening")
            await asyncio.sleep(_RETRY_S)

    async def _discover(self) -> None:
        """Serves the epochs of pools that only other processes were asked about, and names the configured ones.

        Again and again: the store may lose its memory.
        """
        while True:
            with contextlib.suppress(StoreUnavailable):
                for name in self._configured:
                    await self.store.name(name)
                for name in await self.store.pools():
                    self.desk(name)
            await asyncio.sleep(_DISCOVER_S)
