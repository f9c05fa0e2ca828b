"""Opens the store that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from moorage_server.store.cluster import ClusterClient
from moorage_server.store.connections import TIMEOUT_S, Address, pair, primary_pair
from moorage_server.store.redis_store import RedisStore

#: Connections inside the process, where one costs nothing and none may be refused.
_EMBEDDED_CONNECTIONS = 2**16


async def open_store(
    redis_url: str | None,
    *,
    embedded: bool,
    prefix: str = "moorage",
    sentinels: Sequence[Address] = (),
    master_name: str | None = None,
    cluster: bool = False,
) -> RedisStore:
    """The store at ``redis_url``, or one inside this process whose state ends with it.

    With sentinels it is the primary that they call ``master_name``, and the URL gives user, password, database and TLS;
    of a Cluster the URL gives one node. Connecting is left to the first call, so that a server may start before its
    store. Raises ValueError for a URL that will not do.
    """
    if sentinels and master_name is not None:
        url = redis_url or "redis://"
        return RedisStore(*primary_pair(url, sentinels, master_name, TIMEOUT_S), prefix)
    if embedded or redis_url is None:
        from fakeredis import FakeServer

        return RedisStore(*embedded_clients(FakeServer()), prefix)
    if cluster:
        client = ClusterClient(redis_url, TIMEOUT_S)
        return RedisStore(client, client, prefix)
    return RedisStore(*clients(redis_url), prefix)


def embedded_clients(server: Any) -> tuple[Redis, Redis]:
    """Clients of a fakeredis in this process, for calls and for a subscription."""
    from fakeredis import FakeAsyncRedis

    return FakeAsyncRedis(server=server, max_connections=_EMBEDDED_CONNECTIONS), FakeAsyncRedis(server=server)


def clients(redis_url: str, timeout_s: float = TIMEOUT_S) -> tuple[Redis, Redis]:
    """Clients for calls and for a subscription. Raises ValueError for a URL that is none."""
    return pair(redis_url, timeout_s)
