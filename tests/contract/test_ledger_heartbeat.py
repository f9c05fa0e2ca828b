"""Snapshots and progress on the ledger."""

from __future__ import annotations

import pytest

from moorage_server.core.config import PoolConfig
from moorage_server.store.records import Homeless, Progress, Renewed
from tests.contract.steps import FORGET_MS, I0, I1, NOON, Steps


async def test_the_first_snapshot_registers(bare: Steps) -> None:
    assert await bare.snapshot() == "NEW"
    assert await bare.snapshot() == "OK"
    view = await bare.store.view(bare.pool, PoolConfig())
    assert view.named
    assert list(view.instances) == [I0]
    await bare.balanced()


async def test_repeats_and_older_snapshots_are_dropped(steps: Steps) -> None:
    assert await steps.snapshot(sequence=10) == "OK"
    for sequence in (10, 9, 0):
        assert await steps.snapshot(sequence=sequence, state="STOPPED") == "OLD_SEQUENCE"
    assert await steps.snapshot(sequence=2**63 - 1) == "OK"
    assert await steps.snapshot(sequence=2**63 - 2) == "OLD_SEQUENCE"
    assert (await steps.books()).instances[I0]["state"] == "SERVING"


async def test_an_incarnation_that_is_over_does_not_come_back(steps: Steps) -> None:
    assert await steps.snapshot(inc="2", sequence=1) == "NEW"
    assert await steps.snapshot(inc="1", sequence=99) == "OLD_INCARNATION"
    assert (await steps.books()).instances[I0]["inc"] == "2"


async def test_ranks_of_one_name_are_apart(steps: Steps) -> None:
    assert await steps.snapshot("1|i") == "NEW"
    await steps.placed("s", I0)
    await steps.snapshot("1|i", inc="2")
    assert set((await steps.books()).state("live")) == {"s"}


async def test_what_the_controller_published_ends_with_the_incarnation(steps: Steps) -> None:
    await steps.placed("s", asks=(3, 3), limits=(9, 9))
    await steps.store.mark(steps.pool, I0, "cordon")
    await steps.store.mark(steps.pool, I0, "drain")
    await steps.snapshot(inc="2")
    row = (await steps.books()).instances[I0]
    assert not {"need", "added", "cap", "budget", "drain"} & set(row)
    assert row["cordon"] == "1"


async def test_a_silent_instance_goes_and_is_forgotten_later(steps: Steps) -> None:
    placed = await steps.placed("s", lease_ttl_ms=3_600_000)
    await steps.pass_time(29_000)
    assert await steps.gone() == "ALIVE"
    await steps.pass_time(1_000)
    assert await steps.gone() == "GONE"
    books = await steps.books()
    assert (books.sessions["s"]["homeless"], books.instances[I0]["gone"]) == ("1", "1")
    await steps.pass_time(FORGET_MS)
    assert await steps.gone() == "FORGOTTEN"
    assert (await steps.books()).instances == {}
    assert isinstance(await steps.place("s", placed.token), Homeless)


async def test_an_instance_that_reports_again_is_back_without_its_sessions(steps: Steps) -> None:
    placed = await steps.placed("s", lease_ttl_ms=3_600_000)
    await steps.pass_time(31_000)
    await steps.gone()
    assert await steps.snapshot() == "OK"
    assert (await steps.moved("s", placed.token, I0)).moved


async def test_a_stopped_instance_is_gone_at_once(steps: Steps) -> None:
    await steps.placed("s")
    await steps.snapshot(state="STOPPED")
    assert await steps.gone() == "GONE"
    assert (await steps.books()).state("live") == {}


async def test_a_report_renews_the_lease_and_keeps_the_token(steps: Steps) -> None:
    placed = await steps.placed("s", lease_ttl_ms=20_000)
    await steps.backend.clock.advance(5_000)
    assert await steps.progress("s", placed.token) == Renewed("OK", 20_000, NOON + 25_000)


async def test_one_bad_report_never_spoils_the_others(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.held("waits")
    reports = [
        Progress("nobody", "1.x"),
        Progress("s", "1.x", context_tokens=16_000),
        Progress("waits", "1.x"),
        Progress("s", placed.token, context_tokens=320),
    ]
    answers = await steps.store.progress(steps.pool, reports)
    assert [a.status for a in answers] == ["UNKNOWN", "STALE", "UNKNOWN", "OK"]
    assert (await steps.books()).sessions["s"]["blocks"] == "20"


async def test_a_thousand_reports_fit_in_one_call(steps: Steps) -> None:
    placed = await steps.placed("s")
    answers = await steps.store.progress(steps.pool, [Progress("s", placed.token)] * 999 + [Progress("x", "y")])
    assert [a.status for a in answers] == ["OK"] * 999 + ["UNKNOWN"]


async def test_a_continuation_that_hits_and_one_that_misses(steps: Steps) -> None:
    """320 tokens of context are 20 blocks, the last of which ends in a token that was never computed as a prompt."""
    placed = await steps.placed("s")
    await steps.progress("s", placed.token, turn=0, context_tokens=320, cached_tokens=0)
    await steps.progress("s", placed.token, turn=1, context_tokens=640, cached_tokens=304)
    await steps.progress("s", placed.token, turn=1, context_tokens=650, cached_tokens=304)
    await steps.progress("s", placed.token, turn=2, context_tokens=900, cached_tokens=100)
    books = await steps.books()
    assert (books.counter("hexp", "a"), books.counter("hgot", "a")) == (304 + 624, 304 + 100)
    assert (books.instances[I0]["hexp:a"], books.instances[I0]["hgot:a"]) == ("928", "404")


async def test_the_first_turn_in_a_new_home_is_no_miss(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.progress("s", placed.token, turn=0, context_tokens=320, cached_tokens=0)
    await steps.snapshot(inc="2")
    moved = await steps.moved("s", placed.token, I0, inc="2")
    await steps.progress("s", moved.token, turn=1, context_tokens=640, cached_tokens=0)
    assert (await steps.books()).counter("hexp", "a") == 0


async def test_tool_gaps_are_summed_per_class(steps: Steps) -> None:
    placed = await steps.placed("s")
    for gap_ms in (3_000, 5_000):
        await steps.progress("s", placed.token, phase="TOOL_WAIT")
        await steps.backend.clock.advance(gap_ms - 1_000)
        await steps.progress("s", placed.token, phase="TOOL_WAIT")
        await steps.backend.clock.advance(1_000)
        await steps.place("s", placed.token)
    await steps.progress("s", placed.token, phase="TOOL_WAIT")
    await steps.backend.clock.advance(-9_000)
    await steps.progress("s", placed.token, phase="RUNNING")
    books = await steps.books()
    assert (books.counter("gapn", "a"), books.counter("gap", "a")) == (3, 8_000)


@pytest.mark.parametrize("state", ["PAUSED", "SLEEPING"])
async def test_paused_instances_are_alive(steps: Steps, state: str) -> None:
    placed = await steps.placed("s", lease_ttl_ms=3_600_000)
    for _ in range(10):
        await steps.snapshot(state=state)
        await steps.pass_time(20_000)
        assert await steps.gone() == "ALIVE"
    assert (await steps.progress("s", placed.token)).status == "OK"


async def test_instances_are_apart(steps: Steps) -> None:
    await steps.snapshot(I1)
    await steps.placed("s", I0)
    await steps.placed("t", I1)
    await steps.snapshot(I1, inc="2")
    assert set((await steps.books()).state("live")) == {"s"}
