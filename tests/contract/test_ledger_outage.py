"""A store that is away, full, read only, or that forgot its scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
from fakeredis import FakeServer

from moorage_server.core.config import PoolConfig
from moorage_server.errors import StoreUnavailable
from moorage_server.store import connect, keys, redis_store
from moorage_server.store.records import Request
from moorage_server.store.redis_store import RedisStore
from tests.conftest import Backend, RedisServer
from tests.contract.steps import I0, Steps, request


async def test_scripts_are_loaded_again_after_a_flush(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.backend.client.script_flush()
    assert (await steps.progress("s", placed.token)).status == "OK"
    await steps.backend.client.script_flush()
    await asyncio.gather(*(steps.placed(f"s{n}") for n in range(20)))


async def test_a_pool_in_use_is_named_again_where_the_store_forgot_it(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_TOUCH_S", 0.0)
    await steps.placed("s")
    assert steps.pool in await steps.store.pools()
    await steps.backend.client.delete(keys.pools_key(steps.backend.prefix))
    assert await steps.store.pools() == []
    await steps.placed("t")
    assert await steps.store.pools() == [steps.pool]


async def test_a_thousand_calls_at_once_wait_for_connections(steps: Steps) -> None:
    placed = await steps.placed("s")
    answers = await asyncio.gather(*(steps.progress("s", placed.token) for _ in range(1_000)))
    assert {a.status for a in answers} == {"OK"}


async def test_a_call_is_carried_out_once_however_late_its_answer_is(own_redis_server: RedisServer) -> None:
    """The client gives up; it must not send the mutation again behind the caller's back."""
    client, subscriber = connect.clients(own_redis_server.url, 0.2)
    store = RedisStore(client, subscriber, "late")
    steps = Steps(Backend("redis", client, lambda: client, "late"), store)
    await steps.snapshot()
    await steps.placed("first")
    busy = asyncio.create_task(_occupy(own_redis_server, 0.8))
    await asyncio.sleep(0.1)
    with pytest.raises(StoreUnavailable):
        await steps.placed("s")
    await busy
    assert (await steps.books()).pool["decisions"] == "2"
    await store.close()


async def _occupy(server: RedisServer, seconds: float) -> None:
    """Keeps a server busy: it reads what comes in the meantime afterwards."""
    client, subscriber = connect.clients(server.url, 20.0)
    await cast(Any, client).execute_command("DEBUG", "SLEEP", str(seconds))
    await client.aclose()
    await subscriber.aclose()


async def test_a_crowd_learns_of_an_outage_by_one_timeout(own_redis_server: RedisServer) -> None:
    client, subscriber = connect.clients(own_redis_server.url, 0.5)
    store = RedisStore(client, subscriber, "crowd")
    steps = Steps(Backend("redis", client, lambda: client, "crowd"), store)
    await steps.snapshot()
    token = (await steps.placed("s")).token
    own_redis_server.freeze()
    started = time.monotonic()
    calls = [steps.progress("s", token) for _ in range(500)]
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(failure) for failure in failures} == {StoreUnavailable}
    assert time.monotonic() - started < 2.0
    own_redis_server.thaw()
    await store.close()


class Away:
    """A store that went away under a server that had used it."""

    def __init__(self, steps: Steps, token: str) -> None:
        self.steps, self.token = steps, token


@pytest.fixture(params=["fakeredis", "stopped", "silent", "read-only"])
async def away(request: pytest.FixtureRequest) -> AsyncIterator[Away]:
    """The ways in which a store is not there."""
    kind = request.param
    if kind == "fakeredis":
        fake = FakeServer()
        client, subscriber = connect.embedded_clients(fake)
    else:
        server: RedisServer = request.getfixturevalue("own_redis_server")
        client, subscriber = connect.clients(server.url, 0.2)
    store = RedisStore(client, subscriber, "away")
    steps = Steps(Backend(kind, client, lambda: client, "away"), store)
    await steps.snapshot()
    token = (await steps.placed("s", ticket="t")).token
    await steps.held("h")
    if kind == "fakeredis":
        fake.connected = False
    elif kind == "stopped":
        server.stop()
    elif kind == "silent":
        await cast(Any, client).execute_command("CLIENT", "PAUSE", "60000", "ALL")
    else:
        await cast(Any, client).execute_command("REPLICAOF", "127.0.0.1", "1")
    yield Away(steps, token)
    await store.close()


