"""The primary of a Sentinel setup dies under load: two servers follow to the replica by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from moorage import AsyncClient
from tests.integration.engines import Engines
from tests.integration.load import Load
from tests.integration.processes import Server, Start, eventually
from tests.ledger_audit import discrepancies, read
from tests.redis_setups import DOWN_AFTER_MS, Sentinels, needs

CAP, WORKERS, LEASE_S = 4, 12, 3
POOLS = f"{{default: {{policy: static, static_cap: {CAP}, lease_ttl_s: {LEASE_S}, epoch_interval_s: 0.5}}}}"
ENGINES = ("engine-0", "engine-1")
PREFIX = "failover"


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    needs("redis-server")
    folder = tmp_path / "redis"
    folder.mkdir()
    with contextlib.closing(Sentinels(folder)) as setup:
        yield setup


@pytest.fixture
def servers(start: Start, sentinels: Sentinels) -> list[Server]:
    env = {**sentinels.environment, "MOORAGE_REDIS_KEY_PREFIX": PREFIX, "MOORAGE_POOLS": POOLS}
    both = [start(**env) for _ in range(2)]
    for server in both:
        eventually(server.api.ready)
    return both


def _target(servers: list[Server]) -> str:
    return "ipv4:" + ",".join(server.address for server in servers)


@pytest.mark.parametrize("lost_s", [0.0, 0.7])
async def test_decisions_go_on_after_a_failover(sentinels: Sentinels, servers: list[Server], lost_s: float) -> None:
    """Acknowledged writes of the last `lost_s` never reach the replica."""
    with contextlib.ExitStack() as beats:
        for server in servers:
            beats.enter_context(Engines(server.api, *ENGINES, blocks=512))
        async with AsyncClient("ipv4:" + ",".join(server.address for server in servers)) as client:
            load = Load(client, "default", WORKERS, stay=CAP)
            running = asyncio.create_task(load.run())
            await asyncio.sleep(2)
            before = load.done
            assert before > 0
            killed = await _primary_lost(sentinels, lost_s)
            await asyncio.to_thread(eventually, lambda: sentinels.primary_port() == sentinels.replica.port)
            promoted = time.monotonic()
            await asyncio.to_thread(eventually, lambda: load.placed_at[-1] > promoted)
            resumed = next(at for at in load.placed_at if at > promoted) - killed
            await asyncio.sleep(2)
            load.stop()
            await asyncio.wait_for(running, 30)
            print(f"{lost_s} s of writes lost; decisions resumed after {resumed:.1f} s;", load)
            # Down for a second, an election, a pause of the client; and all room may be taken by sessions whose Release
            # is lost, until their leases end.
            assert resumed < DOWN_AFTER_MS / 1000 + 8 + (LEASE_S if lost_s else 0)
            assert load.done > before + WORKERS
            assert (load.readmitted + load.errors["lost"] > 0) or not lost_s
            # Of a pair one may have been answered before, and that been lost or have run out, when the other was.
            assert all(killed - lost_s <= at <= killed + resumed + 5 for at in load.torn_at)
            await _renewed_until_nothing_else_lives(load, sentinels)
    for server in servers:
        assert "epoch_failed" not in server.log()
        assert server.terminate() == 0
    await _balanced(load, sentinels)


async def _primary_lost(sentinels: Sentinels, lost_s: float) -> float:
    """Kills the primary, whose replica has not heard of its last writes; when it died."""
    if lost_s:
        sentinels.replica.freeze()
        sentinels.primary.client.client_kill_filter(_type="replica")
        await asyncio.sleep(lost_s)
    sentinels.primary.kill()
    sentinels.replica.thaw()
    return time.monotonic()


async def _renewed_until_nothing_else_lives(load: Load, sentinels: Sentinels) -> None:
    """What a lost Release left behind ends with its lease; those who are there are repaired by asking.

    A session that is held once more, as its admission was lost, keeps its place for half a minute: that is no room.
    """
    deadline = time.monotonic() + 3 * LEASE_S + 5
    async with Redis(port=sentinels.replica.port) as client:
        while True:
            for session in list(load.living):
                await load.turn(session, 9)
            if set((await read(client, PREFIX, "default")).state("live")) == set(load.living):
                return
            assert time.monotonic() < deadline, "sessions live on that nobody holds"
            await asyncio.sleep(0.5)


async def _balanced(load: Load, sentinels: Sentinels) -> None:
    async with Redis(port=sentinels.replica.port) as client:
        books = await read(client, PREFIX, "default")
    assert discrepancies(books) == []
    # One session, one home, one living lease: the one that its caller holds.
    assert {sid: row["token"] for sid, row in books.state("live").items()} == load.living
    assert all(int(row["ses"]) <= CAP for row in books.instances.values())
