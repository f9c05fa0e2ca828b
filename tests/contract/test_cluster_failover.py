"""A master of a Cluster dies: its pools are served by its replica, and those of others go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from moorage_server.errors import StoreUnavailable
from moorage_server.store import keys
from moorage_server.store.connect import open_store
from moorage_server.store.records import Snapshot
from tests.integration.processes import PATIENCE_S
from tests.redis_setups import Cluster, needs


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    needs("redis-server")
    with closing(Cluster(tmp_path, with_replica=True)) as setup:
        yield setup


async def test_the_pools_of_a_dead_master_are_found_at_its_replica(cluster: Cluster) -> None:
    store = await open_store(cluster.url, embedded=False, cluster=True, prefix="f")
    lost, spared = (
        next(name for name in map(str, range(100)) if cluster.owner(keys.pool_prefix("f", name)) is node)
        for node in cluster.masters[:2]
    )
    sequence = 0

    async def beat(pool: str) -> str:
        nonlocal sequence
        sequence += 1
        return await store.snapshot(pool, Snapshot("0|engine", "1", sequence, "SERVING", 16, b""))

    assert [await beat(lost), await beat(spared)] == ["NEW", "NEW"]
    cluster.wait_for_replica()
    cluster.masters[0].kill()
    with pytest.raises(StoreUnavailable):
        await beat(lost)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline
        try:
            # OK, not NEW: what the dead one had acknowledged is there.
            assert await beat(lost) == "OK"
            break
        except StoreUnavailable:
            await asyncio.sleep(0.05)
    assert await beat(spared) == "OK"
    await store.ping()
    await store.close()