#: All that changes the ledger.
CHANGES: dict[str, Callable[[Steps, str], Awaitable[Any]]] = {
    "admit": lambda s, _: s.placed("t"),
    "place": lambda s, token: s.place("s", token),
    "release": lambda s, token: s.release("s", token),
    "withdraw": lambda s, _: s.store.withdraw(s.pool, Request("x"), "s", "t"),
    "progress": lambda s, token: s.progress("s", token),
    "snapshot": lambda s, _: s.snapshot(),
    "keep": lambda s, _: s.store.keep(s.pool, ["h"], 1, 1),
    "mark": lambda s, _: s.store.mark(s.pool, I0, "cordon"),
    "configure": lambda s, _: s.store.configure(s.pool, request(), "{}", None),
    "name": lambda s, _: s.store.name("other"),
    "tick": lambda s, _: s.tick(),
}
#: All that only reads it.
READS: dict[str, Callable[[Steps, str], Awaitable[Any]]] = {
    "view": lambda s, _: s.store.view(s.pool, PoolConfig()),
    "session": lambda s, _: s.store.session(s.pool, "s"),
    "sessions": lambda s, _: s.store.sessions(s.pool, "", 10),
    "history": lambda s, _: s.store.history(s.pool, "s"),
    "events": lambda s, _: s.store.events(s.pool, "0", 10),
    "state": lambda s, _: s.store.state(s.pool),
    "pools": lambda s, _: s.store.pools(),
    "ping": lambda s, _: s.store.ping(),
}


async def test_a_store_that_is_away_is_said_to_be_away_and_soon(away: Away) -> None:
    calls = CHANGES if away.steps.backend.kind == "read-only" else {**CHANGES, **READS}
    for name, call in calls.items():
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await call(away.steps, away.token)
        assert time.monotonic() - started < 5.0, name


async def test_a_full_store_admits_nobody_and_lets_everybody_go(own_redis_server: RedisServer) -> None:
    client, subscriber = connect.clients(own_redis_server.url)
    store = RedisStore(client, subscriber, "full")
    steps = Steps(Backend("redis", client, lambda: client, "full"), store)
    await steps.snapshot()
    tokens = {sid: (await steps.placed(sid, lease_ttl_ms=1)).token for sid in ("s", "t", "expires")}
    await steps.held("held")
    await client.config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable):
        await steps.placed("newcomer")
    assert (await steps.release("s", tokens["s"], rid=request(), context=1_600)).over is False
    assert (await steps.release("t", tokens["t"], "PAUSED")).over is False
    assert (await steps.release("held", outcome="ABORTED")).over is False
    await asyncio.sleep(0.01)
    assert await steps.expire() >= 1
    await client.config_set("maxmemory", "0")
    assert (await steps.books()).state("live") == {}
    await steps.placed("newcomer")
    await store.close()


async def test_listening_ends_with_the_store(own_redis_server: RedisServer) -> None:
    client, subscriber = connect.clients(own_redis_server.url)
    store = RedisStore(client, subscriber, "ear")
    heard: list[tuple[str, str]] = []
    listening = asyncio.Event()

    async def listen() -> None:
        async for _ in store.listen(lambda pool, why: heard.append((pool, why))):
            listening.set()

    task = asyncio.create_task(listen())
    await asyncio.wait_for(listening.wait(), 5)
    own_redis_server.stop()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(task, 10)
    await store.close()


@pytest.mark.parametrize("pool", ["p", "{x}* [?]\\", "Größe\0🛶"])
async def test_a_change_is_heard_by_every_server_while_somebody_waits(backend: Backend, pool: str) -> None:
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    listening = asyncio.Event()
    ear = backend.open()

    async def listen() -> None:
        async for _ in ear.listen(lambda *what: heard.put_nowait(what)):
            listening.set()

    task = asyncio.create_task(listen())
    await asyncio.wait_for(listening.wait(), 5)
    steps = Steps(backend, backend.open(), pool)
    await steps.snapshot()
    placed = await steps.placed("s")
    await steps.release("s", placed.token)
    await steps.placed("t")
    await steps.held("waits")
    await steps.snapshot(inc="2")
    assert await asyncio.wait_for(heard.get(), 5) == (pool, "instance")
    await steps.store.mark(pool, I0, "cordon")
    assert await asyncio.wait_for(heard.get(), 5) == (pool, "operator")
    assert heard.empty(), "nobody is woken while nobody waits"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
