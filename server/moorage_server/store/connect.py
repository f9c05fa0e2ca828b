"""Opens the store that the settings name."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from moorage_server.store.redis_store import RedisStore

#: Seconds that one call to the store may take.
_TIMEOUT_S = 2.0


async def open_store(redis_url: str | None, *, embedded: bool, prefix: str = "moorage") -> RedisStore:
    """The store at ``redis_url``, or one inside this process whose state ends with it.

    Connecting is left to the first call, so that a server may start before its store.
    """
    if embedded or redis_url is None:
        from fakeredis import FakeAsyncRedis, FakeServer

        server = FakeServer()
        return RedisStore(FakeAsyncRedis(server=server), FakeAsyncRedis(server=server), prefix)
    # A client that retries would run a mutation again that the store has carried out already.
    options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": _TIMEOUT_S}
    return RedisStore(
        Redis.from_url(redis_url, socket_timeout=_TIMEOUT_S, max_connections=256, **options),
        Redis.from_url(redis_url, socket_timeout=None, health_check_interval=10, **options),
        prefix,
    )
