"""Two servers on a Cluster of three masters: pools on different nodes, and a slot that moves while it is in use."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from moorage import AsyncClient
from moorage_server.store.keys import pool_prefix
from tests.integration.engines import Engines
from tests.integration.load import Load
from tests.integration.processes import Server, Start, eventually
from tests.ledger_audit import discrepancies, read
from tests.redis_setups import Cluster, needs

CAP, WORKERS = 3, 4
PREFIX = "cluster"
#: One on each node, and one that moves.
POOLS = ("pool-0", "pool-1", "pool-2", "pool-4")
POLICY = "{policy: static, static_cap: 3, epoch_interval_s: 0.5}"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    needs("redis-server")
    folder = tmp_path / "redis"
    folder.mkdir()
    with contextlib.closing(Cluster(folder)) as setup:
        yield setup


@pytest.fixture
def servers(start: Start, cluster: Cluster) -> list[Server]:
    pools = f"{{{', '.join(f'{pool}: {POLICY}' for pool in POOLS)}}}"
    env = {**cluster.environment, "MOORAGE_REDIS_KEY_PREFIX": PREFIX, "MOORAGE_POOLS": pools}
    both = [start(**env) for _ in range(2)]
    for server in both:
        eventually(server.api.ready)
    return both


def _root(pool: str) -> str:
    return pool_prefix(PREFIX, pool)


async def test_decisions_go_on_while_a_slot_moves(cluster: Cluster, servers: list[Server]) -> None:
    assert len({cluster.owner(_root(pool)).port for pool in POOLS}) == 3
    moving = POOLS[-1]
    source = cluster.owner(_root(moving))
    target = next(node for node in cluster.nodes if node is not source)
    with contextlib.ExitStack() as beats:
        for number, pool in enumerate(POOLS):
            beats.enter_context(Engines(servers[number % 2].api, "engine-0", pool=pool, blocks=512))
        async with AsyncClient("ipv4:" + ",".join(server.address for server in servers)) as client:
            loads = {pool: Load(client, pool, WORKERS, stay=2) for pool in POOLS}
            running = asyncio.gather(*(load.run() for load in loads.values()))
            await asyncio.sleep(2)
            began = time.monotonic()
            moved = await asyncio.to_thread(cluster.move, _root(moving), target, 2, 0.02)
            ended = time.monotonic()
            await asyncio.sleep(2)
            over = time.monotonic()
            for load in loads.values():
                load.stop()
            await asyncio.wait_for(running, 30)
    gaps = {pool: load.longest_gap(began, over) for pool, load in loads.items()}
    print(f"{moved} keys moved in {ended - began:.2f} s; longest time without a decision: {gaps}")
    assert moved > 20
    assert cluster.owner(_root(moving)) is target
    for pool, load in loads.items():
        print(pool, load)
        assert load.torn_at == [], pool
        assert load.readmitted == 0, pool
        assert load.errors["lost"] == 0, pool
        # Only the pool whose keys are on the way waits, and it goes on where they are.
        assert any(began < at < ended for at in load.placed_at) or pool == moving, pool
        assert any(ended < at for at in load.placed_at), pool
    for server in servers:
        assert "epoch_failed" not in server.log()
        assert server.terminate() == 0
    for pool, load in loads.items():
        async with Redis(port=cluster.owner(_root(pool)).port) as node:
            books = await read(node, PREFIX, pool)
        assert discrepancies(books) == [], pool
        assert {sid: row["token"] for sid, row in books.state("live").items()} == load.living, pool
    leftovers = source.client.keys(f"{_root(moving)}*")
    assert leftovers == []
