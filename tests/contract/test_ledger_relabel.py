"""A session that turns out to be of another class takes all its counters along, and nothing else."""

from __future__ import annotations

import pytest

from moorage_server.core.config import PoolConfig
from moorage_server.core.labels import Inferred
from moorage_server.errors import LeaseStale
from moorage_server.store.records import Relabel
from tests.contract.steps import I0, I1, NOON, Steps


def to(sid: str, name: str = "b", was: str = "a", **changes: object) -> Relabel:
    """Behaviour says ``name``, and the class is to change."""
    values = {"contradicted": True, "step_was": 10, "step_to": 20, "credit": 80, **changes}
    return Relabel(sid, was, name, Inferred(name, 0.97, 0.99), **values)  # type: ignore[arg-type]


def noted(sid: str, name: str = "b", was: str = "a", *, contradicted: bool = True) -> Relabel:
    """Behaviour says ``name``, and nothing is made of it."""
    return Relabel(sid, was, "", Inferred(name, 0.9, 0.96), contradicted)


async def relabel(steps: Steps, *items: Relabel, over: int = 0) -> list[bool]:
    """As the holder of the epoch."""
    await steps.tick()
    changed = await steps.store.relabel(steps.pool, "me", items, over)
    assert changed is not None
    return changed


async def test_a_living_session_takes_its_counters_along(steps: Steps) -> None:
    stays = await steps.placed("stays", step=10)
    moves = await steps.placed("moves", step=10)
    await steps.backend.clock.advance(2_000)
    await steps.progress("moves", moves.token, phase="TOOL_WAIT", context_tokens=320)
    await steps.backend.clock.advance(500)
    await steps.place("moves", moves.token)
    await steps.backend.clock.advance(500)
    assert await relabel(steps, to("moves")) == [True]
    books = await steps.books()
    row = books.sessions["moves"]
    assert (row["class"], row["declared"], row["inf"], row["conf"], row["byinf"]) == ("b", "", "b", "0.970", "1")
    # 10 blocks for 2 s, 20 blocks for 1 s; then all of it is the other class's.
    assert (books.counter("z", "a"), books.counter("z", "b")) == (30_000, 40_000)
    assert (books.counter("d", "a"), books.counter("d", "b")) == (3_000, 3_000)
    assert (books.counter("gap", "a"), books.counter("gap", "b")) == (0, 500)
    assert (books.counter("gapn", "a"), books.counter("gapn", "b")) == (0, 1)
    assert (books.counter("blk", "a"), books.counter("blk", "b")) == (10, 20)
    assert (books.counter("adm", "a"), books.counter("adm", "b")) == (1, 1)
    assert (books.counter("rl", "a"), books.counter("rl", "b")) == (1, 1)
    assert (books.instances[I0]["c:a"], books.instances[I0]["c:b"]) == ("1", "1")
    assert (books.pool["inferred"], books.pool["mislabelled"]) == ("1", "1")
    await steps.backend.clock.advance(1_000)
    await steps.release("moves", moves.token, context=320)
    await steps.release("stays", stays.token)
    books = await steps.books()
    assert (books.counter("done", "a"), books.counter("done", "b")) == (1, 1)
    assert (books.counter("rel", "a"), books.counter("rel", "b")) == (1, 1)
    assert (books.counter("z", "a"), books.counter("z", "b")) == (40_000, 60_000)


async def test_the_turn_it_took_was_the_other_class_s(steps: Steps) -> None:
    await steps.placed("s", step=10)
    await steps.placed("t", step=10)
    await relabel(steps, to("s", step_was=10, step_to=40))
    books = await steps.books()
    assert (books.counter("vt", "a"), books.counter("vt", "b")) == (10, 40)


async def test_a_held_session_changes_queues_and_keeps_its_rank_and_its_place(steps: Steps) -> None:
    await steps.held("first", workload_class="b", patience_ms=30_000)
    await steps.held("moves", patience_ms=30_000)
    await steps.held("last", workload_class="b", patience_ms=30_000)
    before = await steps.books()
    assert await relabel(steps, to("moves")) == [True]
    books = await steps.books()
    assert list(books.queues["b"]) == ["first", "moves", "last"]
    assert books.held["moves"] == before.held["moves"]
    assert "a" not in books.queue_names
    assert (books.counter("adm", "a"), books.counter("adm", "b")) == (0, 0)
    assert (await steps.placed("first", workload_class="b")).workload_class == "b"
    # Whatever it says of itself at its next try, it stays what it was found to be.
    assert (await steps.placed("moves", workload_class="a")).workload_class == "b"
    assert (await steps.books()).counter("adm", "b") == 2


