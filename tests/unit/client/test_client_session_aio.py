from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from moorage import (
    AsyncClient,
    AsyncSession,
    Held,
    LeaseLost,
    MoorageError,
    Rejected,
)
from moorage.v1 import scheduler_pb2 as pb
from tests.unit.client.fake_scheduler import FakeScheduler, Living, cancel, fail, until

# --- turns


async def test_the_first_turn_takes_the_admission_later_ones_ask(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s", prompt_tokens=100) as s:
        assert s.turn is None
        first = await s.place(prompt_tokens=100)
        assert fake.calls["Place"] == []
        second = await s.place(prompt_tokens=150, prefix_hashes=[7, 8])
        assert ((first.number, second.number), (first.moved, second.moved)) == ((0, 1), (False, False))
        assert first.endpoint == second.endpoint == s.endpoint
    (place,) = fake.calls["Place"]
    assert (place.turn, place.prompt_tokens, list(place.prefix_hashes)) == (1, 150, [7, 8])


@pytest.mark.parametrize("declared", [{}, {"prompt_tokens": 90}])
async def test_the_first_turn_asks_if_it_knows_more_than_the_admission(
    fake: FakeScheduler, client: AsyncClient, declared: dict[str, int]
) -> None:
    async with client.session("s", **declared) as s:  # type: ignore[arg-type]
        assert (await s.place(prompt_tokens=100)).number == 0
    assert fake.calls["Place"][0].turn == 0


async def test_an_old_admission_does_not_serve_the_first_turn(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.lease_ttl = 0.03
    async with client.session("s") as s:
        await asyncio.sleep(0.02)
        await s.place()
    assert len(fake.calls["Place"]) == 1


async def test_a_moved_session_says_so_once_and_uses_its_new_token(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s") as s:
        await s.place()
        fake.move("s", "http://engine-1")
        turns = [await s.place(), await s.place()]
        assert [turn.moved for turn in turns] == [True, False]
        assert s.endpoint == "http://engine-1"
    assert [request.lease_token for request in fake.calls["Place"]] == ["s-token-1", "s-token-2"]
    assert fake.calls["Release"][0].lease_token == "s-token-2"


async def test_a_homeless_session_waits_for_a_new_home(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s", max_wait=0.01) as s:
        await s.place()
        fake.homeless.add("s")
        with pytest.raises(Held, match="no room"):
            await s.place(wait_timeout=0)
        waiting = asyncio.create_task(s.place())
        await until(lambda: len(fake.calls["Place"]) >= 3)
        fake.move("s", "http://engine-1")
        fake.homeless.clear()
        assert (await waiting).moved


async def test_a_session_that_fits_nowhere_any_more_is_rejected(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s") as s:
        await s.place()
        fake.rejection = pb.Hold(reason=pb.HOLD_REASON_TOO_LARGE)
        with pytest.raises(Rejected, match="TOO_LARGE"):
            await s.place()
    assert fake.living == {}


async def test_a_move_whose_answer_was_cancelled_is_settled_by_the_next_place(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    async with client.session("s") as s:
        await s.place()
        fake.move("s", "http://engine-1")
        with fake.gate("Place", after=True) as arrived:
            placing = asyncio.create_task(s.place())
            await until(arrived.is_set)
            await cancel(placing)
        turn = await s.place()
        assert (turn.number, turn.moved, turn.endpoint) == (1, True, "http://engine-1")
    first, again, last = fake.calls["Place"]
    assert first == again
    assert (last.lease_token, last.turn) == ("s-token-2", 1)
    assert fake.living == {}


async def test_a_move_whose_answer_was_cancelled_is_settled_by_the_release(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    async def roll_out() -> None:
        async with client.session("s") as s:
            await s.place()
            await s.place()

    fake.move("s", "http://engine-1")
    with fake.gate("Place", after=True) as arrived:
        rolling = asyncio.create_task(roll_out())
        await until(arrived.is_set)
        await cancel(rolling)
    assert fake.outcomes("s") == ["ABORTED"]
    assert fake.living == {}


async def test_a_lost_session_raises_on_place_and_is_not_admitted_again(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    async def roll_out() -> None:
        async with client.session("s") as s:
            await s.place()
            fake.evict("s")
            await s.place()

    with pytest.raises(LeaseLost) as caught:
        await roll_out()
    assert caught.value.reason == "SESSION_UNKNOWN"
    assert fake.outcomes("s") == ["FAILED"]
    assert len(fake.calls["Admit"]) == 1


async def test_a_stale_token_raises_on_place(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s") as s:
        await s.place()
        fake.living["s"].token = "another's"
        for _ in range(2):
            with pytest.raises(LeaseLost):
                await s.place()
        assert s.lost
    assert len(fake.calls["Place"]) == 1
    assert "s" in fake.living


async def test_readmit_enters_again_with_the_prompt_as_it_is(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s", prompt_tokens=100, readmit=True) as s:
        await s.place()
        s.report(cached_tokens=0, output_tokens=20)
        fake.evict("s")
        turn = await s.place(prompt_tokens=150)
        assert (turn.number, turn.moved, turn.managed, s.lost) == (1, False, True, False)
        fake.evict("s")
        fake.living["s"] = Living("s-token-9", "http://engine-9")
        assert (await s.place(prompt_tokens=170)).moved
    assert [admit.prompt_tokens for admit in fake.calls["Admit"]] == [100, 150, 170]
    assert fake.calls["Release"][-1].usage == pb.Usage(prompt_tokens=420, cached_tokens=0, output_tokens=20)


async def test_readmit_enters_again_where_a_failover_left_the_session_held(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    async with client.session("s", prompt_tokens=100, readmit=True) as s:
        await s.place()
        fake.fail_next("Place", 1, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
        assert (await s.place(prompt_tokens=150)).managed
    assert len(fake.calls["Admit"]) == 2
    async with client.session("t") as t:
        await t.place()
        fake.fail_next("Place", 1, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
        with pytest.raises(LeaseLost) as caught:
            await t.place()
    assert caught.value.reason == "WRONG_STATE"


# --- ways out


async def test_success_is_completed_with_the_usage_of_all_turns(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s", prompt_tokens=100) as s:
        await s.place()
        s.report(cached_tokens=0, output_tokens=20)
        await s.place(prompt_tokens=130)
        s.progress(output_tokens=3)
        s.report(cached_tokens=112, output_tokens=10, context_tokens=141)
        assert s.residency is None
    (release,) = fake.calls["Release"]
    assert release.outcome == pb.OUTCOME_COMPLETED
    assert release.usage == pb.Usage(prompt_tokens=230, cached_tokens=112, output_tokens=30, context_tokens=141)
    assert s.residency is not None
    assert s.residency.block_seconds == 12.5


async def test_unknown_usage_stays_unknown(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s"):
        pass
    assert fake.calls["Release"][0].usage == pb.Usage()


async def test_an_exception_is_failed(fake: FakeScheduler, client: AsyncClient) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.session("s"):
            _ = 1 / 0
    assert fake.outcomes("s") == ["FAILED"]


async def test_cancellation_is_aborted(fake: FakeScheduler, client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), client.session("s"):
            await asyncio.sleep(10)
    assert fake.outcomes("s") == ["ABORTED"]
    assert fake.living == {}


async def test_a_closed_generator_is_aborted(fake: FakeScheduler, client: AsyncClient) -> None:
    async def roll_out() -> AsyncIterator[str]:
        async with client.session("s") as s:
            yield s.endpoint

    generator = roll_out()
    assert await anext(generator) == "http://engine-0"
    await generator.aclose()  # type: ignore[attr-defined]
    assert fake.outcomes("s") == ["ABORTED"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
async def test_an_interruption_is_aborted(
    fake: FakeScheduler, client: AsyncClient, interruption: type[BaseException]
) -> None:
    with pytest.raises(interruption):
        async with client.session("s"):
            raise interruption
    assert fake.outcomes("s") == ["ABORTED"]


async def test_pause_releases_at_once_and_the_end_of_the_block_does_nothing(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    async with client.session("s") as s:
        answer = await s.pause()
        assert answer is not None
        assert answer.released
        with pytest.raises(RuntimeError, match="open session"):
            await s.place()
    assert fake.outcomes("s") == ["PAUSED"]


async def test_an_early_release_names_its_outcome(fake: FakeScheduler, client: AsyncClient) -> None:
    async with client.session("s") as s:
        await s.release("FAILED")
    assert fake.outcomes("s") == ["FAILED"]


async def test_the_release_survives_cancellation_which_goes_on_afterwards(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    async def roll_out() -> None:
        async with client.session("s"):
            pass

    with fake.gate("Release") as arrived:
        rolling = asyncio.create_task(roll_out())
        await until(arrived.is_set)
        for _ in range(3):
            rolling.cancel()
            await asyncio.sleep(0.01)
        assert not rolling.done()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    assert fake.outcomes("s") == ["COMPLETED"]
    assert fake.living == {}


async def test_the_release_is_made_again_when_the_loop_cancels_every_task(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    rolling = asyncio.create_task(_enter_and_leave(client.session("s")))
    with fake.gate("Release") as arrived:
        await until(arrived.is_set)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await rolling
    assert fake.living == {}
    first, again = fake.calls["Release"]
    assert first == again


async def test_the_release_is_repeated_while_the_control_plane_is_away(
    fake: FakeScheduler, client: AsyncClient
) -> None:
    def away(request: object, context: object) -> None:
        fail(context, grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", pushback="10")

    fake.before["Release"] += [away, away]
    fake.after["Release"].append(away)
    async with client.session("s"):
        pass
    assert len(fake.calls["Release"]) == 4
    assert len({request.request_id for request in fake.calls["Release"]}) == 1
    assert fake.living == {}


async def test_a_release_that_can_not_be_delivered_is_logged_not_raised(
    fake: FakeScheduler, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(target, release_timeout=0.1, options=(("grpc.enable_retries", 0),)) as client:
        async with client.session("s"):
            fake.fail_always(grpc.StatusCode.UNAVAILABLE)
        assert await client.session("s").release() is None
    assert "session 's' could not be released as OUTCOME_COMPLETED" in caplog.text
    assert "token" not in caplog.text


async def test_closing_the_client_releases_what_is_still_open(fake: FakeScheduler, target: str) -> None:
    client = AsyncClient(target)
    session = await client.session("s").__aenter__()
    await client.close()
    assert fake.outcomes("s") == ["ABORTED"]
    await session.__aexit__(None, None, None)
    assert len(fake.calls["Release"]) == 1
    with pytest.raises(MoorageError, match="closed"):
        await client.admit("s")


async def test_closing_the_client_ends_a_wait_with_an_error_not_a_cancellation(
    fake: FakeScheduler, target: str
) -> None:
    fake.capacity = 0
    client = AsyncClient(target)
    entering = asyncio.create_task(client.session("s").__aenter__())
    await until(lambda: "s" in fake.held)
    await client.close()
    with pytest.raises(MoorageError, match="the client is closed"):
        await entering


async def _enter_and_leave(session: AsyncSession) -> None:
    async with session:
        pass
