"""A client of a Redis Cluster: each pool has a slot, and is followed when the slot moves or its node fails over.

The library's own client will not do for a ledger: it refuses scripts in pipelines, sends ASKING on one connection and
the command that it is for on another, and cuts the connections of calls under way when it learns of a new layout.

What is sent again has not been carried out: a redirection, or a refusal while the slot is on its way. While a slot
moves, its keys are on two nodes. A script is never sent after them: it would see half a ledger (see _base.lua).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from moorage_server.store.batch import Batcher
from moorage_server.store.connections import Address, network_options, node_pair
from moorage_server.store.parse import text

#: Seconds between two tries while a slot moves.
_PAUSE_S = 0.02
#: What a script says that met its slot on the way, before it did anything.
_ON_ITS_WAY = "access a non local key"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Node:
    address: Address
    client: Any
    subscriber: Redis
    batcher: Batcher


class ClusterClient:
    """Commands on one key each, and scripts. The URL names one of the nodes; the others are found."""

    def __init__(self, redis_url: str, timeout_s: float) -> None:
        options = network_options(redis_url)
        if options.get("db"):
            raise ValueError("a Cluster has database 0 only")
        self._url, self._timeout_s = redis_url, timeout_s
        self._first: Address = (options.get("host", "localhost"), options.get("port", 6379))
        self._nodes: dict[Address, _Node] = {}
        self._slots: dict[int, Address] = {}
        self._suspects: set[Address] = set()
        self._learning: asyncio.Task[_Node] | None = None

    async def aclose(self) -> None:
        """Closes all connections."""
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            await node.client.aclose()
            await node.subscriber.aclose()

    async def evalsha(self, sha: str, key: str, *args: Any) -> Any:
        """The answer of a script on the slot of ``key``. Calls at once to one node go in one round trip."""
        return await self._follow(key, lambda node: node.batcher.evalsha(sha, key, *args), None)

    async def load(self, source: str, key: str) -> None:
        """Loads a script where ``key`` is."""
        await self._follow(key, lambda node: node.client.script_load(source), None)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """A command whose first argument is its key."""

        async def asking(node: _Node) -> Any:
            async with node.client.pipeline(transaction=False) as pipe:
                pipe.execute_command("ASKING")
                pipe.execute_command(*args, **options)
                return (await pipe.execute())[1]

        return await self._follow(args[1], lambda node: node.client.execute_command(*args, **options), asking)

    async def ping(self) -> None:
        """Raises ClusterDownError where the cluster does not serve, ConnectionError where no node answers."""
        node = await self._learn()
        if b"cluster_state:ok" not in await node.client.execute_command("CLUSTER", "INFO"):
            raise ClusterDownError("the cluster does not serve")

    async def subscriber(self) -> Redis:
        """For subscriptions: what is published on one node is heard on all. Ask again when it failed."""
        return (await self._learn()).subscriber

    async def _follow(
        self, key: str, call: Callable[[_Node], Awaitable[T]], asking: Callable[[_Node], Awaitable[T]] | None
    ) -> T:
        slot, loop = key_slot(key.encode()), asyncio.get_running_loop()
        until, redirected = loop.time() + self._timeout_s, False
        while True:
            node = await self._owner(slot)
            try:
                return await call(node)
            except (ConnectionError, TimeoutError, OSError, ClusterDownError):
                self._suspect(node.address)
                raise
            except MovedError as error:
                self._slots[slot] = _target(error, node)
                if not redirected:
                    redirected = True
                    continue
            except AskError as error:
                if asking is not None:
                    return await asking(self._node(_target(error, node)))
            except ResponseError as error:
                if not isinstance(error, TryAgainError) and _ON_ITS_WAY not in str(error):
                    raise
            if loop.time() >= until:
                raise TryAgainError(f"slot {slot} is on its way to another node")
            await asyncio.sleep(_PAUSE_S)

    async def _owner(self, slot: int) -> _Node:
        if slot not in self._slots:
            await self._learn()
        address = self._slots.get(slot)
        if address is None:
            raise ClusterDownError(f"nobody serves slot {slot}")
        return self._node(address)

    def _node(self, address: Address) -> _Node:
        node = self._nodes.get(address)
        if node is None:
            client, subscriber = node_pair(self._url, address, self._timeout_s)
            node = self._nodes[address] = _Node(address, client, subscriber, Batcher(client))
        return node

    def _suspect(self, address: Address) -> None:
        """Something is wrong there: what it served may be elsewhere by now."""
        self._suspects.add(address)
        self._slots = {slot: owner for slot, owner in self._slots.items() if owner != address}

    async def _learn(self) -> _Node:
        """Reads which node serves which slot; the node that said it. One reading at a time, for all who ask."""
        if self._learning is None:
            self._learning = asyncio.create_task(self._ask_around())
            self._learning.add_done_callback(self._learnt)
        return await asyncio.shield(self._learning)

    def _learnt(self, task: asyncio.Task[_Node]) -> None:
        self._learning = None
        if not task.cancelled():
            # All who asked may be gone: a failure is theirs, not the loop's.
            task.exception()

    async def _ask_around(self) -> _Node:
        known = sorted({*self._nodes, self._first}, key=lambda address: address in self._suspects)
        failure: Exception | None = None
        for address in known:
            node = self._node(address)
            try:
                rows = await node.client.execute_command("CLUSTER", "SLOTS")
            except (ConnectionError, TimeoutError, OSError) as error:
                self._suspects.add(address)
                failure = error
                continue
            self._suspects.discard(address)
            self._slots = {
                slot: (text(host or b"") or address[0], int(port))
                for first, last, (host, port, *_), *_ in rows
                for slot in range(first, last + 1)
            }
            for owner in {*self._slots.values()}:
                self._node(owner)
            return node
        raise ConnectionError("no node of the cluster answers") from failure


def _target(error: AskError, node: _Node) -> Address:
    """Where a redirection points; one without a host stays where it came from."""
    return error.host or node.address[0], error.port
