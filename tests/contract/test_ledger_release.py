"""Release, pausing and taking back on the ledger."""

from __future__ import annotations

import pytest

from moorage_server.errors import InvalidField, LeaseStale, PoolUnknown, RequestIdReused
from moorage_server.store.records import Released
from tests.contract.steps import I0, NOON, Steps, request


async def test_a_release_frees_all_and_says_what_the_session_cost(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=160)
    await steps.backend.clock.advance(2_000)
    assert await steps.release("s", placed.token) == Released(False, 2_000, 20_000, 10)
    books = await steps.books()
    assert books.sessions == {}
    assert int(books.instances[I0]["blocks"]) == 0


async def test_a_release_is_idempotent_and_the_cost_is_remembered_for_ten_minutes(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=160)
    await steps.backend.clock.advance(2_000)
    await steps.release("s", placed.token)
    for token in (placed.token, "", "9.x"):
        assert await steps.release("s", token) == Released(True, 2_000, 20_000, 10)
    books = await steps.books()
    assert (books.counter("rel", "a"), books.counter("done", "a")) == (1, 1)
    left = books.lifetimes["done:s"]
    assert left is not None
    assert 590_000 < left <= 600_000


async def test_a_release_of_somebody_unknown_is_over_without_a_cost(steps: Steps) -> None:
    assert await steps.release("nobody", "1.x") == Released(True)


async def test_a_release_in_an_unknown_pool_creates_nothing(bare: Steps) -> None:
    with pytest.raises(PoolUnknown):
        await bare.release("s", "1.x", rid=request())
    assert [key async for key in bare.backend.client.scan_iter(match=f"{bare.backend.prefix}*")] == []


async def test_a_release_needs_the_token_in_force(steps: Steps) -> None:
    first = await steps.placed("s")
    with pytest.raises(InvalidField):
        await steps.release("s")
    with pytest.raises(LeaseStale):
        await steps.release("s", "1.x")
    await steps.release("s", first.token)
    await steps.placed("s")
    with pytest.raises(LeaseStale):
        await steps.release("s", first.token)


async def test_a_held_session_is_released_without_a_token(steps: Steps) -> None:
    await steps.held("s")
    assert (await steps.release("s", outcome="ABORTED")).over is False
    books = await steps.books()
    assert books.sessions == {}
    assert (books.counter("held", "a"), books.counter("rel", "a")) == (0, 0)
    assert await steps.release("s", outcome="ABORTED") == Released(True)


