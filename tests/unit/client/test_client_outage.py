from __future__ import annotations

import asyncio
import logging
import zlib

import grpc
import pytest

from moorage import AsyncClient, Client, Unavailable
from tests.unit.client.conftest import NO_RETRIES
from tests.unit.client.fake_scheduler import FakeScheduler, until

ENDPOINTS = ["http://engine-0", "http://engine-1", "http://engine-2"]


async def test_by_default_an_unreachable_control_plane_raises(nowhere: str) -> None:
    async with AsyncClient(nowhere, options=NO_RETRIES) as client:
        with pytest.raises(Unavailable):
            async with client.session("s"):
                pytest.fail("nobody admitted it")


async def test_admit_goes_on_unmanaged_and_says_so_once(nowhere: str, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncClient(
        nowhere, on_unavailable="admit", fallback=ENDPOINTS, token="secret", options=NO_RETRIES
    ) as client:
        for session_id in ("a", "b", "c"):
            async with client.session(session_id, workload_class="rlvr") as s:
                assert (s.managed, s.lost, s.workload_class) == (False, False, "rlvr")
                turns = [await s.place(prompt_tokens=5), await s.place()]
                s.report(cached_tokens=1, output_tokens=2)
                s.tool_wait()
                expected = ENDPOINTS[zlib.crc32(session_id.encode()) % 3]
                assert [turn.endpoint for turn in turns] == [expected] * 2
                assert [(turn.number, turn.moved, turn.managed) for turn in turns] == [
                    (0, False, False),
                    (1, False, False),
                ]
            assert s.residency is None
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in warnings] == ["moorage"]
    assert "sessions go on unmanaged" in warnings[0].getMessage()
    assert "secret" not in caplog.text


def test_admit_asks_the_fallback_of_the_session_first(nowhere: str) -> None:
    with (
        Client(nowhere, on_unavailable="admit", fallback=ENDPOINTS, options=NO_RETRIES) as client,
        client.session("s", fallback=lambda session_id: f"http://for-{session_id}") as s,
    ):
        assert s.endpoint == "http://for-s"
        assert s.place().endpoint == "http://for-s"
        assert s.pause() is None


def test_admit_without_a_fallback_is_refused_before_anything_is_sent(nowhere: str) -> None:
    with Client(nowhere, on_unavailable="admit") as client:
        with pytest.raises(ValueError, match="needs a fallback"):
            client.session("s")
        with pytest.raises(ValueError, match="needs a fallback"):
            client.session("s", fallback=[])


async def test_the_next_outage_is_said_again(
    fake: FakeScheduler, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(target, on_unavailable="admit", fallback=ENDPOINTS, options=NO_RETRIES) as client:
        for failures in (1, 0, 1):
            fake.fail_next("Admit", failures, grpc.StatusCode.UNAVAILABLE)
            async with client.session("s") as s:
                assert s.managed is not bool(failures)
    assert caplog.text.count("sessions go on unmanaged") == 2


async def test_admit_keeps_a_living_session_at_its_home(fake: FakeScheduler, target: str) -> None:
    async with AsyncClient(target, on_unavailable="admit", fallback=ENDPOINTS, options=NO_RETRIES) as client:
        async with client.session("s") as s:
            await s.place()
            fake.fail_next("Place", 1, grpc.StatusCode.UNAVAILABLE)
            away = await s.place()
            back = await s.place()
            assert s.managed
        assert [(turn.number, turn.endpoint, turn.managed) for turn in (away, back)] == [
            (1, "http://engine-0", False),
            (2, "http://engine-0", True),
        ]
    assert fake.living == {}


@pytest.mark.parametrize("client_kind", ["threads", "asyncio"])
async def test_a_call_that_the_server_sheds_unread_is_made_again(
    fake: FakeScheduler, client: AsyncClient, sync_client: Client, client_kind: str
) -> None:
    fake.fail_next("Admit", 1, grpc.StatusCode.CANCELLED)
    if client_kind == "threads":
        with sync_client.session("s"):
            pass
    else:
        async with client.session("s"):
            pass
    first, again = fake.calls["Admit"]
    assert first == again
    assert fake.outcomes("s") == ["COMPLETED"]


async def test_a_living_session_sits_out_a_short_outage(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s") as s:
        await s.place()
        fake.lose_next_answer("Place")
        fake.move("s", "http://engine-1")
        turn = await s.place()
        assert (turn.endpoint, turn.moved) == ("http://engine-1", True)
    assert fake.calls["Place"][0] == fake.calls["Place"][1]


async def test_a_long_outage_raises_and_the_session_can_go_on_afterwards(fake: FakeScheduler, target: str) -> None:
    async with (
        AsyncClient(target, outage_patience=0, options=NO_RETRIES) as client,
        client.session("s") as s,
    ):
        await s.place()
        fake.fail_next("Place", 1, grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(Unavailable):
            await s.place()
        assert (await s.place()).number == 1
    assert fake.outcomes("s") == ["COMPLETED"]


async def test_a_held_session_sits_out_a_short_outage_with_the_same_request(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    fake.capacity = 0

    async def enter() -> None:
        async with client.session("s", max_wait=0):
            pass

    entering = asyncio.create_task(enter())
    await until(lambda: len(fake.calls["Admit"]) >= 2)
    fake.fail_next("Admit", 1, grpc.StatusCode.UNAVAILABLE)
    await until(lambda: not fake.before["Admit"])
    fake.grow(1)
    await entering
    ids = [request.request_id for request in fake.calls["Admit"]]
    assert len(ids) - len(set(ids)) == 1
    assert fake.outcomes("s") == ["COMPLETED"]
