from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack

import grpc
import pytest

from moorage import AsyncClient, Client, LeaseLost, Usage
from moorage.flows import Call
from moorage.renewal import AsyncRenewer, Renewer
from moorage.roster import MAX_ITEMS, Roster
from moorage.state import SessionOptions, SessionState
from moorage.v1 import scheduler_pb2 as pb
from tests.unit.client.fake_scheduler import FakeScheduler, until


async def test_one_heartbeat_renews_all_sessions_of_a_client(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.lease_ttl = 0.3
    async with AsyncExitStack() as stack:
        for number in range(50):
            await stack.enter_async_context(client.session(f"s{number}"))
        entered = len(fake.calls["Heartbeat"])
        await until(lambda: len(fake.calls["Heartbeat"]) >= entered + 3)
    for beat in fake.calls["Heartbeat"][entered + 1 : entered + 3]:
        assert {item.session_id for item in beat.sessions} == {f"s{number}" for number in range(50)}
        assert {item.phase for item in beat.sessions} == {pb.PHASE_RUNNING}


def test_renewals_are_due_a_third_of_the_shortest_lease_apart() -> None:
    roster = Roster()
    assert roster.due_at() is None
    for ttl in (60.0, 30.0, 90.0):
        roster.add(_state(f"s{ttl}", "default", ttl))
    due_at = roster.due_at()
    assert due_at is not None
    assert 7.9 < due_at - time.monotonic() <= 10
    assert roster.timeout(5.0) == 5.0
    roster.add(_state("short", "default", 3.0))
    assert roster.timeout(5.0) == 1.0


async def test_the_task_ends_with_the_last_session(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s"):
        assert "moorage-renewal" in {task.get_name() for task in asyncio.all_tasks()}
    await until(lambda: "moorage-renewal" not in {task.get_name() for task in asyncio.all_tasks()})
    async with client.session("t"):
        assert "moorage-renewal" in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_finished_turn_is_reported_soon_and_each_under_its_number(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    fake.lease_ttl, fake.next_interval = 0.3, 0.05
    async with client.session("s", prompt_tokens=100) as s:
        await until(lambda: fake.calls["Heartbeat"])
        fake.lease_ttl = 30
        await until(lambda: len(fake.calls["Heartbeat"]) >= 2)
        fake.calls["Heartbeat"].clear()
        with fake.gate("Heartbeat", times=1) as arrived:
            await s.place()
            s.report(cached_tokens=0, output_tokens=20)
            await until(arrived.is_set)
            for prompt, cached in ((130, 112), (170, 128)):
                await s.place(prompt_tokens=prompt)
                s.report(cached_tokens=cached - 16, output_tokens=5)
                s.report(cached_tokens=cached, output_tokens=10)
            await s.place(prompt_tokens=200)
            s.progress(output_tokens=1, context_tokens=201)
        await until(lambda: len(fake.calls["Heartbeat"]) == 2)
    first, second = fake.calls["Heartbeat"]
    tool_wait = pb.PHASE_TOOL_WAIT
    assert [_numbers(item) for item in first.sessions] == [(tool_wait, 0, 120, 0, 20)]
    assert [_numbers(item) for item in second.sessions] == [
        (tool_wait, 1, 140, 112, 30),
        (tool_wait, 2, 180, 128, 40),
        (pb.PHASE_RUNNING, 3, 201, None, 41),
    ]


async def test_a_running_turn_keeps_its_cached_tokens_until_it_is_over(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    fake.lease_ttl, fake.next_interval = 0.15, 0.05
    async with client.session("s") as s:
        await s.place()
        s.report(phase="RUNNING", cached_tokens=64, output_tokens=1)
        await until(lambda: len(fake.calls["Heartbeat"]) >= 2)
        assert not any(item.HasField("cached_tokens") for item in fake.progress("s"))
        s.tool_wait()
        await until(lambda: any(item.HasField("cached_tokens") for item in fake.progress("s")))
        await until(lambda: fake.progress("s")[-1].phase == pb.PHASE_TOOL_WAIT)
        s.report(phase=pb.PHASE_TOOL_WAIT, output_tokens=2)
        await until(lambda: fake.progress("s")[-1].output_tokens == 2)
    assert [item.cached_tokens for item in fake.progress("s") if item.HasField("cached_tokens")] == [64]


async def test_the_next_place_ends_a_turn_and_has_it_reported_soon(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s") as s:
        client._renewer.roster._report_interval = 0.05
        await s.place()
        s.report(phase="RUNNING", cached_tokens=48)
        await s.place()
        await until(lambda: fake.progress("s"))
        assert [(item.turn, item.cached_tokens) for item in fake.progress("s")] == [(0, 48), (1, 0)]


async def test_the_last_turn_of_many_is_reported_before_the_release(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s") as s:
        await s.place()
        await s.place()
        s.report(cached_tokens=64)
    assert [(item.turn, item.cached_tokens) for item in fake.progress("s")] == [(1, 64)]
    async with client.session("single") as s:
        s.report(cached_tokens=64)
    assert fake.progress("single") == []
    assert fake.calls["Release"][-1].usage == Usage(cached_tokens=64)


async def test_a_heartbeat_with_the_old_token_does_not_lose_a_moved_session(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    fake.lease_ttl = 0.15
    fake.move("s", "http://engine-1")
    async with client.session("s") as s:
        await s.place()
        s.report(cached_tokens=48)
        with fake.gate("Heartbeat") as arrived:
            await until(arrived.is_set)
            assert (await s.place()).moved
        await until(lambda: _tokens(fake)[-1] == "s-token-2")
        assert not s.lost
        assert _tokens(fake)[0] == "s-token-1"
        reports = [(item.lease_token, item.cached_tokens) for item in fake.progress("s") if item.turn == 0]
        assert reports == [("s-token-1", 48), ("s-token-2", 48)]


async def test_a_refusal_while_the_move_is_on_its_way_does_not_lose_the_session(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    fake.lease_ttl = 0.15
    fake.move("s", "http://engine-1")
    async with client.session("s") as s:
        await s.place()
        with fake.gate("Place", after=True) as arrived:
            placing = asyncio.create_task(s.place())
            await until(arrived.is_set)
            seen = len(fake.calls["Heartbeat"])
            await until(lambda: len(fake.calls["Heartbeat"]) >= seen + 2)
            assert not s.lost
        assert (await placing).moved
        assert not s.lost


async def test_a_lease_lost_in_the_background_surfaces_on_the_next_place(
    fake: FakeScheduler, client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    fake.lease_ttl = 0.15
    async with client.session("other"), client.session("s") as s:
        await s.place()
        fake.evict("s")
        await until(lambda: s.lost)
        with pytest.raises(LeaseLost, match="the lease of session 's' is over: LEASE_STALE"):
            await s.place()
        seen = len(fake.progress("s"))
        await until(lambda: len(fake.progress("other")) >= 4)
        assert len(fake.progress("s")) == seen
    assert fake.calls["Place"] == []
    assert len(fake.calls["Admit"]) == 2
    assert "session 's' has lost its lease" in caplog.text


async def test_a_refused_report_does_not_lose_the_session(
    fake: FakeScheduler, client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    fake.lease_ttl = 0.15
    async with client.session("s") as s:
        s.report(context_tokens=2**50)
        await until(lambda: "a report of session 's' was refused: context_tokens is above 2^40" in caplog.text)
        assert not s.lost


async def test_a_heartbeat_that_did_not_arrive_is_repeated_with_its_reports(
    fake: FakeScheduler, client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    fake.lease_ttl = 0.3
    async with client.session("s") as s:
        await s.place()
        s.report(cached_tokens=32)
        fake.fail_next("Heartbeat", 2, grpc.StatusCode.UNAVAILABLE)
        await until(lambda: len(fake.progress("s")) >= 4)
        assert not s.lost
    assert [item.cached_tokens for item in fake.progress("s")[:3]] == [32, 32, 32]
    assert not any(item.HasField("cached_tokens") for item in fake.progress("s")[3:])
    assert caplog.text.count("could not be renewed") == 1


async def test_a_refused_heartbeat_does_not_end_the_renewal(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.lease_ttl = 0.15
    fake.fail_next("Heartbeat", 1, grpc.StatusCode.INVALID_ARGUMENT)
    async with client.session("s"):
        await until(lambda: len(fake.calls["Heartbeat"]) >= 3)


def test_the_thread_renews_all_sessions_and_ends_with_the_last(fake: FakeScheduler, sync_client: Client) -> None:
    fake.lease_ttl = 0.15
    with sync_client.session("a") as a, sync_client.session("b"):
        assert a.place().number == 0
        a.report(cached_tokens=16)
        fake.wait_for(lambda: len(fake.progress("a")) >= 3 and len(fake.progress("b")) >= 2)
        assert {item.session_id for item in fake.calls["Heartbeat"][-1].sessions} == {"a", "b"}
        fake.evict("b")
        fake.wait_for(lambda: {item.session_id for item in fake.calls["Heartbeat"][-1].sessions} == {"a"})
        assert sync_client._renewer._thread is not None
    fake.wait_for(lambda: sync_client._renewer._thread is None)


def test_heartbeats_are_split_at_their_limit_and_by_pool() -> None:
    roster = Roster()
    states = [_state(f"s{number}", "default") for number in range(MAX_ITEMS - 1)]
    busy = _state("busy", "default")
    for _ in range(3):
        busy.begin_turn()
        busy.record(cached_tokens=1)
    busy.begin_turn()
    for state in [*states, busy, _state("s", "other")]:
        roster.add(state)
    time.sleep(0.11)
    batches = roster.take_due()
    assert [(batch.request.pool, len(batch.items)) for batch in batches] == [
        ("default", MAX_ITEMS - 1),
        ("default", 4),
        ("other", 1),
    ]
    assert [item.turn for item in batches[1].request.sessions] == [0, 1, 2, 3]
    assert roster.take_due() == []


@pytest.mark.parametrize("wrong", [RuntimeError("broken"), ValueError("closed")])
async def test_no_surprise_ends_the_renewal(wrong: Exception, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def perform(call: Call) -> pb.HeartbeatResponse:
        calls.append(threading.current_thread().name)
        raise wrong

    async def perform_async(call: Call) -> pb.HeartbeatResponse:
        calls.append("task")
        raise wrong

    state = _state("s", "default", 0.03)
    renewers = Renewer(perform, 1.0), AsyncRenewer(perform_async, 1.0)
    for renewer in renewers:
        renewer.add(state)
    await until(lambda: calls.count("task") >= 2 and calls.count("moorage-renewal") >= 2)
    for renewer in renewers:
        renewer.discard(state)
    assert str(wrong) in caplog.text


def _state(session_id: str, pool: str, ttl: float = 0.3) -> SessionState:
    options = SessionOptions(
        pool=pool,
        session_id=session_id,
        fields={},
        max_wait=0,
        wait_timeout=None,
        timeout=1,
        release_timeout=1,
        outage_patience=1,
        readmit=False,
        keep_place=False,
        on_unavailable="fail",
        fallback=None,
    )
    state = SessionState(options)
    lease = pb.Lease(token="t")
    lease.ttl.FromMilliseconds(round(ttl * 1000))
    state.admitted(pb.AdmitResponse(placement=pb.Placement(endpoint="e"), lease=lease))
    return state


def _numbers(item: pb.SessionProgress) -> tuple[int, int, int, int | None, int]:
    cached = item.cached_tokens if item.HasField("cached_tokens") else None
    return item.phase, item.turn, item.context_tokens, cached, item.output_tokens


def _tokens(fake: FakeScheduler) -> list[str]:
    return [item.lease_token for item in fake.progress("s")]
