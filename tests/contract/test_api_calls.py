"""The four calls over gRPC: answers and errors as the contract has them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import ClassConfig
from tests.contract.plane import POOL, capped, eventually, new_id, refused, seconds

DOMAIN = "moorage.v1"


async def test_a_placement_and_its_lease(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report("i", dp_rank=3, endpoint="http://e:1")
    answer = await plane.admit("s", lease_ttl=seconds(20))
    assert answer.decision == pb.DECISION_PLACE
    placement = answer.placement
    assert (placement.instance_id, placement.dp_rank, placement.incarnation) == ("i", 3, "1")
    assert placement.endpoint == "http://e:1"
    assert not placement.HasField("policy_version")
    assert answer.lease.token
    assert answer.lease.ttl.seconds == 20
    assert answer.lease.expire_time.seconds > 0
    assert answer.workload_class == "a"
    assert not answer.HasField("hold")


async def test_a_hold_says_why_where_and_when_to_ask_again(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    await plane.placed("first")
    await plane.held("second")
    hold = await plane.held("third")
    assert hold.reason in (pb.HOLD_REASON_QUEUED_BEHIND, pb.HOLD_REASON_POOL_CAP)
    assert (hold.position, hold.ahead) == (2, 1)
    assert 0.2 < hold.retry_after.seconds + hold.retry_after.nanos / 1e9 < 5.5
    assert hold.held_since.seconds > 0
    assert hold.detail


async def test_capacity_that_came_free_is_seen_at_once(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    for n in range(10):
        await plane.release(f"s{n}", await plane.placed(f"s{n}"))


async def test_the_class_in_force_is_answered(planes: Any) -> None:
    classes = {"a": ClassConfig(aliases=("A",)), "rest": ClassConfig()}
    (plane,) = await planes(config=capped(4, classes=classes, default_class="rest"))
    await plane.report()
    for sid, declared, in_force in (("s", "a", "a"), ("t", "A", "a"), ("u", "", "rest"), ("v", "typo", "rest")):
        assert (await plane.admit(sid, workload_class=declared)).workload_class == in_force
    assert (await plane.admit("s", workload_class="rest")).workload_class == "a", "it lives as what it was admitted as"
    books = await plane.books()
    assert (books.pool["unlabelled"], books.pool["unknown"]) == ("1", "1")


async def test_a_rejection_is_final_and_says_why(planes: Any) -> None:
    (plane,) = await planes(config=capped(2, classes={"no": ClassConfig(refused=True)}))
    await plane.report()
    for fields, reason in (
        ({"prompt_tokens": 2**40}, pb.HOLD_REASON_TOO_LARGE),
        ({"workload_class": "no"}, pb.HOLD_REASON_CLASS_REFUSED),
    ):
        answer = await plane.admit("s", **fields)
        assert (answer.decision, answer.hold.reason) == (pb.DECISION_REJECT, reason)
    assert (await plane.books()).sessions == {}


async def test_an_unknown_pool(planes: Any) -> None:
    (plane,) = await planes()
    assert (await plane.held("s", pool="new")).reason == pb.HOLD_REASON_NO_INSTANCE
    for call in (plane.place("t", "1.x", pool="other"), plane.release("t", "1.x", pool="other")):
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "POOL_UNKNOWN")
    await plane.report(pool="new")
    answer = await eventually(lambda: _placed(plane, "s"))
    assert answer.placement.endpoint == "http://i"
    assert sorted(await plane.store.pools()) == ["new", POOL]


async def _placed(plane: Any, sid: str) -> Any:
    answer = await plane.admit(sid, pool="new")
    return answer if answer.decision == pb.DECISION_PLACE else None


async def test_errors_carry_a_stable_reason(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report()
    token = await plane.placed("s")
    rid = new_id()
    await plane.placed("t", request_id=rid)
    expected = [
        (plane.place("nobody", "1.x"), grpc.StatusCode.NOT_FOUND, "SESSION_UNKNOWN"),
        (plane.place("s", "1.x"), grpc.StatusCode.ABORTED, "LEASE_STALE"),
        (plane.place("s", ""), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (plane.release("s", "1.x"), grpc.StatusCode.ABORTED, "LEASE_STALE"),
        (plane.release("s", ""), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (plane.release("s", token, pb.OUTCOME_UNSPECIFIED), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (plane.admit("u", request_id=rid), grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED"),
        (plane.place("t", "1.x", request_id=rid), grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED"),
    ]
    for call, code, reason in expected:
        refusal = await refused(call)
        assert (refusal.code, refusal.reason, refusal.info.domain) == (code, reason, DOMAIN)


async def test_no_error_repeats_a_token(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report()
    await plane.placed("s")
    for call in (plane.place("s", "secret-token"), plane.release("s", "secret-token")):
        refusal = await refused(call)
        assert "secret-token" not in repr(refusal.trailers)


async def test_no_read_shows_a_token(planes: Any) -> None:
    (plane,) = await planes(config=capped(1))
    await plane.report()
    token = await plane.placed("s")
    await plane.held("t")
    shown = [
        await plane.inspector.ListSessions(ipb.ListSessionsRequest(pool=POOL)),
        await plane.inspector.GetSession(ipb.GetSessionRequest(pool=POOL, session_id="s")),
        await plane.inspector.ListInstances(ipb.ListInstancesRequest(pool=POOL)),
        await plane.inspector.GetPool(ipb.GetPoolRequest(pool=POOL)),
    ]
    assert [s.session_id for s in shown[0].sessions] == ["s", "t"]
    assert shown[1].session.lease.ttl.seconds == 60
    assert token.partition(".")[2] not in repr(shown)


@pytest.mark.parametrize("name", ["{x}:y z", "line\nbreak", "zero\0byte", "Größe 🛶", "*?[a]\\%7B", "é" * 128])
async def test_any_character_is_legal_in_a_name(planes: Any, name: str) -> None:
    (plane,) = await planes()
    await plane.report(name, pool=name, incarnation=name)
    fields = {"pool": name, "workload_class": name, "group_id": name}
    answer = await plane.admit(name, request_id=new_id(), **fields)
    assert (answer.placement.instance_id, answer.placement.incarnation, answer.workload_class) == (name, name, name)
    token = answer.lease.token
    assert (await plane.place(name, token, pool=name)).decision == pb.DECISION_PLACE
    seen = await plane.inspector.GetSession(ipb.GetSessionRequest(pool=name, session_id=name))
    assert (seen.session.session_id, seen.session.workload_class, seen.session.group_id) == (name, name, name)
    waiting = asyncio.ensure_future(plane.admit(f"{name[:-1]}2", wait=30, prompt_tokens=16 * 9_000, **fields))
    third = asyncio.ensure_future(plane.admit(f"{name[:-1]}3", wait=30, **fields))
    await asyncio.sleep(0.05)
    assert (await plane.release(name, token, pool=name)).released
    for call in (waiting, third):
        assert (await asyncio.wait_for(call, 5)).decision == pb.DECISION_PLACE


async def test_an_answer_is_replayed_by_every_server(planes: Any) -> None:
    one, two = await planes(2)
    await one.report()
    rid = new_id()
    first = await one.admit("s", request_id=rid)
    again = await two.admit("s", request_id=rid, wait=1)
    assert (again.lease, again.placement) == (first.lease, first.placement)
    turn = new_id()
    first = await one.place("s", again.lease.token, request_id=turn)
    assert (await two.place("s", again.lease.token, request_id=turn)).lease == first.lease
    end = new_id()
    first = await one.release("s", again.lease.token, request_id=end)
    assert first.released
    assert await two.release("s", again.lease.token, request_id=end) == first


async def test_a_release_says_what_the_session_cost(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report()
    token = await plane.placed("s", prompt_tokens=160)
    released = await plane.release("s", token, usage=pb.Usage(context_tokens=320))
    assert released.released
    assert released.residency.peak_blocks == 20
    duration = released.residency.duration.seconds + released.residency.duration.nanos / 1e9
    assert released.residency.block_seconds == pytest.approx(10 * duration)
    over = await plane.release("s", token)
    assert (over.released, over.residency) == (False, released.residency)
    unknown = await plane.release("nobody", "1.x")
    assert not unknown.released
    assert not unknown.HasField("residency")


async def test_one_bad_item_never_spoils_the_others(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report()
    token = await plane.placed("s")
    instances = [
        pb.InstanceSnapshot(instance_id="", sequence=1),
        pb.InstanceSnapshot(instance_id="j", sequence=1, block_size=0),
        pb.InstanceSnapshot(instance_id="k", sequence=1, incarnation="x"),
        pb.InstanceSnapshot(instance_id="i", sequence=1, incarnation="1"),
    ]
    sessions = [
        pb.SessionProgress(session_id="", lease_token=token),
        pb.SessionProgress(session_id="s", lease_token="1.x", phase=pb.PHASE_RUNNING),
        pb.SessionProgress(session_id="nobody", lease_token=token, phase=pb.PHASE_RUNNING),
        pb.SessionProgress(session_id="s", lease_token=token, phase=pb.PHASE_TOOL_WAIT, context_tokens=2**41),
        pb.SessionProgress(session_id="s", lease_token=token, phase=pb.PHASE_RUNNING, context_tokens=320),
    ]
    answer = await plane.stub.Heartbeat(pb.HeartbeatRequest(pool=POOL, instances=instances, sessions=sessions))
    assert [a.accepted for a in answer.instances] == [False, False, True, False]
    assert [bool(a.reason) for a in answer.instances] == [True, True, False, True]
    assert [a.known for a in answer.sessions] == [False, False, False, False, True]
    assert [a.reason for a in answer.sessions][1:3] == ["LEASE_STALE", "SESSION_UNKNOWN"]
    assert (answer.sessions[4].lease.token, answer.sessions[4].lease.ttl.seconds) == (token, 60)
    assert answer.next_interval.seconds == 1
    assert (await plane.books()).sessions["s"]["blocks"] == "20"


async def test_observe_places_everybody_and_says_what_it_would_have_done(planes: Any) -> None:
    (plane,) = await planes(config=capped(1, mode="observe"))
    await plane.report()
    assert not (await plane.admit("s")).HasField("hold")
    answer = await plane.admit("t")
    assert (answer.decision, answer.hold.reason) == (pb.DECISION_PLACE, pb.HOLD_REASON_POOL_CAP)