async def test_a_class_that_nobody_waited_in_is_owed_its_credit_at_most(steps: Steps) -> None:
    for n in range(10):
        await steps.placed(f"s{n}", step=1_000)
    await steps.held("moves")
    await relabel(steps, to("moves", credit=80))
    assert (await steps.books()).counter("vt", "b") == 9_000 - 80


async def test_a_homeless_session_takes_its_past_along(steps: Steps) -> None:
    placed = await steps.placed("s", step=10)
    await steps.backend.clock.advance(1_000)
    await steps.snapshot(inc="2")
    await steps.backend.clock.advance(5_000)
    assert await relabel(steps, to("s")) == [True]
    books = await steps.books()
    assert (books.counter("d", "a"), books.counter("d", "b")) == (0, 1_000)
    assert (books.counter("z", "a"), books.counter("z", "b")) == (0, 10_000)
    assert (books.counter("adm", "a"), books.counter("adm", "b")) == (0, 1)
    assert list(books.queues["b"]) == ["s"]
    moved = await steps.moved("s", placed.token, inc="2")
    assert (moved.workload_class, moved.moved) == ("b", True)
    await steps.backend.clock.advance(1_000)
    await relabel(steps, to("s", "a", was="b"))
    books = await steps.books()
    assert (books.counter("d", "a"), books.counter("d", "b")) == (2_000, 0)


async def test_a_shared_prefix_stays_with_its_class_while_others_hold_it(steps: Steps) -> None:
    first = await steps.placed("first", group="g", shared=5)
    await steps.placed("second", group="g", shared=5)
    await relabel(steps, to("first"))
    books = await steps.books()
    assert books.groups[I0]["k:g"] == "a"
    assert (books.counter("blk", "a"), books.counter("blk", "b")) == (10, 5)
    await steps.release("first", first.token)
    await relabel(steps, to("second"))
    books = await steps.books()
    assert books.groups[I0]["k:g"] == "b"
    assert (books.counter("blk", "a"), books.counter("blk", "b")) == (0, 10)


async def test_what_behaviour_says_is_noted_and_counted_once(steps: Steps) -> None:
    placed = await steps.placed("s")
    for _ in range(3):
        assert await relabel(steps, noted("s")) == [False]
    await relabel(steps, noted("s", contradicted=False), over=2)
    books = await steps.books()
    assert books.pool["mislabelled"] == "3"
    assert "inferred" not in books.pool
    assert (books.sessions["s"]["class"], books.sessions["s"]["inf"]) == ("a", "b")
    assert books.counter("act", "a") == 1
    await steps.release("s", placed.token)
    changes = await steps.store.changes(steps.pool, "me", 0, 10)
    assert changes is not None
    (row,) = changes.rows
    assert row.ended is not None
    assert (row.ended["mis"], row.ended["class"]) == ("1", "a")


async def test_who_is_over_or_was_changed_by_others_is_left_alone(steps: Steps) -> None:
    placed = await steps.placed("over")
    paused = await steps.placed("paused")
    await steps.placed("other", workload_class="c")
    await steps.release("over", placed.token)
    await steps.release("paused", paused.token, "PAUSED")
    items = [to("over"), to("paused"), to("other"), to("never"), to("other", "c", was="c")]
    assert await relabel(steps, *items) == [False] * 5
    books = await steps.books()
    assert books.sessions["other"]["class"] == "c"
    assert set(books.sessions) == {"other", "paused"}


async def test_only_the_holder_of_the_epoch_relabels(steps: Steps) -> None:
    await steps.placed("s")
    await steps.tick("me")
    assert await steps.store.relabel(steps.pool, "you", [to("s")], 1) is None
    books = await steps.books()
    assert books.sessions["s"]["class"] == "a"
    assert "mislabelled" not in books.pool


