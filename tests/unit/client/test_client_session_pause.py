"""Sessions that stop early and go on later: paused when their caller is cancelled, given up by their token."""

from __future__ import annotations

import asyncio

import pytest

from moorage import AsyncClient, Client
from tests.unit.client.fake_scheduler import FakeScheduler, cancel, until


async def test_a_cancelled_session_is_paused_where_it_says_so(fake: FakeScheduler, client: AsyncClient) -> None:
    inside = asyncio.Event()

    async def rollout() -> None:
        async with client.session("s", on_cancel="PAUSED"):
            inside.set()
            await asyncio.sleep(30)

    task = asyncio.create_task(rollout())
    await inside.wait()
    await cancel(task)
    assert fake.outcomes("s") == ["PAUSED"]


async def test_a_cancelled_wait_keeps_its_seniority_where_it_says_so(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.capacity, fake.retry_after = 0, 30
    session = client.session("s", max_wait=0, on_cancel="PAUSED")
    entering = asyncio.create_task(session.__aenter__())
    await until(lambda: session.hold is not None)
    await cancel(entering)
    assert fake.outcomes("s") == ["PAUSED"]


async def test_an_admission_that_crosses_the_cancellation_is_paused(fake: FakeScheduler, client: AsyncClient) -> None:
    with fake.gate("Admit", after=True) as arrived:
        entering = asyncio.create_task(client.session("s", on_cancel="PAUSED").__aenter__())
        await until(arrived.is_set)
        await cancel(entering)
    assert fake.living == {}
    assert fake.outcomes("s")[-1] == "PAUSED"


async def test_other_ends_are_as_ever(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("done", on_cancel="PAUSED"):
        pass
    with pytest.raises(RuntimeError, match="broken"):
        async with client.session("failed", on_cancel="PAUSED"):
            raise RuntimeError("broken")
    assert (fake.outcomes("done"), fake.outcomes("failed")) == (["COMPLETED"], ["FAILED"])


def test_an_interrupted_thread_pauses_too(fake: FakeScheduler, sync_client: Client) -> None:
    with pytest.raises(KeyboardInterrupt), sync_client.session("s", on_cancel="PAUSED"):
        raise KeyboardInterrupt
    assert fake.outcomes("s") == ["PAUSED"]


def test_the_token_outlives_the_pause(fake: FakeScheduler, sync_client: Client) -> None:
    session = sync_client.session("s")
    assert session.lease_token == ""
    with session:
        assert session.lease_token == fake.living["s"].token
        token = session.lease_token
        session.pause()
    assert session.lease_token == token
    sync_client.release("s", outcome="ABORTED", lease_token=session.lease_token)
    assert fake.calls["Release"][-1].lease_token == token


def test_another_outcome_is_refused(sync_client: Client) -> None:
    with pytest.raises(ValueError, match="on_cancel is 'COMPLETED'"):
        sync_client.session("s", on_cancel="COMPLETED")  # type: ignore[arg-type]
