from __future__ import annotations

import asyncio

import grpc
import pytest

from moorage import (
    AsyncClient,
    Held,
    InvalidArgument,
    Rejected,
    Unavailable,
)
from moorage.v1 import scheduler_pb2 as pb
from tests.unit.client.fake_scheduler import FakeScheduler, cancel, until


async def test_entry_declares_the_session_and_takes_its_placement(fake: FakeScheduler, client: AsyncClient) -> None:
    session = client.session("s", workload_class="agentic", group_id="g", group_size=8, prompt_tokens=100, max_wait=20)
    with pytest.raises(RuntimeError, match="not open"):
        _ = session.endpoint
    async with session as s:
        assert s.placement == pb.Placement(instance_id="engine-0", endpoint="http://engine-0")
        assert (s.endpoint, s.workload_class, s.managed, s.lost) == ("http://engine-0", "agentic", True, False)
    (admit,) = fake.calls["Admit"]
    assert (admit.workload_class, admit.group_id, admit.group_size, admit.prompt_tokens) == ("agentic", "g", 8, 100)
    assert admit.max_wait.seconds == 20
    with pytest.raises(RuntimeError, match="once"):
        await session.__aenter__()


async def test_a_missing_class_is_seen_as_the_server_inferred_it(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s") as s:
        assert s.workload_class == "inferred"


async def test_a_held_session_waits_in_the_call_and_between_calls(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.capacity, fake.retry_after = 0, 0.05
    async with asyncio.TaskGroup() as group:

        async def enter() -> None:
            async with client.session("s", max_wait=0.05) as s:
                assert s.hold is None

        started = asyncio.get_running_loop().time()
        group.create_task(enter())
        await until(lambda: len(fake.calls["Admit"]) == 3)
        assert asyncio.get_running_loop().time() - started >= 2 * (0.05 + 0.05)
        fake.grow(1)
    assert len({request.request_id for request in fake.calls["Admit"]}) == len(fake.calls["Admit"])
    assert fake.outcomes("s") == ["COMPLETED"]


@pytest.mark.parametrize(("wait_timeout", "calls"), [(0, 1), (0.05, 2)])
async def test_held_is_raised_when_the_wait_is_over(
    fake: FakeScheduler, client: AsyncClient, wait_timeout: float, calls: int
) -> None:
    fake.capacity, fake.retry_after = 0, 10
    with pytest.raises(Held) as caught:
        async with client.session("s", wait_timeout=wait_timeout, max_wait=0.01):
            pytest.fail("it was held")
    assert caught.value.hold.position == 1
    assert caught.value.reason == "KV_BUDGET"
    assert str(caught.value) == "session 's' is held (KV_BUDGET): no room [KV_BUDGET]"
    assert len(fake.calls["Admit"]) == calls
    assert fake.held == set()


async def test_keep_place_leaves_the_place_in_the_queue(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.capacity = 0
    with pytest.raises(Held):
        async with client.session("s", wait_timeout=0, keep_place=True):
            pytest.fail("it was held")
    assert fake.held == {"s"}
    assert fake.calls["Release"] == []


async def test_a_rejected_session_raises_and_leaves_nothing(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.rejection = pb.Hold(reason=pb.HOLD_REASON_TOO_LARGE, detail="needs 900 blocks of 768")
    with pytest.raises(Rejected, match="needs 900 blocks") as caught:
        async with client.session("s"):
            pytest.fail("it was rejected")
    assert caught.value.reason == "TOO_LARGE"
    assert fake.calls["Release"] == []


async def test_a_refused_request_raises_its_error(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.fail_next("Admit", 1, grpc.StatusCode.INVALID_ARGUMENT, "ID_TOO_LONG")
    with pytest.raises(InvalidArgument):
        async with client.session("s" * 300):
            pytest.fail("it was refused")
    assert fake.calls["Release"] == []


async def test_a_cancelled_wait_in_the_call_leaves_nothing(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.capacity = 0
    entering = asyncio.create_task(client.session("s").__aenter__())
    await until(lambda: "s" in fake.held)
    await cancel(entering)
    await until(lambda: not fake.held)
    assert fake.living == {}


async def test_a_cancelled_wait_between_calls_leaves_nothing(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.capacity, fake.retry_after = 0, 30
    session = client.session("s", max_wait=0)
    entering = asyncio.create_task(session.__aenter__())
    await until(lambda: session.hold is not None)
    assert fake.held == {"s"}
    await cancel(entering)
    assert fake.held == set()
    assert fake.outcomes("s") == ["ABORTED"]


async def test_an_admission_that_crosses_the_cancellation_is_released(fake: FakeScheduler, client: AsyncClient) -> None:
    with fake.gate("Admit", after=True) as arrived:
        entering = asyncio.create_task(client.session("s").__aenter__())
        await until(arrived.is_set)
        assert "s" in fake.living
        await cancel(entering)
    assert fake.living == {}
    assert [bool(request.lease_token) for request in fake.calls["Release"]] == [False, True]
    assert len({request.request_id for request in fake.calls["Admit"]}) == 1


async def test_an_admission_whose_answer_was_too_late_is_released(fake: FakeScheduler, target: str) -> None:
    async with AsyncClient(target, timeout=0.1) as client:
        with fake.gate("Admit", after=True), pytest.raises(Unavailable):
            async with client.session("s", max_wait=0):
                pytest.fail("there was no answer")
    assert fake.living == {}
    assert len(fake.calls["Admit"]) == 2


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT])
async def test_a_withdrawal_that_fails_is_logged_and_the_caller_sees_its_own_error(
    fake: FakeScheduler, client: AsyncClient, caplog: pytest.LogCaptureFixture, code: grpc.StatusCode
) -> None:
    fake.capacity = 0
    fake.fail_next("Release", 1, code)
    with pytest.raises(Held):
        async with client.session("s", wait_timeout=0):
            pytest.fail("it was held")
    assert "session 's' could not be withdrawn" in caplog.text
