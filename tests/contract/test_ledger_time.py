"""What ends by itself, how fast, and when not at all."""

from __future__ import annotations

import pytest

from moorage_server.core.config import PoolConfig
from moorage_server.errors import SessionUnknown
from tests.contract.steps import I0, Steps, request


async def test_a_lease_that_is_not_renewed_ends_the_session(steps: Steps) -> None:
    placed = await steps.placed("s", lease_ttl_ms=20_000)
    await steps.pass_time(19_999)
    assert await steps.expire() == 0
    await steps.pass_time(1)
    assert await steps.expire() == 1
    books = await steps.books()
    assert books.sessions == {}
    assert (books.counter("rel", "a"), books.counter("done", "a")) == (1, 0)
    with pytest.raises(SessionUnknown):
        await steps.place("s", placed.token)
    assert (await steps.progress("s", placed.token)).status == "UNKNOWN"
    over = await steps.release("s", placed.token)
    assert (over.over, over.duration_ms) == (True, 20_000)
    assert (await steps.store.history(steps.pool, "s"))[-1][1:] == ("expire", "lease ran out", I0)


async def test_a_caller_that_does_not_ask_again_loses_its_place(steps: Steps) -> None:
    await steps.held("s", patience_ms=30_000)
    await steps.pass_time(29_999)
    assert await steps.expire() == 0
    await steps.pass_time(1)
    assert await steps.expire() == 1
    books = await steps.books()
    assert (books.sessions, books.queues, books.counter("held", "a")) == ({}, {}, 0)


async def test_expiry_is_bounded_per_second_and_per_call(steps: Steps) -> None:
    for n in range(30):
        await steps.placed(f"s{n}", lease_ttl_ms=1_000)
    for n in range(10):
        await steps.held(f"h{n}", patience_ms=1_000)
    await steps.pass_time(2_000)
    assert await steps.expire(per_second=12, most=5) == 5
    assert await steps.expire(per_second=12, most=100) == 7
    assert await steps.expire(per_second=12, most=100) == 0
    await steps.pass_time(1_000)
    assert await steps.expire(per_second=12, most=100) == 12
    await steps.pass_time(1_000)
    assert await steps.expire(per_second=12, most=100) == 12
    await steps.pass_time(1_000)
    assert await steps.expire(per_second=12, most=100) == 4
    assert (await steps.books()).sessions == {}


async def test_two_holders_share_one_budget(steps: Steps) -> None:
    other = Steps(steps.backend, steps.backend.open())
    for n in range(30):
        await steps.placed(f"s{n}", lease_ttl_ms=1_000)
    await steps.pass_time(2_000)
    assert await steps.expire(per_second=10) + await other.expire(per_second=10) == 10


async def test_after_an_outage_nothing_ends_for_a_while(steps: Steps) -> None:
    placed = await steps.placed("s", lease_ttl_ms=20_000)
    await steps.held("h", patience_ms=10_000)
    await steps.tick()
    await steps.backend.clock.advance(60_000)
    assert await steps.expire() == 0, "before anybody keeps the epoch again"
    assert (await steps.store.view(steps.pool, PoolConfig())).in_grace
    tick = await steps.tick()
    assert tick.grace_until_ms == tick.now_ms + 30_000
    await steps.pass_time(29_000)
    assert await steps.expire() == 0
    assert (await steps.store.view(steps.pool, PoolConfig())).in_grace
    assert (await steps.progress("s", placed.token)).status == "OK"
    await steps.pass_time(1_001)
    assert not (await steps.store.view(steps.pool, PoolConfig())).in_grace
    assert await steps.expire() == 1
    assert set((await steps.books()).sessions) == {"s"}


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
async def test_a_clock_that_jumps_ends_nobody_at_once(steps: Steps, jump_ms: int) -> None:
    tokens = {f"s{n}": (await steps.placed(f"s{n}", lease_ttl_ms=20_000)).token for n in range(20)}
    await steps.tick()
    await steps.backend.clock.advance(jump_ms)
    await steps.tick()
    assert await steps.expire() == 0
    assert await steps.gone() == "ALIVE"
    for sid, token in tokens.items():
        assert (await steps.progress(sid, token)).status == "OK"
    await steps.pass_time(19_000)
    assert await steps.expire() == 0


async def test_a_pool_with_long_epochs_is_not_away_between_them(steps: Steps) -> None:
    await steps.placed("s", lease_ttl_ms=20_000)
    for _ in range(3):
        await steps.store.tick(steps.pool, "me", 90_000, 30_000, 180_000)
        await steps.backend.clock.advance(60_000)
    assert not (await steps.store.view(steps.pool, PoolConfig())).in_grace
    assert await steps.expire() == 1


async def test_everything_of_a_session_goes_by_itself_in_the_end(steps: Steps) -> None:
    """Live, homeless, held, paused and ended sessions, in a group and with request ids: no key without an end."""
    tokens = {}
    for sid in ("live", "lost", "ended", "paused"):
        tokens[sid] = (await steps.placed(sid, rid=request(), group=f"g-{sid}")).token
        await steps.place(sid, tokens[sid], rid=request())
        await steps.progress(sid, tokens[sid], turn=0, context_tokens=300, cached_tokens=0, output_tokens=1)
    await steps.snapshot("0|lost")
    await steps.release("ended", tokens["ended"], rid=request())
    await steps.release("paused", tokens["paused"], "PAUSED", rid=request())
    await steps.held("held", rid=request(), group="g-held")
    await steps.held("held-paused")
    await steps.release("held-paused", outcome="PAUSED")
    await steps.release("lost", tokens["lost"], context=1_600)
    await steps.snapshot(inc="2")
    await steps.store.keep(steps.pool, ["held", "live"], 1_000, 1_000)
    await steps.place("live", tokens["live"])
    lifetimes = (await steps.books()).lifetimes
    assert {name.partition(":")[0] for name in lifetimes} == {"s", "done", "h", "r", "gr"}
    eight_days_ms = 8 * 86_400_000
    assert {name: left for name, left in lifetimes.items() if left is None or not 0 < left <= eight_days_ms} == {}