async def test_a_homeless_session_is_released_with_its_token(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.snapshot(inc="2")
    with pytest.raises(InvalidField):
        await steps.release("s")
    assert (await steps.release("s", placed.token)).over is False
    books = await steps.books()
    assert (books.counter("held", "a"), books.counter("rel", "a")) == (0, 1)


@pytest.mark.parametrize("state", ["PAUSED", "SLEEPING", "DRAINING", "STOPPED"])
async def test_a_release_works_whatever_the_home_does(steps: Steps, state: str) -> None:
    placed = await steps.placed("s")
    await steps.snapshot(state=state)
    assert (await steps.release("s", placed.token)).over is False


async def test_a_release_works_from_any_process(steps: Steps) -> None:
    placed = await steps.placed("s")
    other = Steps(steps.backend, steps.backend.open())
    assert (await other.release("s", placed.token)).over is False


async def test_outcomes_are_counted(steps: Steps) -> None:
    for n, outcome in enumerate(("COMPLETED", "COMPLETED", "ABORTED", "FAILED", "PAUSED")):
        placed = await steps.placed(f"s{n}")
        await steps.release(f"s{n}", placed.token, outcome)
        await steps.backend.clock.advance(5_000)
    books = await steps.books()
    assert (books.counter("rel", "a"), books.counter("done", "a")) == (5, 2)


async def test_the_final_context_counts_for_the_peak(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=160)
    await steps.backend.clock.advance(1_000)
    assert await steps.release("s", placed.token, context=1_600) == Released(False, 1_000, 10_000, 100)


async def test_a_release_is_replayed(steps: Steps) -> None:
    rid = request()
    placed = await steps.placed("s")
    first = await steps.release("s", placed.token, rid=rid)
    second = await steps.placed("s")
    assert await steps.release("s", placed.token, rid=rid) == first
    assert set((await steps.books()).state("live")) == {"s"}
    assert (await steps.release("s", second.token)).over is False


async def test_a_late_repeat_does_not_release_who_came_after_it(steps: Steps) -> None:
    rid = request()
    assert (await steps.release("s", rid=rid)).over is True
    await steps.held("s")
    assert (await steps.release("s", rid=rid)).over is True
    assert set((await steps.books()).state("held")) == {"s"}


async def test_a_request_id_with_another_body_is_refused(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.release("s", placed.token, rid=request("one", "id"))
    with pytest.raises(RequestIdReused):
        await steps.release("s", placed.token, rid=request("other", "id"))


async def test_an_eviction_needs_no_token_and_says_why(steps: Steps) -> None:
    await steps.placed("s")
    assert (await steps.release("s", outcome="EVICTED", evict_reason="too greedy")).over is False
    _, kind, reason, instance = (await steps.store.history(steps.pool, "s"))[-1]
    assert (kind, reason, instance) == ("evict", "too greedy", I0)


async def test_a_paused_session_frees_its_blocks_and_keeps_its_seniority(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=160)
    await steps.backend.clock.advance(2_000)
    await steps.held("waits")
    assert await steps.release("s", placed.token, "PAUSED") == Released(False, 2_000, 20_000, 10)
    books = await steps.books()
    assert set(books.state("paused")) == {"s"}
    assert int(books.instances[I0]["blocks"]) == 0
    held = await steps.held("s")
    assert (held.position, held.since_ms) == (1, NOON)
    assert (await steps.held("waits")).position == 2
    again = await steps.placed("s")
    assert again.fresh
    assert again.token != placed.token


async def test_a_paused_session_that_gets_in_at_once_starts_a_new_residency(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=160)
    await steps.backend.clock.advance(2_000)
    await steps.release("s", placed.token, "PAUSED")
    await steps.backend.clock.advance(60_000)
    again = await steps.placed("s", tokens=320)
    await steps.backend.clock.advance(1_000)
    assert await steps.release("s", again.token) == Released(False, 1_000, 20_000, 20)


async def test_a_held_session_may_pause_too(steps: Steps) -> None:
    await steps.held("s")
    await steps.held("waits")
    assert (await steps.release("s", outcome="PAUSED")).over is False
    assert (await steps.held("waits")).position == 1
    assert (await steps.held("s")).position == 1


async def test_only_who_paused_a_session_gives_its_seniority_up(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.release("s", placed.token, "PAUSED")
    assert (await steps.release("s", "1.x", "ABORTED")).over is True
    assert set((await steps.books()).state("paused")) == {"s"}
    assert (await steps.release("s", placed.token, "ABORTED")).over is True
    assert (await steps.books()).sessions == {}


async def test_a_paused_session_is_forgotten_after_an_hour(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.release("s", placed.token, "PAUSED")
    await steps.backend.clock.advance(3_600_001)
    await steps.tick()
    await steps.pass_time(31_000)
    assert await steps.expire() == 1
    assert (await steps.books()).sessions == {}


async def test_a_call_whose_caller_is_gone_is_taken_back(steps: Steps) -> None:
    rid = request()
    await steps.placed("s", rid=rid, ticket="t1")
    assert await steps.store.withdraw(steps.pool, rid, "s", "t1")
    books = await steps.books()
    assert books.sessions == {}
    assert not [name for name in books.lifetimes if name.startswith("r:")]
    again = await steps.placed("s", rid=rid, ticket="t2")
    assert set((await steps.books()).state("live")) == {"s"}
    assert (await steps.release("s", again.token)).over is False


async def test_a_wait_whose_caller_is_gone_leaves_nothing(steps: Steps) -> None:
    rid = request()
    await steps.held("s", rid=rid, ticket="t1")
    assert await steps.store.withdraw(steps.pool, rid, "s", "t1")
    books = await steps.books()
    assert (books.sessions, books.held, books.queues, books.queue_names) == ({}, {}, {}, set())
    assert [name for name in books.lifetimes if not name.startswith("h:")] == []


@pytest.mark.parametrize("on", [(), (I0,)])
async def test_a_session_that_another_call_asked_for_is_not_taken_back(steps: Steps, on: tuple[str, ...]) -> None:
    await steps.admit("s", *on, ticket="t1")
    await steps.admit("s", *on, ticket="t2")
    assert not await steps.store.withdraw(steps.pool, request(), "s", "t1")
    assert set((await steps.books()).sessions) == {"s"}


@pytest.mark.parametrize("gone", ["t1", "t2"])
async def test_the_end_of_one_of_two_waits_leaves_the_other_its_place(steps: Steps, gone: str) -> None:
    await steps.held("s", ticket="t1", waiting=True, present_ms=6_000)
    await steps.held("s", ticket="t2", waiting=True, present_ms=6_000)
    assert not await steps.store.withdraw(steps.pool, request(), "s", gone)
    assert set((await steps.books()).state("held")) == {"s"}


async def test_a_wait_after_one_that_is_over_is_alone(steps: Steps) -> None:
    await steps.held("s", ticket="t1", waiting=True, present_ms=6_000)
    await steps.held("s", ticket="t1", waiting=False)
    await steps.held("s", ticket="t2", waiting=True, present_ms=6_000)
    assert await steps.store.withdraw(steps.pool, request(), "s", "t2")
    assert (await steps.books()).sessions == {}


async def test_a_session_whose_placement_was_replayed_is_not_taken_back(steps: Steps) -> None:
    rid = request()
    await steps.placed("s", rid=rid, ticket="t1")
    await steps.placed("s", rid=rid, ticket="t2")
    for ticket in ("t1", "t2"):
        assert not await steps.store.withdraw(steps.pool, rid, "s", ticket)


async def test_a_session_that_lived_before_the_call_is_not_taken_back(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.snapshot(inc="2")
    lost = await steps.place("s", first.token)
    await steps.held("s", ask=lost.ask, ticket="t1")
    assert not await steps.store.withdraw(steps.pool, request(), "s", "t1")
    await steps.placed("s", I0, ask=lost.ask, inc="2", ticket="t1")
    assert not await steps.store.withdraw(steps.pool, request(), "s", "t1")


async def test_a_failure_keeps_newcomers_away_until_the_engine_is_heard_of(steps: Steps) -> None:
    """An engine that died fails all it has at once, and would look empty: it must not attract those who come next."""
    failed, stays = await steps.placed("failed"), await steps.placed("stays")
    await steps.backend.clock.advance(100)
    await steps.release("failed", failed.token, "FAILED")
    await steps.held("new", I0)
    assert (await steps.books()).sessions["new"]["reason"] == "STALE_SNAPSHOT"
    assert (await steps.place("stays", stays.token)).instance == I0
    await steps.backend.clock.advance(100)
    await steps.snapshot()
    await steps.placed("new", I0)


async def test_other_ends_keep_nobody_away(steps: Steps) -> None:
    for outcome in ("COMPLETED", "ABORTED", "PAUSED"):
        placed = await steps.placed(outcome)
        await steps.backend.clock.advance(100)
        await steps.release(outcome, placed.token, outcome)
        await steps.placed("next" + outcome)


async def test_a_turn_that_ends_clears_an_engine_of_suspicion(steps: Steps) -> None:
    """A rollout that fails by its own fault must not close an engine that others see at work."""
    fails, works = await steps.placed("fails"), await steps.placed("works")
    await steps.release("fails", fails.token, "FAILED")
    await steps.held("new", I0)
    await steps.turn("works", works.token, 0, 320, 0)
    await steps.placed("new", I0)


async def test_suspicion_ends_by_itself(steps: Steps) -> None:
    failed = await steps.placed("s")
    await steps.release("s", failed.token, "FAILED")
    await steps.backend.clock.advance(3_000)
    await steps.placed("new", I0)


async def test_a_snapshot_from_before_the_failure_proves_nothing(steps: Steps) -> None:
    failed = await steps.placed("s")
    await steps.release("s", failed.token, "FAILED")
    await steps.backend.clock.advance(1_000)
    await steps.snapshot(age_ms=2_000)
    await steps.held("new", I0)
    await steps.snapshot(age_ms=500)
    await steps.placed("new", I0)


async def test_a_paused_session_whose_caller_goes_away_is_paused_again(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.release("s", placed.token, "PAUSED")
    rank = (await steps.books()).sessions["s"]["rank"]
    await steps.held("s", ticket="call")
    assert await steps.store.withdraw(steps.pool, request(), "s", "call")
    books = await steps.books()
    assert (books.sessions["s"]["st"], books.sessions["s"]["rank"]) == ("paused", rank)
    await steps.placed("s")
