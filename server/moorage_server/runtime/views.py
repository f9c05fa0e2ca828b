"""One pool as one server process sees it: read from the store, a moment old at most, and shared by all its calls."""

from __future__ import annotations

import asyncio

from moorage_server.core.config import PoolConfig
from moorage_server.core.view import Pool
from moorage_server.errors import StoreUnavailable
from moorage_server.meters import Meters
from moorage_server.store.base import Store
from moorage_server.store.records import Placed

#: A view older than this is read again before it decides; a view known to be outdated, or that would hold a session,
#: after the shorter time.
VIEW_S, DIRTY_VIEW_S = 0.25, 0.02


class Views:
    """Reads one pool. One event loop; not thread-safe."""

    def __init__(self, store: Store, pool: str, default: PoolConfig, meters: Meters | None = None) -> None:
        self.store = store
        self.pool = pool
        self.default = default
        self.meters = meters or Meters()
        self._view: Pool | None = None
        self._read_at = 0.0
        self._dirty = True
        self._freed = False
        self._reading: asyncio.Task[Pool] | None = None

    def changed(self) -> None:
        """There may be more room now: nobody is held any more because of what was read before."""
        self._freed = True

    async def view(self) -> Pool:
        """The pool, a moment old at most. Shared: do not change it."""
        if self._reading is not None:
            # What is being read was asked for because what is at hand is outdated.
            return await asyncio.shield(self._reading)
        age = asyncio.get_running_loop().time() - self._read_at
        if self._view is not None and age < (DIRTY_VIEW_S if self._dirty else VIEW_S):
            return self._view
        return await self._reading_now()

    async def view_with(self, placed: Placed) -> Pool:
        """A view that knows the instance, as it is in that incarnation, if the pool still does."""
        view = await self.view()
        return view if shows(view, placed) else await self._read_again()

    async def _read_again(self) -> Pool:
        """The pool as it is now: a reading that is under way may have begun too early."""
        if self._reading is not None:
            await asyncio.shield(self._reading)
        return await self._reading_now()

    async def _reading_now(self) -> Pool:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> Pool:
        try:
            self._dirty = self._freed = False
            started = asyncio.get_running_loop().time()
            view = await self.store.view(self.pool, self.default)
            self._view, self._read_at = view, started
            if view.named:
                self.meters.pools.know(self.pool)
            return view
        except StoreUnavailable:
            self._dirty, self._view = True, None
            raise
        finally:
            self._reading = None


def shows(view: Pool, placed: Placed) -> bool:
    """Whether the view knows the instance, as it is in that incarnation."""
    instance = view.instances.get(placed.instance)
    return instance is not None and instance.incarnation == placed.incarnation
