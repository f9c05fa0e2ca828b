"""Place on the ledger: a living home is the answer; a lost one makes the session homeless, ahead of new ones."""

from __future__ import annotations

import pytest

from moorage_server.core.config import PoolConfig
from moorage_server.errors import LeaseStale, PoolUnknown, RequestIdReused, SessionUnknown, WrongState
from moorage_server.store.records import Homeless, HomeWaits, Placed, Request
from tests.contract.steps import I0, I1, NOON, Steps, request


async def test_a_living_home_is_the_answer_and_the_lease_is_renewed(steps: Steps) -> None:
    first = await steps.placed("s", lease_ttl_ms=20_000)
    await steps.backend.clock.advance(5_000)
    turn = await steps.place("s", first.token)
    assert isinstance(turn, Placed)
    assert (turn.instance, turn.token, turn.moved) == (I0, first.token, False)
    assert (turn.ttl_ms, turn.expires_ms) == (20_000, NOON + 25_000)


async def test_a_cordoned_home_keeps_its_sessions(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.store.mark(steps.pool, I0, "cordon")
    assert isinstance(await steps.place("s", first.token), Placed)


async def test_a_stale_home_keeps_its_sessions(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.pass_time(29_999)
    assert isinstance(await steps.place("s", first.token), Placed)


async def test_an_unknown_session_creates_nothing(steps: Steps) -> None:
    with pytest.raises(SessionUnknown):
        await steps.place("nobody", "1.x")
    assert (await steps.books()).sessions == {}


async def test_an_unknown_pool_creates_nothing(bare: Steps) -> None:
    with pytest.raises(PoolUnknown):
        await bare.place("s", "1.x", rid=request())
    assert [key async for key in bare.backend.client.scan_iter(match=f"{bare.backend.prefix}*")] == []


async def test_a_released_session_is_unknown(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.release("s", first.token)
    with pytest.raises(SessionUnknown):
        await steps.place("s", first.token)


async def test_a_held_session_has_no_home_yet(steps: Steps) -> None:
    await steps.held("s")
    with pytest.raises(WrongState):
        await steps.place("s", "1.x")


async def test_a_token_never_issued_is_stale(steps: Steps) -> None:
    await steps.placed("s")
    with pytest.raises(LeaseStale):
        await steps.place("s", "1.x")


async def test_an_older_token_is_stale(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.release("s", first.token)
    second = await steps.placed("s")
    with pytest.raises(LeaseStale):
        await steps.place("s", first.token)
    assert isinstance(await steps.place("s", second.token), Placed)


async def test_a_placement_is_replayed_and_an_error_that_is_final_too(steps: Steps) -> None:
    token = (await steps.placed("s")).token
    rid = request()
    first = await steps.place("s", token, rid=rid)
    await steps.release("s", token)
    assert await steps.place("s", token, rid=rid) == first
    stale, unknown = request(), request()
    with pytest.raises(SessionUnknown):
        await steps.place("s", token, rid=unknown)
    again = await steps.placed("s")
    with pytest.raises(LeaseStale):
        await steps.place("s", token, rid=stale)
    await steps.release("s", again.token)
    with pytest.raises(LeaseStale):
        await steps.place("s", token, rid=stale)
    await steps.placed("s")
    with pytest.raises(SessionUnknown):
        await steps.place("s", token, rid=unknown)


async def test_a_request_id_with_another_body_is_refused(steps: Steps) -> None:
    token = (await steps.placed("s")).token
    await steps.place("s", token, rid=request("one", "id"))
    with pytest.raises(RequestIdReused):
        await steps.place("s", token, rid=request("other", "id"))


async def test_a_new_incarnation_makes_its_sessions_homeless(steps: Steps) -> None:
    first = await steps.placed("s", tokens=1_600)
    assert await steps.snapshot(inc="2") == "NEW"
    books = await steps.books()
    assert books.sessions["s"]["homeless"] == "1"
    assert (books.counter("act", "a"), books.counter("held", "a")) == (0, 1)
    assert int(books.instances[I0]["blocks"]) == 0
    lost = await steps.place("s", first.token)
    assert isinstance(lost, Homeless)
    assert lost.ask.homeless
    assert lost.ask.prompt_tokens == 1_600


async def test_a_moved_session_takes_another_token_and_keeps_what_it_is(steps: Steps) -> None:
    first = await steps.placed("s", group="g", shared=3, tokens=160, declared_class="A", group_size=4)
    await steps.snapshot(inc="2")
    moved = await steps.moved("s", first.token, I0, inc="2", shared=3)
    assert (moved.moved, moved.incarnation) == (True, "2")
    assert moved.token != first.token
    with pytest.raises(LeaseStale):
        await steps.place("s", first.token)
    row = (await steps.books()).sessions["s"]
    assert (row["declared"], row["group"], row["gsize"], row["admitted"]) == ("A", "g", "4", str(NOON))


async def test_a_move_is_replayed_to_the_caller_with_the_old_token(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.snapshot(inc="2")
    rid = request()
    lost = await steps.place("s", first.token, rid=rid)
    moved = await steps.placed("s", I0, ask=lost.ask, inc="2", rid=rid)
    again = await steps.place("s", first.token, rid=rid)
    assert (again.token, again.moved) == (moved.token, True)


async def test_a_homeless_session_goes_ahead_of_those_that_wait(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.held("waits")
    await steps.snapshot(inc="2")
    lost = await steps.place("s", first.token)
    held = await steps.held("s", ask=lost.ask)
    assert (held.position, held.ahead) == (1, 0)
    waits = await steps.held("waits", I0, inc="2")
    assert (waits.reason, waits.position) == ("QUEUED_BEHIND", 2)
    assert (await steps.placed("s", I0, inc="2", ask=lost.ask)).moved


async def test_a_view_shows_the_homeless_first_even_before_they_ask(steps: Steps) -> None:
    for n in range(3):
        await steps.placed(f"s{n}")
    await steps.held("waits")
    await steps.snapshot(inc="2")
    queue = (await steps.store.view(steps.pool, PoolConfig())).queues["a"]
    assert [h.ask.session_id for h in queue.heads] == ["s0", "s1", "s2", "waits"]
    assert [h.ask.homeless for h in queue.heads] == [True, True, True, False]


async def test_a_homeless_session_that_is_away_does_not_bar_the_way(steps: Steps) -> None:
    await steps.placed("away")
    await steps.snapshot(inc="2")
    await steps.placed("new", I0, inc="2")


async def test_a_homeless_session_stays_leased(steps: Steps) -> None:
    first = await steps.placed("s", lease_ttl_ms=20_000)
    await steps.snapshot(inc="2")
    await steps.pass_time(15_000)
    assert (await steps.progress("s", first.token)).status == "OK"
    await steps.pass_time(15_000)
    lost = await steps.place("s", first.token)
    await steps.pass_time(15_000)
    assert await steps.expire() == 0
    await steps.held("s", ask=lost.ask)
    await steps.pass_time(15_000)
    assert await steps.expire() == 0
    await steps.pass_time(6_000)
    assert await steps.expire() == 1
    with pytest.raises(SessionUnknown):
        await steps.place("s", first.token)


async def test_waiting_keeps_the_lease_of_a_homeless_session(steps: Steps) -> None:
    first = await steps.placed("s", lease_ttl_ms=20_000)
    await steps.snapshot(inc="2")
    await steps.pass_time(15_000)
    assert await steps.store.keep(steps.pool, ["s"], 15_000, 30_000) == ["held"]
    await steps.pass_time(15_000)
    assert await steps.expire() == 0
    assert (await steps.release("s", first.token)).over is False


@pytest.mark.parametrize("how", ["asked", "said"])
async def test_a_draining_home_moves_its_sessions_at_their_next_place(steps: Steps, how: str) -> None:
    await steps.snapshot(I1)
    first = await steps.placed("s")
    if how == "asked":
        assert await steps.store.mark(steps.pool, I0, "drain") == (True, 1)
    else:
        await steps.snapshot(state="DRAINING")
    assert (await steps.books()).counter("act", "a") == 1
    moved = await steps.moved("s", first.token, I1)
    assert (moved.instance, moved.moved) == (I1, True)


@pytest.mark.parametrize("state", ["PAUSED", "SLEEPING"])
async def test_a_home_that_is_paused_holds_its_sessions_and_keeps_them(steps: Steps, state: str) -> None:
    first = await steps.placed("s", lease_ttl_ms=20_000)
    await steps.snapshot(state=state)
    await steps.backend.clock.advance(5_000)
    rid = request()
    assert await steps.place("s", first.token, rid=rid) == HomeWaits(state, "a")
    assert (await steps.books()).leases["s"] == NOON + 25_000
    await steps.snapshot(state="SERVING")
    turn = await steps.place("s", first.token, rid=rid)
    assert (turn.instance, turn.token, turn.moved) == (I0, first.token, False)


async def test_a_stopped_home_is_lost_at_once(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.snapshot(state="STOPPED")
    assert isinstance(await steps.place("s", first.token), Homeless)


async def test_a_silent_home_is_lost_after_half_a_minute(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.pass_time(30_000)
    assert isinstance(await steps.place("s", first.token), Homeless)


async def test_silence_proves_nothing_while_nobody_kept_the_epoch(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.tick()
    await steps.backend.clock.advance(60_000)
    assert isinstance(await steps.place("s", first.token), Placed)
    assert await steps.gone() == "ALIVE"


async def test_what_a_turn_finds_cached_is_what_the_last_one_left(steps: Steps) -> None:
    first = await steps.placed("s")
    assert (await steps.place("s", first.token)).cached_tokens is None
    await steps.progress("s", first.token, turn=0, context_tokens=320, cached_tokens=0)
    assert (await steps.place("s", first.token)).cached_tokens == 320


async def test_the_prompt_of_a_turn_grows_the_booking(steps: Steps) -> None:
    first = await steps.placed("s", tokens=160)
    await steps.store.place(steps.pool, Request(), "s", first.token, 3, 320, 30_000)
    row = (await steps.books()).sessions["s"]
    assert (row["blocks"], row["turn"]) == ("20", "3")
    await steps.place("s", first.token, prompt=100)
    assert (await steps.books()).sessions["s"]["blocks"] == "20"
