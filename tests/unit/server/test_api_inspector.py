"""What the Inspector shows of a live control plane."""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import Any

import grpc
import pytest

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import operator_pb2 as opb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import ClassConfig, PoolConfig

STATIC = PoolConfig(
    policy="static",
    static_cap=2,
    classes=MappingProxyType({"a": ClassConfig(target_share=3.0), "b": ClassConfig(target_share=1.0)}),
)


async def test_an_unknown_pool_is_not_found_and_not_created(world: Any, refusal: Any) -> None:
    async with world() as w:
        for call in (
            w.inspector.GetPool(ipb.GetPoolRequest(pool="p")),
            w.inspector.ListInstances(ipb.ListInstancesRequest(pool="p")),
            w.inspector.ListSessions(ipb.ListSessionsRequest(pool="p")),
            w.inspector.GetSession(ipb.GetSessionRequest(pool="p", session_id="s")),
            w.inspector.ListClasses(ipb.ListClassesRequest(pool="p")),
            w.inspector.WatchEvents(ipb.WatchEventsRequest(pool="p")).read(),
        ):
            failure = await refusal(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "POOL_UNKNOWN")
        assert await w.control.store.pools() == []


async def test_a_pool_in_figures(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i", used_blocks=7)
        await w.instance("j", total_blocks=None, used_blocks=None)
        tokens = [await w.placed(f"a{n}", workload_class="a") for n in range(3)]
        await w.placed("b0", workload_class="b")
        held = await w.admit("b1", workload_class="b")
        assert held.decision == pb.DECISION_HOLD
        await w.admit("c0", workload_class="c")
        await w.admit("none")
        for n in range(2):
            await w.scheduler.Release(
                pb.ReleaseRequest(session_id=f"a{n}", lease_token=tokens[n], outcome=pb.OUTCOME_COMPLETED)
            )
        pool = await w.inspector.GetPool(ipb.GetPoolRequest())
        assert (pool.pool, pool.policy, pool.mode) == ("default", "static", opb.MODE_ENFORCE)
        assert pool.active_by_class["a"] == 1
        assert pool.held_by_class["b"] == 1
        assert pool.active_sessions == sum(pool.active_by_class.values())
        assert pool.held_sessions == sum(pool.held_by_class.values())
        assert (pool.released_by_class["a"], pool.completed_by_class["a"]) == (2, 2)
        assert dict(pool.target_mixture) == {"a": 0.75, "b": 0.25}
        assert pool.consumed_mixture["a"] == 1.0
        assert pool.mixture_deviation == pytest.approx(25.0)
        assert (pool.unlabelled_total, pool.unknown_class_total) == (1, 1)
        assert (pool.used_blocks, pool.total_blocks) == (7, 1_000)
        assert pool.config.static_cap == 2
        assert pool.reserved_blocks > 0


async def test_what_no_instance_reported_stays_unknown(world: Any) -> None:
    async with world({"default": PoolConfig()}) as w:
        pool = await w.inspector.GetPool(ipb.GetPoolRequest())
        assert not pool.HasField("used_blocks")
        assert not pool.HasField("total_blocks")
        assert pool.mixture_deviation == 0.0


async def test_instances_in_order_and_in_pages(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        for name, rank in (("j", 0), ("i", 10), ("i", 2), ("k|x {", 0)):
            await w.instance(name, dp_rank=rank)
        await w.placed("s", workload_class="a")
        found: list[Any] = []
        token, pages = "", 0
        while True:
            page = await w.inspector.ListInstances(ipb.ListInstancesRequest(page_size=3, page_token=token))
            found += page.instances
            pages, token = pages + 1, page.next_page_token
            if not token:
                break
        assert pages == 2
        assert [(i.snapshot.instance_id, i.snapshot.dp_rank) for i in found] == [
            ("i", 2),
            ("i", 10),
            ("j", 0),
            ("k|x {", 0),
        ]
        assert all(i.freshness == ipb.FRESHNESS_FRESH for i in found)
        assert all(i.snapshot.total_blocks == 1_000 for i in found)
        assert sum(i.active_sessions for i in found) == 1
        (home,) = [i for i in found if i.active_sessions]
        assert dict(home.active_by_class) == {"a": 1}
        assert home.reserved_blocks > 0
        assert home.brake == 1.0


async def test_an_instance_after_an_epoch_has_limits_and_signals(world: Any, eventually: Any) -> None:
    async with world({"default": PoolConfig(epoch_interval_s=0.1)}) as w:
        await w.instance("i", preemptions_total=3)
        await w.placed("s")

        async def ruled() -> Any:
            (item,) = (await w.inspector.ListInstances(ipb.ListInstancesRequest())).instances
            return item if item.signals and item.session_cap else None

        item = await eventually(ruled)
        assert 0 < item.budget_blocks <= 1_000
        assert item.HasField("forecast_blocks")
        signals = {s.name: s for s in item.signals}
        assert signals["preemptions"].value == 3
        assert not signals["continuation_hit_rate"].HasField("value"), "nobody reported a turn yet"
        assert not signals["continuation_hit_rate"].HasField("age")
        assert item.age.ToMilliseconds() >= 0


async def test_page_tokens_are_checked(world: Any, refusal: Any) -> None:
    async with world({"default": PoolConfig()}) as w:
        for token in ("%%", "not base64", "aGVsbG8="):
            failure = await refusal(w.inspector.ListInstances(ipb.ListInstancesRequest(page_token=token)))
            assert (failure.reason, failure.metadata["field"]) == ("INVALID_FIELD", "page_token")


async def test_sessions_in_pages_and_filtered(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        for n in range(2):
            await w.placed(f"s{n}", workload_class="a")
        await w.admit("t {x}", workload_class="b")

        async def ids(**filters: Any) -> list[str]:
            found: list[str] = []
            token = ""
            while True:
                page = await w.inspector.ListSessions(ipb.ListSessionsRequest(page_size=2, page_token=token, **filters))
                found += [s.session_id for s in page.sessions]
                token = page.next_page_token
                if not token:
                    return found

        assert await ids() == ["s0", "s1", "t {x}"]
        assert await ids(held=True) == ["t {x}"]
        assert await ids(held=False) == ["s0", "s1"]
        assert await ids(workload_class="b") == ["t {x}"]
        assert await ids(instance_id="i") == ["s0", "s1"]
        assert await ids(instance_id="j") == []
        assert await ids(phase=pb.PHASE_PLACED) == ["s0", "s1"]
        assert await ids(phase=pb.PHASE_HELD, workload_class="a") == []


async def test_a_session_through_its_life(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i", dp_rank=3)
        token = await w.placed("s", workload_class="x", group_id="g")

        async def get() -> Any:
            return await w.inspector.GetSession(ipb.GetSessionRequest(session_id="s"))

        session = (await get()).session
        assert (session.declared_class, session.group_id, session.phase) == ("x", "g", pb.PHASE_PLACED)
        assert (session.instance_id, session.dp_rank, session.incarnation) == ("i", 3, "1")
        assert session.reserved_blocks > 0
        assert not session.HasField("context_tokens"), "nobody reported it yet"
        assert not session.HasField("turn")
        assert session.lease.ttl.seconds == 60
        assert session.lease.token == ""
        assert not session.HasField("hold")

        await asyncio.sleep(0.02)
        report = pb.SessionProgress(
            session_id="s", lease_token=token, phase=pb.PHASE_TOOL_WAIT, turn=0, context_tokens=150
        )
        await w.scheduler.Heartbeat(pb.HeartbeatRequest(sessions=[report]))
        answer = await get()
        session = answer.session
        assert (session.phase, session.context_tokens, session.turn) == (pb.PHASE_TOOL_WAIT, 150, 0)
        assert session.block_seconds > 0
        # Class x is none that the pool knows.
        assert [h.kind for h in answer.history] == ["label", "admit"]
        assert answer.history[0].reason == "declared class is unknown"
        assert answer.history[1].instance_id == "i"

        await w.scheduler.Release(pb.ReleaseRequest(session_id="s", lease_token=token, outcome=pb.OUTCOME_PAUSED))
        session = (await get()).session
        assert (session.phase, session.instance_id) == (pb.PHASE_PAUSED, "")
        assert not session.HasField("lease")


async def test_a_held_session_explains_itself(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        for n in range(2):
            await w.placed(f"s{n}")
        await w.admit("first")
        await w.admit("second")
        answer = await w.inspector.GetSession(ipb.GetSessionRequest(session_id="first"))
        assert answer.hold.reason == pb.HOLD_REASON_POOL_CAP
        assert (answer.hold.position, answer.hold.ahead) == (1, 0)
        assert answer.hold.retry_after.ToMilliseconds() > 0
        assert answer.hold.held_since.seconds > 0
        assert "2 of 2 sessions" in answer.hold.detail
        assert "enters when a session ends" in answer.hold.detail
        assert answer.session.hold == answer.hold
        assert not answer.session.HasField("lease")
        second = await w.inspector.GetSession(ipb.GetSessionRequest(session_id="second"))
        assert second.hold.reason == pb.HOLD_REASON_QUEUED_BEHIND
        assert second.hold.position == 2


async def test_a_hold_is_explained_on_the_numbers_of_now(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.admit("s")
        answer = await w.inspector.GetSession(ipb.GetSessionRequest(session_id="s"))
        assert answer.hold.reason == pb.HOLD_REASON_NO_INSTANCE
        assert "enters when an instance registers" in answer.hold.detail
        await w.instance("i")
        answer = await w.inspector.GetSession(ipb.GetSessionRequest(session_id="s"))
        assert "there is room" in answer.hold.detail


async def test_an_unknown_session_is_not_found(world: Any, refusal: Any) -> None:
    async with world({"default": STATIC}) as w:
        failure = await refusal(w.inspector.GetSession(ipb.GetSessionRequest(session_id="s")))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "SESSION_UNKNOWN")


async def test_classes_in_pages(world: Any, eventually: Any) -> None:
    config = PoolConfig(
        epoch_interval_s=0.1,
        classes=MappingProxyType({"a": ClassConfig(3.0, 320, 5.0), "b": ClassConfig(1.0, 160, 1.0)}),
    )
    async with world({"default": config}) as w:
        await w.instance("i")
        await w.placed("s", workload_class="a")
        await w.placed("t", workload_class="other")

        async def estimated() -> Any:
            page = await w.inspector.ListClasses(ipb.ListClassesRequest(page_size=2))
            return page if page.classes[0].reference_blocks else None

        page = await eventually(estimated)
        assert [c.workload_class for c in page.classes] == ["a", "b"]
        a = page.classes[0]
        assert (a.target, a.active, a.demand_sessions, a.held, a.completed) == (0.75, 1, 1, 0, 0)
        assert a.evidence == 0.0
        assert a.reference_blocks == pytest.approx(20.0)
        assert a.residency.ToMilliseconds() == pytest.approx(5_000, rel=0.2)
        assert not a.HasField("continuation_hit_rate")
        assert not a.HasField("tool_gap")
        assert not a.HasField("oldest_hold")
        rest = await w.inspector.ListClasses(ipb.ListClassesRequest(page_token=page.next_page_token))
        assert [c.workload_class for c in rest.classes] == ["other"]
        assert rest.next_page_token == ""


async def test_the_oldest_hold_of_a_class(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.admit("s", workload_class="a")
        await asyncio.sleep(0.05)
        page = await w.inspector.ListClasses(ipb.ListClassesRequest())
        (a,) = [c for c in page.classes if c.workload_class == "a"]
        assert a.held == 1
        assert 50 <= a.oldest_hold.ToMilliseconds() < 5_000


async def kinds(call: Any, count: int) -> list[Any]:
    async with asyncio.timeout(10):
        return [await call.read() for _ in range(count)]


async def test_events_from_the_oldest_from_now_and_from_a_token(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i", dp_rank=2)
        await w.placed("s")
        oldest = await kinds(w.inspector.WatchEvents(ipb.WatchEventsRequest(resume_token="0")), 2)
        assert [e.kind for e in oldest] == ["register", "admit"]
        assert oldest[1].session_id == "s"
        assert oldest[1].decision == pb.DECISION_PLACE
        assert (oldest[1].instance_id, oldest[1].values["dp_rank"]) == ("i", "2")
        assert oldest[1].time.seconds > 0

        from_now = w.inspector.WatchEvents(ipb.WatchEventsRequest())
        resumed = w.inspector.WatchEvents(ipb.WatchEventsRequest(resume_token=oldest[0].resume_token))
        assert [e.kind for e in await kinds(resumed, 1)] == ["admit"]
        await asyncio.sleep(0.1)
        await w.placed("t")
        assert [e.session_id for e in await kinds(from_now, 1)] == ["t"]
        assert [e.session_id for e in await kinds(resumed, 1)] == ["t"]
        from_now.cancel()
        resumed.cancel()


async def test_a_watch_ends_with_a_last_word_when_the_server_stops(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        call = w.inspector.WatchEvents(ipb.WatchEventsRequest(resume_token="0"))
        (first,) = await kinds(call, 1)
        stopping = asyncio.create_task(w.server.stop(w.services.drain))
        (last,) = await kinds(call, 1)
        assert (last.kind, last.resume_token) == ("closing", first.resume_token)
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, 5)
