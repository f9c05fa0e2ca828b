"""Weight updates: sessions stay booked, nothing expires, and misses after them count against nobody."""

from __future__ import annotations

import pytest

from moorage_server.core.config import PoolConfig
from moorage_server.core.view import Instance
from tests.contract.steps import EXCUSED_MS, I0, I1, NOON, Steps


async def instance(steps: Steps, key: str = I0) -> Instance:
    """The instance as a view shows it."""
    return (await steps.store.view(steps.pool, PoolConfig())).instances[key]


async def kinds(steps: Steps, kind: str) -> list[str]:
    """Reasons of the events of one kind, oldest first."""
    found = await steps.store.events(steps.pool, "0", 1_000)
    return [e.fields["reason"] for e in found if e.fields["kind"] == kind]


async def test_sessions_stay_booked_through_an_update(steps: Steps) -> None:
    placed = await steps.placed("s")
    before = await steps.books()
    assert await steps.weights(True, "2", hold=True)
    assert (await instance(steps)).updating
    assert (await steps.place("s", placed.token)).instance == I0
    assert await steps.weights(False, "2", policy_version=2)
    after = await steps.books()
    assert after.instances[I0]["blocks"] == before.instances[I0]["blocks"]
    found = await instance(steps)
    assert (found.updating, found.weight_version, found.policy_version, found.epoch) == (False, "2", 2, 1)
    assert await kinds(steps, "weights") == ["begun", "ended"]


async def test_new_sessions_keep_away_if_so_configured(steps: Steps) -> None:
    await steps.weights(True, "2", hold=True)
    await steps.held("s", I0)
    assert (await steps.books()).sessions["s"]["reason"] == "WEIGHT_UPDATE"
    await steps.weights(False, "2")
    await steps.placed("s", I0)
    await steps.weights(True, "3", hold=False)
    await steps.placed("t", I0)


async def test_begin_and_end_are_idempotent(steps: Steps) -> None:
    assert await steps.weights(True, "2")
    assert not await steps.weights(True, "2")
    assert await steps.weights(False, "2")
    assert not await steps.weights(False, "2")
    assert (await instance(steps)).epoch == 1
    assert not await steps.weights(True, "2", instance="0|nobody")


async def test_an_update_that_failed_keeps_the_old_version(steps: Steps) -> None:
    await steps.snapshot(inc="2", weight_version="1", policy_version=1)
    await steps.weights(True, "2")
    await steps.weights(False, reason="failed")
    found = await instance(steps)
    assert (found.weight_version, found.policy_version, found.updating) == ("1", 1, False)


@pytest.mark.parametrize("told_first", [True, False])
async def test_the_engines_word_and_the_trainers_mean_the_same_version(steps: Steps, told_first: bool) -> None:
    """Whoever speaks first; an engine that repeats itself begins no epoch."""
    await steps.snapshot(inc="2", weight_version="1", policy_version=1)
    if told_first:
        await steps.weights(False, "step-2", policy_version=2)
    await steps.snapshot(inc="2", weight_version="step-2")
    await steps.snapshot(inc="2", weight_version="step-2")
    if not told_first:
        await steps.weights(True, "step-2")
        await steps.weights(False, "step-2", policy_version=2)
    found = await instance(steps)
    assert (found.weight_version, found.policy_version) == ("step-2", 2)
    assert found.epoch == (1 if told_first else 2)


async def test_an_engine_that_does_not_learn_its_version_does_not_undo_what_was_told(steps: Steps) -> None:
    """A trainer that loads weights past the engine's own endpoints: it goes on saying what it always said."""
    await steps.snapshot(inc="2", weight_version="default")
    await steps.weights(False, "7", policy_version=7)
    await steps.snapshot(inc="2", weight_version="default")
    assert (await instance(steps)).policy_version == 7


async def test_other_instances_learn_what_a_version_means_from_the_first(steps: Steps) -> None:
    await steps.snapshot(I1, inc="2", weight_version="step-1")
    await steps.weights(False, "step-2", policy_version=2)
    await steps.snapshot(I1, inc="2", weight_version="step-2")
    assert (await instance(steps, I1)).policy_version == 2


