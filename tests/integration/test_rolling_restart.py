"""Servers are replaced one after another under load, and no call fails."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import uuid

from redis.asyncio import Redis

from moorage.channel import open_aio_channel
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.processes import PATIENCE_S, Api, Server, Start, eventually
from tests.integration.steady_load import Load
from tests.ledger_audit import audit

POOLS = "{default: {policy: static, static_cap: 24, epoch_interval_s: 0.5}}"


def _free_ports(count: int) -> list[int]:
    """Ports below those that the system gives away by itself: nobody gets one while its server is replaced."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


async def test_a_rolling_restart_fails_no_call(start: Start, redis_server: RedisServer) -> None:
    prefix = f"i{uuid.uuid4().hex}"
    ledger = {"MOORAGE_REDIS_URL": redis_server.url, "MOORAGE_REDIS_KEY_PREFIX": prefix, "MOORAGE_POOLS": POOLS}
    ports = _free_ports(2)

    def run(port: int) -> Server:
        return start("--listen", f"127.0.0.1:{port}", **ledger)

    servers = [run(port) for port in ports]
    for server in servers:
        await asyncio.to_thread(eventually, server.api.ready)
    addresses = ",".join(server.address for server in servers)
    both = Api(f"ipv4:{addresses}")
    with Engines(both, "engine-0", "engine-1", blocks=4096):
        async with open_aio_channel(f"ipv4:{addresses}") as channel:
            load = Load(channel)
            running = asyncio.create_task(load.run())
            await asyncio.sleep(1.5)
            for number, port in enumerate(ports):
                code = await asyncio.to_thread(servers[number].terminate)
                assert code == 0
                servers[number] = await asyncio.to_thread(run, port)
                await asyncio.to_thread(eventually, servers[number].api.ready)
            await asyncio.sleep(1.5)
            load.ending = True
            async with asyncio.timeout(PATIENCE_S):
                await running
    both.channel.close()
    assert load.failures == []
    assert min(load.answers[rpc] for rpc in ("Admit", "Place", "Release")) > 50
    async with Redis.from_url(redis_server.url) as client:
        assert await audit(client, prefix, "default") == []
