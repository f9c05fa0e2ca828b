"""Sessions whose home drains, pauses, restarts or falls silent, and the servers that look after them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.runtime import desk, epochs
from moorage_server.store import keys
from moorage_server.store.parse import text
from tests.contract.plane import POOL, Plane, capped, eventually, new_id, refused, seconds


async def test_a_restart_moves_its_sessions_ahead_of_those_that_wait(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    token = await plane.placed("s")
    waiting = await plane.waits("waits")
    await plane.report(incarnation="2", endpoint="http://again")
    await asyncio.sleep(0.3)
    assert not waiting.done(), "the slot belongs to the session that lost its home"
    answer = await plane.place("s", token)
    assert (answer.decision, answer.moved) == (pb.DECISION_PLACE, True)
    assert (answer.placement.incarnation, answer.placement.endpoint) == ("2", "http://again")
    assert answer.lease.token != token
    refusal = await refused(plane.place("s", token))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "LEASE_STALE")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_lost_home_holds_until_there_is_another(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report()
    token = await plane.placed("s")
    await plane.report(state=pb.INSTANCE_STATE_STOPPED)
    answer = await plane.place("s", token)
    assert (answer.decision, answer.hold.reason) == (pb.DECISION_HOLD, pb.HOLD_REASON_NO_INSTANCE)
    assert (await plane.progress("s", token)).known
    waiting = asyncio.ensure_future(plane.place("s", token, wait=30))
    await asyncio.sleep(0.1)
    await plane.report("j")
    answer = await asyncio.wait_for(waiting, 5)
    assert (answer.decision, answer.moved, answer.placement.instance_id) == (pb.DECISION_PLACE, True, "j")


async def test_a_cancelled_move_keeps_the_session(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report()
    token = await plane.placed("s")
    await plane.report(state=pb.INSTANCE_STATE_STOPPED)
    call = plane.place("s", token, wait=30)
    await eventually(lambda: plane._is_held("s"))
    call.cancel()
    await asyncio.sleep(0.2)
    assert (await plane.progress("s", token)).known
    await plane.report("j")
    assert (await plane.place("s", token)).moved


async def test_a_draining_home_hands_over_and_takes_nobody(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report("i")
    token = await plane.placed("s")
    await plane.report("j")
    await plane.report("i", state=pb.INSTANCE_STATE_DRAINING)
    assert (await plane.admit("t")).placement.instance_id == "j"
    answer = await plane.place("s", token)
    assert (answer.moved, answer.placement.instance_id) == (True, "j")


async def test_a_cordoned_home_keeps_its_sessions_and_takes_nobody(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report()
    token = await plane.placed("s")
    await plane.store.mark(POOL, "0|i", "cordon")
    assert (await plane.held("t")).reason == pb.HOLD_REASON_DRAINING
    answer = await plane.place("s", token)
    assert (answer.decision, answer.moved) == (pb.DECISION_PLACE, False)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (pb.INSTANCE_STATE_PAUSED, pb.HOLD_REASON_WEIGHT_UPDATE),
        (pb.INSTANCE_STATE_SLEEPING, pb.HOLD_REASON_DRAINING),
    ],
)
async def test_a_paused_home_holds_until_it_serves_again(
    planes: Any, state: Any, reason: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_HOME_LOOK_S", 0.05)
    (plane,) = await planes()
    await plane.report()
    token = await plane.placed("s")
    await plane.report(state=state)
    answer = await plane.place("s", token, request_id=new_id())
    assert (answer.decision, answer.hold.reason) == (pb.DECISION_HOLD, reason)
    waiting = asyncio.ensure_future(plane.place("s", token, wait=30))
    await asyncio.sleep(0.1)
    await plane.report()
    answer = await asyncio.wait_for(waiting, 5)
    assert (answer.decision, answer.moved, answer.lease.token) == (pb.DECISION_PLACE, False, token)


async def test_silence_makes_an_instance_stale_then_gone(planes: Any) -> None:
    config = capped(2, heartbeat_interval_s=0.1, gone_after_s=1.0)
    (plane,) = await planes(config=config)
    await plane.report()
    token = await plane.placed("s")
    await asyncio.sleep(0.5)
    assert (await plane.place("s", token)).decision == pb.DECISION_PLACE
    await eventually(lambda: plane._is_held("s"))
    answer = await plane.place("s", token)
    assert (answer.decision, answer.hold.reason) == (pb.DECISION_HOLD, pb.HOLD_REASON_NO_INSTANCE)


async def test_a_lease_ends_by_itself(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report()
    token = await plane.placed("s", lease_ttl=seconds(1))
    for _ in range(4):
        await asyncio.sleep(0.4)
        assert (await plane.progress("s", token)).known
    await eventually(lambda: _over(plane, token))
    released = await plane.release("s", token)
    assert not released.released
    assert released.HasField("residency")


async def _over(plane: Plane, token: str) -> bool:
    return not (await plane.books()).sessions


async def test_two_servers_are_one_pool(planes: Any) -> None:
    here, there = await planes(2, capped(4))
    await here.report()
    await asyncio.sleep(0.05)
    answers = await asyncio.gather(*((here, there)[n % 2].admit(f"s{n}") for n in range(20)))
    assert [a.decision for a in answers].count(pb.DECISION_PLACE) == 4
    assert len((await here.books()).state("live")) == 4
    same = await asyncio.gather(*((here, there)[n % 2].admit("s0", wait=0) for n in range(6)))
    assert len({a.lease.token for a in same}) == 1


async def test_epochs_run_once_whatever_the_number_of_servers(planes: Any) -> None:
    here, there = await planes(2, capped(2, epoch_interval_s=0.2))
    await here.report()
    await eventually(lambda: _epochs(here))
    first = await _epochs(here)
    await asyncio.sleep(2.0)
    assert 5 <= await _epochs(there) - first <= 11


async def _epochs(plane: Plane) -> int:
    return int((await plane.books()).pool.get("epochs", 0))


async def test_a_lost_holder_is_replaced_within_two_epochs(planes: Any) -> None:
    """What was learnt is carried over, what happened in between is counted, and nothing is counted twice."""
    interval = 0.5
    here, there = await planes(2, capped(4, epoch_interval_s=interval))
    await here.report()
    holder = await eventually(lambda: _holder(here, there))
    other = there if holder is here else here
    for n in range(3):
        await other.release(f"s{n}", await other.placed(f"s{n}"))
    await eventually(lambda: _completions(other, 3))
    await holder.die()
    lost_at = asyncio.get_running_loop().time()
    before = await _epochs(other)
    await other.release("between", await other.placed("between"))
    await eventually(lambda: _more(other, before))
    assert asyncio.get_running_loop().time() - lost_at < 2 * interval + 0.3
    await eventually(lambda: _completions(other, 4))
    await asyncio.sleep(2.5 * interval)
    assert await _completions(other, 4), "nobody is counted twice"


async def _more(plane: Plane, before: int) -> bool:
    return await _epochs(plane) > before


async def _holder(*planes: Plane) -> Plane | None:
    owner = text(await planes[0].backend.client.get(f"{keys.pool_prefix(planes[0].backend.prefix, POOL)}tick") or b"")
    return next((p for p in planes if p.control._epochs[POOL]._owner == owner), None)


async def _completions(plane: Plane, count: int) -> bool:
    """Whether the controller has counted so many completions (they fade a little)."""
    state = await plane.store.state(POOL)
    found: float = json.loads(state)["exposures"].get("a", {}).get("completions", 0.0) if state else 0.0
    return count - 0.2 < found <= count


async def test_a_server_that_ends_hands_the_epochs_over(planes: Any) -> None:
    here, there = await planes(2, capped(4, epoch_interval_s=5.0))
    await here.report()
    holder = await eventually(lambda: _holder(here, there))
    await holder.control.stop()
    assert await eventually(lambda: _holder(*({here, there} - {holder})), within=4.0)


async def test_nothing_is_served_of_a_pool_that_was_never_named(planes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "_EMPTY_S", 0.3)
    monkeypatch.setattr(epochs, "_EMPTY_LOOK_S", 0.05)
    (plane,) = await planes()
    for n in range(5):
        await refused(plane.place("s", "1.x", pool=f"typo{n}"))
    assert (await plane.held("s", pool="typo")).reason == pb.HOLD_REASON_NO_INSTANCE
    await plane.release("s", pool="typo")

    async def only_the_real_one() -> bool:
        return set(plane.control._desks) == set(plane.control._epochs) == {POOL}

    await eventually(only_the_real_one)
    left = [key async for key in plane.backend.client.scan_iter(match=f"{plane.backend.prefix}*typo*")]
    assert [key.rpartition(b":")[0].rpartition(b":")[2] for key in left] == [b"h"]