async def test_a_miss_after_new_weights_is_no_shortfall(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.turn("s", placed.token, 0, 320, 0)
    await steps.weights(False, "2")
    await steps.turn("s", placed.token, 1, 640, 0)
    assert (await steps.books()).counter("hexp", "a") == 0
    await steps.turn("s", placed.token, 2, 900, 0)
    assert (await steps.books()).counter("hexp", "a") == 624


async def test_turns_that_end_while_weights_are_loaded_say_nothing(steps: Steps) -> None:
    placed = await steps.placed("s")
    await steps.turn("s", placed.token, 0, 320, 0)
    await steps.weights(True, "2")
    await steps.turn("s", placed.token, 1, 640, 0)
    assert (await steps.books()).counter("hexp", "a") == 0


async def test_a_cleared_cache_is_an_epoch_and_leaves_nothing_to_reuse(steps: Steps) -> None:
    await steps.snapshot(cache_epoch=5)
    placed = await steps.placed("s")
    await steps.turn("s", placed.token, 0, 320, 0)
    assert (await steps.place("s", placed.token)).cached_tokens == 320
    await steps.snapshot(cache_epoch=6)
    assert (await steps.place("s", placed.token)).cached_tokens == 0
    assert (await steps.placed("s", I0)).cached_tokens == 0
    await steps.turn("s", placed.token, 1, 640, 0)
    assert (await steps.books()).counter("hexp", "a") == 0
    assert (await steps.place("s", placed.token)).cached_tokens == 640


async def test_weights_alone_leave_the_cache_alone(steps: Steps) -> None:
    """vLLM keeps its cache through an update; what was cleared, the trainer or the engine says."""
    placed = await steps.placed("s")
    await steps.turn("s", placed.token, 0, 320, 0)
    await steps.weights(False, "2")
    assert (await steps.place("s", placed.token)).cached_tokens == 320
    await steps.weights(False, "3", cleared=True)
    assert (await steps.place("s", placed.token)).cached_tokens == 0


async def test_a_new_incarnation_begins_without_epochs(steps: Steps) -> None:
    await steps.snapshot(inc="2", weight_version="3", policy_version=3, cache_epoch=1)
    await steps.weights(True, "4")
    await steps.snapshot(inc="3", cache_epoch=9)
    found = await instance(steps)
    assert (found.epoch, found.policy_version, found.weight_version) == (0, None, "")
    assert found.updating, "the trainer still loads"


@pytest.mark.parametrize("how", ["update", "PAUSED", "SLEEPING"])
async def test_leases_run_on_while_an_engine_stands_still(steps: Steps, how: str) -> None:
    """Nobody can do anything; a caller that is really gone is found out afterwards."""
    await steps.snapshot(I1)
    await steps.placed("s", lease_ttl_ms=5_000)
    await steps.placed("other", I1, lease_ttl_ms=5_000)
    if how == "update":
        await steps.weights(True, "2")
    else:
        await steps.snapshot(state=how)
    await steps.pass_time(6_000)
    assert await steps.expire() == 1
    assert set((await steps.books()).sessions) == {"s"}
    if how == "update":
        await steps.weights(False, "2")
    else:
        await steps.snapshot(state="SERVING")
    await steps.pass_time(6_000)
    assert await steps.expire() == 1


async def test_an_engine_that_never_serves_again_holds_nobody_for_ever(steps: Steps) -> None:
    await steps.placed("s", lease_ttl_ms=5_000)
    await steps.snapshot(state="PAUSED")
    await steps.pass_time(6_000)
    assert await steps.expire() == 0
    await steps.pass_time(EXCUSED_MS)
    assert await steps.expire() == 1


async def test_the_mark_alone_keeps_newcomers_away_not_the_cap(steps: Steps) -> None:
    await steps.weights(True, "2", hold=False)
    for n in range(3):
        await steps.placed(f"s{n}", I0)
    await steps.held("t", I0, cap=3)


async def test_a_trainer_that_numbers_its_versions_means_those_numbers(steps: Steps) -> None:
    """A name that looks like a number, a date say, is not one: not of those that come later, nor before the end."""
    await steps.weights(False, "20261130", policy_version=7, told=True)
    await steps.snapshot(I1, weight_version="20261130", policy_version=20_261_130)
    assert (await instance(steps, I1)).policy_version == 7
    await steps.snapshot(I1, weight_version="20261201", policy_version=20_261_201)
    assert (await instance(steps, I1)).policy_version is None


async def test_another_version_is_another_update_with_its_own_time(steps: Steps) -> None:
    await steps.weights(True, "2")
    begun = (await instance(steps)).updating_since_ms
    await steps.backend.clock.advance(3_000)
    assert not await steps.weights(True, "2")
    assert (await instance(steps)).updating_since_ms == begun
    assert not await steps.weights(True, "3")
    assert (await instance(steps)).updating_since_ms == (begun or 0) + 3_000


async def test_who_comes_while_the_pool_loads_weights_loads_them_too(steps: Steps) -> None:
    await steps.weights(True, "2", instance="", hold=True)
    await steps.snapshot(I1)
    assert (await instance(steps, I1)).update_holds
    await steps.weights(False, "2", instance="")
    await steps.snapshot("0|later")
    assert not (await instance(steps, "0|later")).updating


async def test_after_an_update_everybody_gets_a_whole_lease(steps: Steps) -> None:
    """A caller that stood still with its engine has to hear first that it works again."""
    await steps.placed("s", lease_ttl_ms=5_000)
    await steps.weights(True, "2")
    await steps.backend.clock.advance(4_900)
    await steps.weights(False, "2")
    await steps.placed("t", I0, lease_ttl_ms=5_000)
    await steps.snapshot(state="PAUSED")
    await steps.backend.clock.advance(4_900)
    await steps.snapshot(state="SERVING")
    assert set((await steps.books()).leases.values()) == {float(NOON + 9_800 + 5_000)}
