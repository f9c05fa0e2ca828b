"""Pools as reads and operators' calls see them: fresh from the store, and never brought into being by a look."""

from __future__ import annotations

from dataclasses import replace

from moorage_server.core.config import PoolConfig
from moorage_server.core.view import Pool
from moorage_server.errors import PoolUnknown
from moorage_server.runtime.control import ControlPlane


async def known_pool(control: ControlPlane, pool: str) -> Pool:
    """The pool as it is now. Raises PoolUnknown where no snapshot and no configuration ever named it."""
    view = await control.store.view(pool, PoolConfig())
    if not view.named:
        raise PoolUnknown(pool)
    return view if view.config_version else replace(view, config=control.desk(pool).default)
