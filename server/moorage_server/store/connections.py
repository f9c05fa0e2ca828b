"""Connections to one Redis, to the primary that sentinels name, and to a node of a Cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio import BlockingConnectionPool, Connection, Redis, Sentinel, SSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff

#: Host and port.
Address = tuple[str, int]

#: Seconds that one call to the store may take, and that it may wait for a free connection.
TIMEOUT_S = 2.0
#: Connections of one server process to one node. More calls at once than this wait for one, they do not fail.
_CONNECTIONS = 64
#: Seconds that a sentinel may take: there are others to ask.
_SENTINEL_S = 0.5
#: Seconds between two looks whether the connection of a subscription still stands.
_HEALTH_S = 10


class _Packing:
    """Packs commands in C: an admission has dozens of arguments."""

    def pack_command(self, *args: Any) -> list[bytes]:
        # Commands of two words, such as SCRIPT LOAD, come as one.
        name, *rest = args
        return [hiredis.pack_command((*name.split(), *rest))]


class PackingConnection(_Packing, Connection):
    """A connection that packs commands in C."""


class _PrimaryConnection(_Packing, SentinelManagedConnection):
    """A connection to the primary that packs commands in C."""


class _PrimaryPool(BlockingConnectionPool, SentinelConnectionPool):
    """Connections to the primary; who finds all in use waits."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Closes what is idle, as after a failover; or all, and those to the sentinels too."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()


def pair(redis_url: str, timeout_s: float = TIMEOUT_S) -> tuple[Redis, Redis]:
    """Clients for calls and for a subscription. Raises ValueError for a URL that is none."""
    return _calls(_options(redis_url), timeout_s), _subscription(_options(redis_url), timeout_s)


def node_pair(redis_url: str, address: Address, timeout_s: float) -> tuple[Redis, Redis]:
    """The same for one node of a Cluster, with the credentials and the TLS of the URL."""
    at = {"host": address[0], "port": address[1]}
    return _calls({**_options(redis_url), **at}, timeout_s), _subscription({**_options(redis_url), **at}, timeout_s)


def primary_pair(
    redis_url: str, sentinels: Sequence[Address], master_name: str, timeout_s: float
) -> tuple[Redis, Redis]:
    """The same for the primary that the sentinels name, asked again for every new connection.

    The connection is given up, too, when its server says that it is a replica now.
    """
    options = network_options(redis_url)
    tls = options.pop("connection_class") is SSLConnection
    options["connection_class"] = SentinelManagedSSLConnection if tls else _PrimaryConnection
    manager = _manager(options, sentinels, tls)
    options |= {"service_name": master_name, "sentinel_manager": manager, "retry": _no_retry()}
    options["socket_connect_timeout"] = timeout_s
    calls = {**options, "socket_timeout": timeout_s, "timeout": timeout_s, "max_connections": _CONNECTIONS}
    listens = {**options, "socket_timeout": None, "health_check_interval": _HEALTH_S}
    return Redis.from_pool(_PrimaryPool(**calls)), Redis.from_pool(_PrimaryPool(**listens))


def network_options(redis_url: str) -> dict[str, Any]:
    """What the URL says, for a store of several nodes. Raises ValueError where that can not be."""
    options = _options(redis_url)
    if options["connection_class"] is UnixDomainSocketConnection:
        raise ValueError("a socket is no way to several nodes: redis:// or rediss:// is needed")
    return options


def _options(redis_url: str) -> dict[str, Any]:
    return {"connection_class": PackingConnection, **parse_url(redis_url)}


def _no_retry() -> Retry:
    # A client that retries would run a mutation again that the store has carried out already.
    return Retry(NoBackoff(), 0)


def _calls(options: dict[str, Any], timeout_s: float) -> Redis:
    return Redis.from_pool(
        BlockingConnectionPool(
            **options,
            max_connections=_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=_no_retry(),
        )
    )


def _subscription(options: dict[str, Any], timeout_s: float) -> Redis:
    return Redis.from_pool(
        BlockingConnectionPool(
            **options,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            health_check_interval=_HEALTH_S,
            retry=_no_retry(),
        )
    )


def _manager(options: dict[str, Any], sentinels: Sequence[Address], tls: bool) -> Any:
    """Asks the sentinels without credentials, then with those of the store: either is common."""
    common = {name: value for name, value in options.items() if name.startswith("ssl_")}
    common |= {"ssl": tls, "socket_timeout": _SENTINEL_S, "socket_connect_timeout": _SENTINEL_S, "retry": _no_retry()}
    make: Any = Sentinel
    manager = make(sentinels, sentinel_kwargs=common)
    credentials = {name: options[name] for name in ("username", "password") if name in options}
    if credentials:
        manager.sentinels += make(sentinels, sentinel_kwargs=common | credentials).sentinels
    return manager
