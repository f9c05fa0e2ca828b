"""Opens the store that the settings name."""

from __future__ import annotations

from typing import Any

import hiredis
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from moorage_server.store.redis_store import RedisStore

#: Seconds that one call to the store may take, and that it may wait for a free connection.
_TIMEOUT_S = 2.0
#: Connections of one server process. More calls at once than this wait for one, they do not fail.
_CONNECTIONS = 64
#: The same inside the process, where a connection costs nothing and none may be refused.
_EMBEDDED_CONNECTIONS = 2**16


class PackingConnection(Connection):
    """A connection that packs commands in C: an admission has dozens of arguments."""

    def pack_command(self, *args: Any) -> list[bytes]:
        # Commands of two words, such as SCRIPT LOAD, come as one.
        name, *rest = args
        return [hiredis.pack_command((*name.split(), *rest))]


async def open_store(redis_url: str | None, *, embedded: bool, prefix: str = "moorage") -> RedisStore:
    """The store at ``redis_url``, or one inside this process whose state ends with it.

    Connecting is left to the first call, so that a server may start before its store.
    """
    if embedded or redis_url is None:
        from fakeredis import FakeServer

        return RedisStore(*embedded_clients(FakeServer()), prefix)
    return RedisStore(*clients(redis_url), prefix)


def embedded_clients(server: Any) -> tuple[Redis, Redis]:
    """Clients of a fakeredis in this process, for calls and for a subscription."""
    from fakeredis import FakeAsyncRedis

    return FakeAsyncRedis(server=server, max_connections=_EMBEDDED_CONNECTIONS), FakeAsyncRedis(server=server)


def clients(redis_url: str, timeout_s: float = _TIMEOUT_S) -> tuple[Redis, Redis]:
    """Clients for calls and for a subscription. Raises ValueError for a URL that is none."""
    # A client that retries would run a mutation again that the store has carried out already.
    options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": timeout_s}
    packing = {"connection_class": PackingConnection} if redis_url.startswith("redis://") else {}
    pool = BlockingConnectionPool.from_url(
        redis_url, **packing, max_connections=_CONNECTIONS, timeout=timeout_s, socket_timeout=timeout_s, **options
    )
    return Redis.from_pool(pool), Redis.from_url(redis_url, socket_timeout=None, health_check_interval=10, **options)
