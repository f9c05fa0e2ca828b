"""Once per epoch: estimates taken in, brakes, budgets, caps and needs given out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from moorage_server.core import controller, forecast
from moorage_server.core.config import MISA, MISA_T, POLICIES, SESSION, STATIC, ClassConfig
from moorage_server.core.controller import Happened, Outcome, Ruling, State
from moorage_server.core.estimates import Exposure
from moorage_server.core.survival import bin_of
from moorage_server.core.view import Class, Ended, Pool
from moorage_server.core.watch import Watched
from tests.unit.core.builders import NOW, config, instance, later, needs, pool, published, row


def rule(view: Pool, state: State | None = None) -> Ruling:
    return controller.epoch(state or State(), view, [], Happened()).rulings["a"]


def test_an_epoch_of_nothing() -> None:
    assert controller.epoch(State(), pool(known={}), [], Happened()) == Outcome({}, {}, {})


def test_an_empty_instance_of_an_unknown_pool() -> None:
    outcome = controller.epoch(State(), pool(instance(), known={}), [], Happened())
    assert outcome.needs == {"a": (0,) * forecast.WIDTH}
    assert outcome.rulings["a"].budget == 768
    assert outcome.rulings["a"].class_caps == {}


def test_without_blocks_there_is_no_budget_to_give() -> None:
    for blocks in (None, 0):
        ruling = rule(pool(instance(total_blocks=blocks)))
        assert (ruling.budget, ruling.cap, ruling.class_caps) == (0, 16, {})


def test_sessions_of_gone_instances_and_strangers_are_left_out() -> None:
    view = pool(instance("a"), instance("b", gone=True))
    table = controller.needs(view, [row(), row(home="b"), row(home="c")], view.published)
    assert table == {"a": (10,) * forecast.WIDTH}


def test_silent_instances_get_needs_but_no_ruling() -> None:
    outcome = controller.epoch(State(), pool(instance(seen_ms=NOW - 60_000)), [row()], Happened())
    assert (outcome.rulings, set(outcome.needs)) == ({}, {"a"})


def test_needs_are_per_instance_in_its_own_blocks() -> None:
    view = pool(instance("a"), instance("b", block_size=64))
    table = controller.needs(view, [row(640.0), row(640.0, home="b"), row(64.0, "agentic", "b")], view.published)
    assert (table["a"][0], table["b"][0]) == (40, 11)


def test_a_declared_final_context_is_charged_until_there_is_evidence() -> None:
    young = published(evidence=0.0, prior_tokens=640.0)
    view = pool(instance(), known={"rlvr": young})
    assert needs(view, row(32.0, declared=1600.0), row(32.0))[0] == 100 + 40


# Caps


def capped(policy: str, **changes: Any) -> Pool:
    """Demand of 6 sessions of 20 blocks, and 2 of 60: 30 blocks on the mean."""
    home = instance(by_class={"rlvr": 6, "agentic": 2}, sessions=8, **changes)
    classes = {"rlvr": Class(active=6), "agentic": Class(active=2)}
    priors = {"rlvr": ClassConfig(prior_context_tokens=320), "agentic": ClassConfig(prior_context_tokens=960)}
    return pool(home, settings=config(policy=policy, classes=priors), classes=classes, known={})


@pytest.mark.parametrize(("policy", "cap"), [(STATIC, 16), (SESSION, 25), (MISA, 25), (MISA_T, 25)])
def test_the_adaptive_cap_is_what_the_budget_holds(policy: str, cap: int) -> None:
    """768 / 30 = 25.6; a static one is a number."""
    assert rule(capped(policy)).cap == cap


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_the_brake_lowers_the_adaptive_cap(policy: str) -> None:
    """768 * 0.976 = 749 blocks of 30 each: 24."""
    state, view = State(), capped(policy, preemptions=0)
    assert rule(view, state).cap == 25
    ruling = rule(later(view, 1.0, preemptions=1, cap=25), state)
    assert (ruling.budget, ruling.cap) == (749, 24)


@pytest.mark.parametrize("policy", POLICIES)
def test_caps_keep_to_the_configured_bounds(policy: str) -> None:
    view = capped(policy)
    bounds = replace(view.config, min_sessions_per_instance=3, max_sessions_per_instance=9)
    assert rule(replace(view, config=bounds)).cap == 9
    assert rule(replace(view, config=replace(bounds, headroom=0.01, static_cap=1))).cap == 3


@pytest.mark.parametrize(("policy", "classes"), [(STATIC, 0), (SESSION, 0), (MISA, 2), (MISA_T, 2)])
def test_only_the_workload_aware_policies_give_quotas(policy: str, classes: int) -> None:
    assert len(rule(capped(policy)).class_caps) == classes


def test_residency_makes_the_difference_between_misa_and_misa_t() -> None:
    """rlvr stays for 20 s, agentic for 180 s. S = 120, 120: M = 384 each, K = 19, 6. R = 1 : 9: K = 3, 11."""
    view = capped(MISA)
    stays = {
        "rlvr": ClassConfig(prior_context_tokens=320, prior_residency_s=20.0),
        "agentic": ClassConfig(prior_context_tokens=960, prior_residency_s=180.0),
    }
    for policy, caps in ((MISA, {"rlvr": 19, "agentic": 6}), (MISA_T, {"rlvr": 3, "agentic": 11})):
        assert rule(replace(view, config=config(policy=policy, classes=stays))).class_caps == caps


def test_an_idle_instance_keeps_no_cap_down() -> None:
    """After the long tail of a step the cap is at 2. While nobody wants in, it rises: the KV budget alone decides."""
    caps: list[int] = []
    state, view = State(), pool(instance(cap=2), settings=config(classes={"rlvr": ClassConfig()}), known={})
    for second in range(12):
        view = later(view, second, cap=caps[-1] if caps else 2)
        caps.append(rule(view, state).cap)
    assert caps == [3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 19]


# What the engine reports


def test_the_allocation_rate_keeps_blocks_free_during_tool_gaps() -> None:
    """2400 + 800 tokens in 2 s are 100 blocks/s; with gaps of 1 s, 100 blocks of 768 stay free."""
    view = pool(instance(prefill_tokens=0, generation_tokens=0, by_class={"agentic": 1}), known={})
    view.classes["agentic"] = Class(active=1)
    state = State()
    assert rule(view, state).budget == 768
    view.classes["agentic"] = Class(active=1, gap_ms=4000, gaps=4)
    ruling = rule(later(view, 2.0, prefill_tokens=2400, generation_tokens=800), state)
    assert state.watched["a"].allocation == pytest.approx(100.0)
    assert ruling.budget == 668
    assert {name: value for name, value, _, _ in ruling.signals}["allocation_blocks_per_second"] == 100.0


def test_counters_of_the_engine_that_start_again_are_no_allocation() -> None:
    view, state = pool(instance(prefill_tokens=90_000, generation_tokens=0)), State()
    for second, tokens in ((0, 90_000), (1, 91_600), (2, 10), (2, 10), (3, 1610)):
        rule(later(view, second, prefill_tokens=tokens), state)
        assert state.watched["a"].allocation in (None, pytest.approx(100.0))


def test_the_prefill_backlog_drains_at_the_measured_rate() -> None:
    state, view = State(), pool(instance(backlog_blocks=1000, prefill_rate=1600.0))
    assert rule(view, state).drained_blocks == 0
    assert rule(later(view, 4.0), state).drained_blocks == 400


def test_watched_instances_are_forgotten_with_the_instance() -> None:
    state, view = State(), pool(instance())
    rule(view, state)
    controller.epoch(state, replace(view, instances={}), [], Happened())
    assert state.watched == {}


# What sessions did


def test_ends_are_counted_by_their_outcome() -> None:
    """COMPLETED and FAILED end a residency; only COMPLETED ends a context; ABORTED and PAUSED are censored."""
    state = State()
    ended = [Ended("rlvr", outcome, 64.0, 1000.0) for outcome in ("COMPLETED", "FAILED", "ABORTED", "PAUSED")]
    happened = Happened(ended=[*ended, Ended("rlvr", "ABORTED", 64.0, None)], grown={"rlvr": 500.0})
    controller.epoch(state, pool(instance(), known={}), [], happened)
    exposure = state.exposures["rlvr"]
    assert exposure.completions == 2.0
    assert exposure.survival.ended.sum() == 1.0
    assert exposure.survival.at_risk.max() == 4.0
    assert exposure.grown_tokens == 500.0


@pytest.mark.parametrize(("declared", "final"), [(900.0, 900.0), (math.nan, 2000.0)])
def test_an_unreported_final_context_is_not_none(declared: float, final: float) -> None:
    """It got as far as it declared, else as far as the prior says: growth that nobody reported is not zero growth."""
    state, classes = State(), {"rlvr": ClassConfig(prior_context_tokens=2000)}
    happened = Happened(ended=[Ended("rlvr", "COMPLETED", 100.0, None, declared)])
    controller.epoch(state, pool(instance(), settings=config(classes=classes), known={}), [], happened)
    assert state.exposures["rlvr"].grown_tokens == final - 100.0
    assert state.exposures["rlvr"].survival.ended[bin_of(final)] == 1.0


def test_declared_contexts_become_the_prior_of_the_class() -> None:
    happened = Happened(declared=[("rlvr", 1000.0), ("rlvr", 600.0)])
    found = controller.epoch(State(), pool(instance(), known={}), [], happened).published["rlvr"]
    assert (found.prior_tokens, found.reference_blocks) == (800.0, 50.0)


def test_quota_blocks_are_summed_over_instances() -> None:
    view = pool(
        instance("a", by_class={"rlvr": 1}), instance("b", total_blocks=300, by_class={"rlvr": 1}),
        classes={"rlvr": Class(active=2)}, known={},
    )  # fmt: skip
    assert controller.epoch(State(), view, [], Happened()).published["rlvr"].quota_blocks == pytest.approx(1068.0)


def test_a_clock_that_stands_or_jumps_back_does_no_harm() -> None:
    state, view = State(), pool(instance(backlog_blocks=100), classes={"rlvr": Class(active=1, accrued_ms=NOW)})
    for second in (0, 0, -10, 5):
        ruling = rule(later(view, second), state)
        assert ruling.drained_blocks >= 0
        assert ruling.brake == 1.0
    assert state.exposures["rlvr"].session_s == pytest.approx(5.0)


def test_tokens_of_any_size_are_counted() -> None:
    view = pool(instance(block_size=1, total_blocks=2**40, used_blocks=2**40, max_context=None))
    assert needs(view, row(2.0**40), row(2.0**40))[0] == 2**41
    assert rule(view).budget == 2**40


def roomy() -> State:
    """Of an engine that serves many as fast as few: one more session brings all of its pace."""
    watched = Watched("1")
    for look in range(60):
        watched.pace.take(4.0 + look % 9, (4.0 + look % 9) / 0.008, 1.0)
    return State(watched={"a": watched})


def test_beyond_the_budget_until_somebody_comes_back_for_what_is_cached() -> None:
    """Callers that never report a tool gap have later turns too: a gateway that asks for each placement, for one."""
    alone = pool(instance(by_class={"rlvr": 4}, sessions=4), classes={"rlvr": Class(active=4)})
    rows = [row(), row(), row()]
    assert controller.epoch(roomy(), alone, [*rows, row()], Happened()).rulings["a"].budget > 1100
    returns = controller.epoch(roomy(), alone, [*rows, row(returns=True)], Happened())
    assert returns.rulings["a"].budget <= 768
    seen = Class(active=4, expected_hit_tokens=100, found_hit_tokens=90)
    hits = replace(alone, classes={"rlvr": seen})
    state = roomy()
    state.exposures["rlvr"] = Exposure(seen=Class())
    assert controller.epoch(state, hits, [*rows, row()], Happened()).rulings["a"].budget <= 768
