"""The queue on the ledger: order of first arrival, and who may be passed."""

from __future__ import annotations

from moorage_server.core.config import PoolConfig
from moorage_server.store.records import OnHold, Placed, Request
from tests.contract.steps import I0, NOON, Steps


async def test_positions_follow_first_arrival_and_count_other_classes_as_ahead(steps: Steps) -> None:
    for sid, workload_class in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
        await steps.held(sid, workload_class=workload_class)
    stands = [await steps.held(sid) for sid in ("a1", "b1", "a2", "b2")]
    assert [(h.position, h.ahead) for h in stands] == [(1, 0), (1, 1), (2, 2), (2, 3)]


async def test_a_retry_can_not_overtake(steps: Steps) -> None:
    for sid in ("first", "second"):
        await steps.held(sid, present_ms=5_000)
    behind = await steps.held("second", I0)
    assert (behind.reason, behind.position) == ("QUEUED_BEHIND", 2)
    assert isinstance(await steps.admit("newcomer", I0), OnHold)
    await steps.placed("first")
    await steps.placed("second")
    await steps.placed("newcomer")


async def test_a_poller_that_is_late_may_be_passed_and_keeps_its_rank(steps: Steps) -> None:
    await steps.held("late", present_ms=1_000)
    await steps.held("second", present_ms=5_000)
    await steps.backend.clock.advance(1_001)
    await steps.placed("second")
    assert (await steps.held("late")).position == 1


async def test_many_who_left_do_not_bar_the_way(steps: Steps) -> None:
    for n in range(100):
        await steps.held(f"dead{n}", present_ms=0)
    await steps.held("alive", present_ms=5_000)
    queue = (await steps.store.view(steps.pool, PoolConfig())).queues["a"]
    assert ([h.ask.session_id for h in queue.heads], queue.more, queue.length) == (["alive"], False, 101)
    await steps.placed("alive")


async def test_only_the_own_class_is_in_the_way(steps: Steps) -> None:
    await steps.held("a1", workload_class="a", present_ms=5_000)
    await steps.placed("b1", workload_class="b")


async def test_siblings_keep_together(steps: Steps) -> None:
    await steps.held("g1", group="g")
    await steps.held("other")
    late = await steps.held("g2", group="g")
    assert (late.position, late.ahead) == (2, 0)
    assert (await steps.held("other")).position == 3


async def test_a_view_carries_the_heads_that_are_there(steps: Steps) -> None:
    for n in range(12):
        await steps.held(f"s{n:02d}", present_ms=1_000 if n % 2 else 9_000, reason="KV_BUDGET")
    await steps.backend.clock.advance(2_000)
    queue = (await steps.store.view(steps.pool, PoolConfig())).queues["a"]
    assert [h.ask.session_id for h in queue.heads] == [f"s{n:02d}" for n in range(0, 12, 2)]
    assert (queue.length, queue.more) == (12, False)
    assert (queue.heads[0].reason, queue.heads[0].since_ms) == ("KV_BUDGET", NOON)


async def test_a_view_says_when_there_are_more(steps: Steps) -> None:
    for n in range(9):
        await steps.held(f"s{n}", present_ms=9_000)
    queue = (await steps.store.view(steps.pool, PoolConfig())).queues["a"]
    assert (len(queue.heads), queue.more) == (8, True)


async def test_waiting_keeps_the_turn_and_the_place(steps: Steps) -> None:
    await steps.held("waits", present_ms=1_000, patience_ms=30_000)
    for _ in range(4):
        await steps.pass_time(20_000)
        assert await steps.store.keep(steps.pool, ["waits", "nobody"], 15_000, 30_000) == ["held", ""]
        assert await steps.expire() == 0
    assert (await steps.held("newcomer", I0)).reason == "QUEUED_BEHIND"
    await steps.placed("waits")
    assert await steps.store.keep(steps.pool, ["waits"], 15_000, 30_000) == ["live"]


async def test_virtual_time_follows_the_shares(steps: Steps) -> None:
    """Steps of 1/rho: a class with half the share of another is as far after one admission as that after two."""
    for sid, workload_class, step in (("a1", "a", 300), ("b1", "b", 600), ("a2", "a", 300)):
        await steps.placed(sid, workload_class=workload_class, step=step, credit=4 * step)
    books = await steps.books()
    assert (books.counter("vt", "a"), books.counter("vt", "b")) == (600, 600)


async def test_a_class_that_was_idle_catches_up_by_its_credit_at_most(steps: Steps) -> None:
    for n in range(12):
        await steps.placed(f"a{n}", workload_class="a", step=100, credit=400)
    await steps.placed("b", workload_class="b", step=100, credit=400)
    books = await steps.books()
    gvt = int(books.pool["gvt"])
    assert gvt == 1_100
    assert books.counter("vt", "b") == gvt - 400 + 100


async def test_a_class_that_waits_is_owed_all_that_it_missed(steps: Steps) -> None:
    """Its credit bounds what an idle class may catch up, not what a waiting one could not get."""
    await steps.placed("b0", workload_class="b", step=100, credit=400)
    await steps.held("b1", workload_class="b", step=100, credit=400)
    for n in range(12):
        await steps.placed(f"a{n}", step=100, credit=400)
    await steps.placed("b1", workload_class="b", step=100, credit=400)
    assert (await steps.books()).counter("vt", "b") == 200


async def test_a_class_that_begins_to_wait_brings_its_credit_at_most(steps: Steps) -> None:
    for n in range(12):
        await steps.placed(f"a{n}", step=100, credit=400)
    await steps.held("b", workload_class="b", step=100, credit=400)
    assert (await steps.books()).counter("vt", "b") == 1_100 - 400


async def test_a_move_takes_no_turn(steps: Steps) -> None:
    first = await steps.placed("s", step=100, credit=400)
    await steps.snapshot(inc="2")
    await steps.moved("s", first.token, I0, inc="2", step=100, credit=400)
    books = await steps.books()
    assert (books.counter("vt", "a"), books.counter("adm", "a")) == (100, 1)


async def test_held_demand_balances(steps: Steps) -> None:
    """Held once however often it asks; admitted, cancelled and expired ones leave, and nobody else does."""
    for _ in range(3):
        for n in range(6):
            await steps.held(f"s{n}", patience_ms=30_000, ticket=f"t{n}")
    assert (await steps.books()).counter("held", "a") == 6
    assert isinstance(await steps.admit("s0", I0), Placed)
    await steps.release("s1", outcome="ABORTED")
    await steps.store.withdraw(steps.pool, Request(), "s2", "t2")
    await steps.pass_time(20_000)
    await steps.held("s3", patience_ms=30_000)
    await steps.pass_time(15_000)
    assert await steps.expire() == 2
    books = await steps.books()
    assert set(books.state("held")) == {"s3"}
    assert (books.counter("held", "a"), books.counter("adm", "a")) == (1, 1)