async def test_a_relabelled_session_is_told_to_people_and_to_its_caller(steps: Steps) -> None:
    placed = await steps.placed("s", I0)
    await relabel(steps, to("s"))
    assert (await steps.place("s", placed.token)).workload_class == "b"
    (event,) = [e.fields for e in await steps.store.events(steps.pool, "0", 100) if e.fields["kind"] == "relabel"]
    told = {name: event[name] for name in ("sid", "inst", "reason", "from", "to", "confidence")}
    assert told == {"sid": "s", "inst": I0, "reason": "behaviour", "from": "a", "to": "b", "confidence": "0.970"}
    assert ("relabel", "behaviour") in [(kind, why) for _, kind, why, _ in await steps.store.history(steps.pool, "s")]
    (row,) = (await steps.store.changes(steps.pool, "me", 0, 10)).rows  # type: ignore[union-attr]
    assert row.now is not None
    assert (row.now["class"], row.now["moves"]) == ("b", "1")
    with pytest.raises(LeaseStale):
        await steps.place("s", "1.other")


async def test_a_paused_session_begins_its_past_anew(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.backend.clock.advance(3_000)
    await steps.release("s", placed.token, "PAUSED")
    await steps.backend.clock.advance(3_000)
    await steps.placed("s")
    await steps.backend.clock.advance(1_000)
    await relabel(steps, to("s"))
    books = await steps.books()
    assert (books.counter("d", "a"), books.counter("d", "b")) == (3_000, 1_000)
    assert (books.counter("z", "a"), books.counter("z", "b")) == (30_000, 10_000)


async def test_an_arrival_may_be_under_an_inferred_class(steps: Steps) -> None:
    found = {"inferred": Inferred("b", 0.97, 0.99), "by_inference": True, "contradicted": True}
    for _ in range(2):
        held = await steps.held("s", workload_class="b", declared_class="a", **found)
        assert held.workload_class == "b"
    await steps.held("none", workload_class="b", label="UNLABELLED", inferred=Inferred("b", 0.85), by_inference=True)
    books = await steps.books()
    assert (books.pool["inferred"], books.pool["mislabelled"], books.pool["unlabelled"]) == ("2", "1", "1")
    row = books.sessions["s"]
    assert (row["class"], row["declared"], row["inf"], row["mis"]) == ("b", "a", "b", "1")
    events = [e.fields for e in await steps.store.events(steps.pool, "0", 100) if e.fields["kind"] == "relabel"]
    assert [(e["sid"], e["from"], e["to"], e["reason"]) for e in events] == [
        ("s", "a", "b", "hints"),
        ("none", "", "b", "hints"),
    ]


async def test_what_was_found_while_it_waited_survives_its_admission(steps: Steps) -> None:
    await steps.held("s")
    await relabel(steps, noted("s"))
    await steps.placed("s")
    row = (await steps.books()).sessions["s"]
    assert (row["inf"], row["mis"]) == ("b", "1")


async def test_made_up_classes_share_one_once_there_are_too_many(steps: Steps) -> None:
    for n in range(5):
        await steps.held(f"s{n}", workload_class=f"made-up {n}", declared_class=f"made-up {n}", room=3)
    again = await steps.held("again", workload_class="made-up 1", room=3)
    known = await steps.held("known", workload_class="configured", room=None)
    assert (again.workload_class, known.workload_class) == ("made-up 1", "configured")
    books = await steps.books()
    assert set(books.queues) == {"made-up 0", "made-up 1", "made-up 2", "unlabelled", "configured"}
    assert set(books.queues["unlabelled"]) == {"s3", "s4"}
    assert books.pool["unknown"] == "2"
    events = [e.fields for e in await steps.store.events(steps.pool, "0", 100) if e.fields["kind"] == "label"]
    assert [(e["sid"], e["declared"], e["class"]) for e in events] == [
        ("s3", "made-up 3", "unlabelled"),
        ("s4", "made-up 4", "unlabelled"),
    ]
    elsewhere = await steps.held("elsewhere", workload_class="made-up 9", room=3, fallback="configured")
    assert elsewhere.workload_class == "configured"


async def test_relabelling_goes_on_after_an_outage_of_the_clock(steps: Steps) -> None:
    """A clock that jumps gives a session more time than its class, and takes no counter below zero."""
    await steps.snapshot(I1)
    placed = await steps.placed("s")
    await steps.backend.clock.set(NOON - 60_000)
    await steps.progress("s", placed.token, context_tokens=160)
    await steps.backend.clock.set(NOON + 1_000)
    await relabel(steps, to("s"))
    view = await steps.store.view(steps.pool, PoolConfig())
    assert (view.classes["a"].relabelled, view.inferred, view.mislabelled) == (1, 1, 1)
    assert view.classes["a"].block_ms >= 0
