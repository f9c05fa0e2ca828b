"""Admit on the ledger: what gets in, what waits, and what a repeat is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moorage_server.errors import RequestIdReused
from moorage_server.store.records import OnHold, Placed, Refused
from tests.contract.steps import I0, I1, NOON, Steps, request


async def test_a_candidate_that_fits_is_booked(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=161, lease_ttl_ms=20_000, cached=32)
    assert (placed.instance, placed.incarnation, placed.moved, placed.fresh) == (I0, "1", False, True)
    assert (placed.ttl_ms, placed.expires_ms, placed.cached_tokens) == (20_000, NOON + 20_000, 32)
    assert placed.workload_class == "a"
    books = await steps.books()
    assert int(books.instances[I0]["blocks"]) == 11
    assert books.counter("act", "a") == 1


async def test_a_living_session_gets_its_placement_and_its_token_again(steps: Steps) -> None:
    await steps.snapshot(I1)
    first = await steps.placed("s", lease_ttl_ms=20_000)
    await steps.backend.clock.advance(5_000)
    again = await steps.placed("s", I1, workload_class="b", lease_ttl_ms=99_000)
    assert (again.instance, again.token, again.fresh) == (I0, first.token, False)
    assert (again.ttl_ms, again.expires_ms) == (20_000, NOON + 25_000)
    assert again.workload_class == "a"


async def test_two_concurrent_admits_of_one_session_are_one_admission(steps: Steps) -> None:
    answers = await asyncio.gather(*(steps.placed("s") for _ in range(8)))
    assert len({a.token for a in answers}) == 1
    assert [a.fresh for a in answers].count(True) == 1
    assert (await steps.books()).counter("adm", "a") == 1


async def test_without_candidates_it_is_held_with_its_reason(steps: Steps) -> None:
    held = await steps.held("s", reason="KV_BUDGET", detail="no room", retry_ms=700)
    assert (held.reason, held.detail, held.retry_ms) == ("KV_BUDGET", "no room", 700)
    assert (held.position, held.ahead, held.since_ms, held.workload_class) == (1, 0, NOON, "a")
    assert (await steps.books()).counter("held", "a") == 1


async def test_the_first_candidate_that_still_fits_is_taken(steps: Steps) -> None:
    await steps.snapshot(I1)
    await steps.placed("s", I0)
    assert (await steps.placed("t", I0, I1, cap=1)).instance == I1


@pytest.mark.parametrize(
    ("why", "terms"),
    [
        ("POOL_CAP", {"cap": 1}),
        ("KV_BUDGET", {"asks": (5, 5), "limits": (100, 9)}),
        ("NO_INSTANCE", {"inc": "0"}),
    ],
)
async def test_a_guard_that_broke_since_the_decision_holds_the_session(
    steps: Steps, why: str, terms: dict[str, Any]
) -> None:
    await steps.placed("first", asks=(5, 5), limits=(100, 100))
    assert (await steps.held("s", I0, **terms)).reason == why


@pytest.mark.parametrize(
    ("state", "why"),
    [("DRAINING", "DRAINING"), ("PAUSED", "WEIGHT_UPDATE"), ("SLEEPING", "WEIGHT_UPDATE"), ("STOPPED", "NO_INSTANCE")],
)
async def test_an_instance_that_ceased_to_serve_takes_nobody(steps: Steps, state: str, why: str) -> None:
    await steps.snapshot(state=state)
    assert (await steps.held("s", I0)).reason == why


@pytest.mark.parametrize("mark", ["cordon", "drain"])
async def test_a_marked_instance_takes_nobody_until_it_is_opened(steps: Steps, mark: str) -> None:
    assert await steps.store.mark(steps.pool, I0, mark) == (True, 0)
    assert (await steps.held("s", I0)).reason == "DRAINING"
    await steps.store.mark(steps.pool, I0, "open")
    await steps.placed("s")
    assert await steps.store.mark(steps.pool, I1, mark) == (False, 0)


async def test_asks_are_added_up_between_epochs(steps: Steps) -> None:
    for n in range(3):
        await steps.placed(f"s{n}", asks=(2, 3), limits=(6, 9))
    assert (await steps.held("s3", I0, asks=(2, 3), limits=(6, 9))).reason == "KV_BUDGET"
    assert (await steps.books()).instances[I0]["need"] == "6,9"


async def test_observe_commits_whatever_is_booked(steps: Steps) -> None:
    await steps.placed("s", cap=1, observe=True, reason="POOL_CAP")
    await steps.placed("t", cap=1, observe=True, reason="POOL_CAP")
    events = await steps.store.events(steps.pool, "0", 100)
    assert [e.fields["reason"] for e in events if e.fields["kind"] == "admit"] == ["POOL_CAP", "POOL_CAP"]


async def test_a_rejected_session_leaves_the_queue_and_is_forgotten(steps: Steps) -> None:
    await steps.held("s")
    refused = await steps.admit("s", rejected=True, reason="TOO_LARGE", detail="far too large")
    assert refused == Refused("TOO_LARGE", NOON, "far too large", "a")
    books = await steps.books()
    assert books.sessions == {}
    assert books.counter("held", "a") == 0


async def test_a_session_that_lost_its_home_is_never_rejected(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.snapshot(inc="2")
    held = await steps.admit("s", rejected=True, reason="TOO_LARGE")
    assert isinstance(held, OnHold)
    assert (await steps.moved("s", placed.token, I0, inc="2")).moved


async def test_labels_are_counted_once_per_session(steps: Steps) -> None:
    for _ in range(2):
        await steps.held("s", label="UNLABELLED")
        await steps.held("t", label="UNKNOWN")
    books = await steps.books()
    assert (books.pool["unlabelled"], books.pool["unknown"]) == ("1", "1")


async def test_readmission_after_the_end_takes_another_token(steps: Steps) -> None:
    first = await steps.placed("s")
    await steps.release("s", first.token)
    assert (await steps.placed("s")).token != first.token


async def test_a_placement_is_replayed(steps: Steps) -> None:
    rid = request()
    first = await steps.placed("s", rid=rid)
    await steps.release("s", first.token)
    again = await steps.placed("s", rid=rid)
    assert (again.instance, again.token, again.expires_ms) == (first.instance, first.token, first.expires_ms)
    assert (await steps.books()).state("live") == {}


async def test_a_rejection_is_replayed(steps: Steps) -> None:
    rid = request()
    await steps.admit("s", rid=rid, rejected=True, reason="CLASS_REFUSED")
    again = await steps.admit("s", I0, rid=rid)
    assert isinstance(again, Refused)
    assert again.reason == "CLASS_REFUSED"


async def test_a_hold_is_not_replayed_and_its_retry_keeps_its_rank(steps: Steps) -> None:
    rid = request()
    await steps.held("s", rid=rid)
    await steps.held("t")
    assert (await steps.held("s", rid=rid)).position == 1
    assert isinstance(await steps.admit("s", I0, rid=rid), Placed)


@pytest.mark.parametrize("on", [(), (I0,)])
async def test_a_request_id_with_another_body_is_refused(steps: Steps, on: tuple[str, ...]) -> None:
    await steps.admit("s", *on, rid=request("one", "id"))
    with pytest.raises(RequestIdReused):
        await steps.admit("s", I0, rid=request("other", "id"))


async def test_a_request_id_is_the_same_for_every_server(steps: Steps) -> None:
    other = Steps(steps.backend, steps.backend.open())
    rid = request()
    first, again = await steps.placed("s", rid=rid), await other.placed("s", rid=rid)
    assert first.token == again.token


async def test_answers_are_kept_for_ten_minutes(steps: Steps) -> None:
    await steps.placed("s", rid=request(request_id="id"))
    left = (await steps.books()).lifetimes["r:id"]
    assert left is not None
    assert 590_000 < left <= 600_000
