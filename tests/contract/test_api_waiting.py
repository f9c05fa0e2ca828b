"""Calls that wait for their turn: woken by whoever frees capacity, in order, and gone without a trace."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import ClassConfig
from moorage_server.runtime import admissions
from moorage_server.store import keys
from tests.contract.plane import POOL, Plane, capped, eventually, new_id, refused


@pytest.fixture(autouse=True)
def _only_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by himself: whoever gets in was woken."""
    monkeypatch.setattr(admissions, "_LOOK_S", 60.0)


async def _settled(plane: Plane) -> bool:
    """Whether nobody is in the pool any more."""
    return not (await plane.books()).sessions


async def test_a_release_wakes_who_waits(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    token = await plane.placed("first")
    waiting = await plane.waits("second")
    await plane.release("first", token)
    assert (await asyncio.wait_for(waiting, 5)).decision == pb.DECISION_PLACE


async def test_a_release_through_another_server_wakes_who_waits(planes: Any) -> None:
    here, there = await planes(2, capped(1))
    await here.report()
    token = await here.placed("first")
    waiting = await here.waits("second")
    assert (await there.release("first", token)).released
    assert (await asyncio.wait_for(waiting, 5)).decision == pb.DECISION_PLACE


async def test_an_instance_that_registers_elsewhere_wakes_who_waits(planes: Any) -> None:
    here, there = await planes(2)
    waiting = await here.waits("s")
    await there.report(endpoint="http://new")
    answer = await asyncio.wait_for(waiting, 5)
    assert (answer.decision, answer.placement.endpoint) == (pb.DECISION_PLACE, "http://new")


async def test_an_expired_lease_wakes_who_waits(planes: Any) -> None:
    (plane,) = await planes(config=capped(1, lease_ttl_s=1.0))
    await plane.report()
    await plane.placed("first")
    waiting = await plane.waits("second")
    assert (await asyncio.wait_for(waiting, 10)).decision == pb.DECISION_PLACE


async def test_who_waits_gets_in_in_order_of_first_arrival(planes: Any) -> None:
    here, there = await planes(2, capped(1))
    await here.report()
    token = await here.placed("s")
    order = [await (here if n % 2 else there).waits(f"w{n}") for n in range(4)]
    for n, waiting in enumerate(order):
        await here.release("s" if n == 0 else f"w{n - 1}", token)
        token = (await asyncio.wait_for(waiting, 5)).lease.token
        assert not any(w.done() for w in order[n + 1 :])


async def test_pollers_and_waiters_share_one_queue(planes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "_LATE_MS", 30_000)
    (plane,) = await planes(config=capped(1))
    await plane.report()
    token = await plane.placed("s")
    await plane.held("polls")
    waiting = await plane.waits("waits")
    await plane.release("s", token)
    assert (await plane.admit("polls")).decision == pb.DECISION_PLACE
    assert not waiting.done()


async def test_the_end_of_the_wait_is_a_hold(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    await plane.placed("s")
    hold = await plane.held("t", wait=0.3)
    assert (hold.reason, hold.position) == (pb.HOLD_REASON_POOL_CAP, 1)
    assert set((await plane.books()).state("held")) == {"t"}


async def test_the_wait_ends_before_the_deadline(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    await plane.placed("s")
    assert (await plane.held("t", wait=30, timeout=2)).position == 1


@pytest.mark.parametrize("with_id", [True, False])
async def test_a_cancelled_wait_leaves_nothing(planes: Any, with_id: bool) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    token = await plane.placed("s")
    rid = new_id() if with_id else ""
    call = plane.admit("t", wait=30, request_id=rid)
    await eventually(lambda: plane._is_held("t"))
    call.cancel()
    await eventually(lambda: _gone(plane, "t"))
    books = await plane.books()
    assert (books.counter("held", "a"), books.queues, books.held) == (0, {}, {})
    assert {n for n in books.lifetimes if n.partition(":")[0] in ("s", "r", "done")} == {"s:s"}
    await plane.release("s", token)
    assert (await plane.admit("t", request_id=rid)).decision == pb.DECISION_PLACE


async def _gone(plane: Plane, sid: str) -> bool:
    return sid not in (await plane.books()).sessions


async def test_a_call_cancelled_while_it_is_carried_out_leaves_nothing(planes: Any, backend: Any) -> None:
    """The answer that nobody heard must not be there for the retry either."""
    (plane,) = await planes()
    await plane.report()
    under_way, go_on = asyncio.Event(), asyncio.Event()
    admit = plane.store.admit

    async def slow(*args: Any) -> Any:
        result = await admit(*args)
        under_way.set()
        await go_on.wait()
        return result

    plane.store.admit = slow
    rid = new_id()
    call = plane.admit("s", request_id=rid)
    answer = asyncio.ensure_future(call)
    await under_way.wait()
    assert set((await plane.books()).state("live")) == {"s"}
    call.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    await asyncio.sleep(0.05)
    go_on.set()
    await eventually(lambda: _settled(plane))
    plane.store.admit = admit
    token = (await plane.admit("s", request_id=rid)).lease.token
    assert (await plane.place("s", token)).decision == pb.DECISION_PLACE


async def test_the_retry_of_a_broken_wait_is_not_taken_back_with_it(planes: Any) -> None:
    """The caller's connection breaks; its retry is there before the server notices."""
    here, there = await planes(2, capped(1))
    await here.report()
    token = await here.placed("s")
    rid = new_id()
    first = here.admit("t", wait=30, request_id=rid)
    await eventually(lambda: here._is_held("t"))
    row = (await here.books()).sessions["t"]
    since, ticket = row["since"], row["ticket"]
    second = asyncio.ensure_future(there.admit("t", wait=30, request_id=rid))
    await eventually(lambda: _asked_again(here, ticket))
    first.cancel()
    await asyncio.sleep(0.2)
    assert (await here.books()).sessions["t"]["since"] == since
    await here.release("s", token)
    assert (await asyncio.wait_for(second, 5)).decision == pb.DECISION_PLACE


async def _asked_again(plane: Plane, ticket: str) -> bool:
    return (await plane.books()).sessions["t"]["ticket"] != ticket


async def test_the_newer_of_two_waits_for_one_session_takes_over(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    token = await plane.placed("s")
    older = await plane.waits("t")
    newer = asyncio.ensure_future(plane.admit("t", wait=30))
    assert (await asyncio.wait_for(older, 5)).decision == pb.DECISION_HOLD
    await plane.release("s", token)
    assert (await asyncio.wait_for(newer, 5)).decision == pb.DECISION_PLACE


@pytest.mark.parametrize("same_server", [True, False])
async def test_a_session_that_is_released_while_it_waits_is_told_so(
    planes: Any, monkeypatch: pytest.MonkeyPatch, same_server: bool
) -> None:
    monkeypatch.setattr(admissions, "_KEEP_S", 0.2)
    here, there = await planes(2, capped(1))
    await here.report()
    await here.placed("s")
    waiting = await here.waits("t")
    assert (await (here if same_server else there).release("t", outcome=pb.OUTCOME_ABORTED)).released
    refusal = await asyncio.wait_for(refused(waiting), 5)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    assert set((await here.books()).sessions) == {"s"}


async def test_a_session_that_gets_in_elsewhere_is_told_so(planes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "_KEEP_S", 0.2)
    here, there = await planes(2)
    waiting = await here.waits("t")
    await there.die()
    await there.report()
    token = await there.placed("t")
    assert (await asyncio.wait_for(waiting, 5)).lease.token == token


async def test_a_server_that_ends_says_where_its_waiters_stand(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    await plane.placed("s")
    waiting = await plane.waits("t")
    await plane.control.stop()
    answer = await asyncio.wait_for(waiting, 5)
    assert (answer.decision, answer.hold.position) == (pb.DECISION_HOLD, 1)
    assert (await plane.held("u", wait=30)).position == 2
    assert set((await plane.books()).state("held")) == {"t", "u"}


async def test_a_crowd_gets_in_one_by_one_and_nobody_is_lost(planes: Any) -> None:
    here, there = await planes(2, capped(2))
    await here.report()
    served: list[str] = []
    key = f"{keys.pool_prefix(here.backend.prefix, POOL)}i:0|i"

    async def session(n: int) -> None:
        plane = (here, there)[n % 2]
        answer = await plane.admit(f"s{n}", wait=60)
        assert answer.decision == pb.DECISION_PLACE, answer
        assert int(await cast(Any, here.backend.client.hget(key, "ses"))) <= 2
        await plane.release(f"s{n}", answer.lease.token)
        served.append(f"s{n}")

    async with asyncio.timeout(60):
        await asyncio.gather(*(session(n) for n in range(30)))
    assert len(set(served)) == 30
    assert (await here.books()).counter("adm", "a") == 30


async def test_siblings_get_in_together(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    token = await plane.placed("s")
    first = await plane.waits("g1", group_id="g")
    other = await plane.waits("other")
    second = await plane.waits("g2", group_id="g")
    await plane.release("s", token)
    await plane.release("g1", (await asyncio.wait_for(first, 5)).lease.token)
    await plane.release("g2", (await asyncio.wait_for(second, 5)).lease.token)
    assert (await asyncio.wait_for(other, 5)).decision == pb.DECISION_PLACE


async def test_classes_get_in_by_the_mixture(planes: Any) -> None:
    """Three of four slots go to the class with three quarters of the mixture, whoever arrived first."""
    classes = {"a": ClassConfig(target_share=0.75), "b": ClassConfig(target_share=0.25)}
    (plane,) = await planes(config=capped(1, classes=classes))
    await plane.report()
    last, token = "s", await plane.placed("s", workload_class="a")
    waiting = {}
    for n in range(6):
        waiting[f"b{n}"] = await plane.waits(f"b{n}", workload_class="b")
    for n in range(6):
        waiting[f"a{n}"] = await plane.waits(f"a{n}", workload_class="a")
    order = ""
    for _ in range(8):
        await plane.release(last, token)
        done, _ = await asyncio.wait(waiting.values(), return_when="FIRST_COMPLETED", timeout=5)
        assert len(done) == 1
        last = next(sid for sid, call in waiting.items() if call in done)
        token = waiting.pop(last).result().lease.token
        order += last[0]
    assert order.count("a") == 6, order
    for window in (order[:4], order[4:]):
        assert window.count("b") == 1, order
    for call in waiting.values():
        call.cancel()
    await asyncio.gather(*waiting.values(), return_exceptions=True)
    await plane.release(last, token)
    await eventually(lambda: _settled(plane))
