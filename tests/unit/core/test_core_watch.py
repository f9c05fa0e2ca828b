"""What the controller makes of one instance: standstill, quiet after new weights, and what it says of its signals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moorage_server.core import admission, controller
from moorage_server.core.controller import Happened, Ruling, State
from moorage_server.core.view import STALE, Pool
from tests.unit.core.builders import NOW, ask, instance, later, needing, needs, pool, published, row

BUSY: dict[str, Any] = {"running": 3, "prefix_query_tokens": 10, "prefill_tokens": 10, "generation_tokens": 10}


def rulings(view: Pool, seconds: int, **changes: Any) -> list[Ruling]:
    """One epoch per second on a pool whose instance stays as it is."""
    state = State()
    return [controller.epoch(state, later(view, n, **changes), [], Happened()).rulings["a"] for n in range(seconds)]


def beliefs(ruling: Ruling) -> dict[str, str]:
    """What the policy makes of each signal."""
    return {name: why for name, _, _, why in ruling.signals}


def test_an_engine_that_answers_and_does_nothing_stands_still() -> None:
    found = rulings(pool(instance(**BUSY)), 40)
    assert [r.stalled for r in found] == [False] * 30 + [True] * 10


@pytest.mark.parametrize(
    "changes", [{"running": 0}, {"running": None}, {"generation_tokens": None}, {"state": "PAUSED"}]
)
def test_idle_paused_and_unknown_are_no_standstill(changes: dict[str, Any]) -> None:
    assert not any(r.stalled for r in rulings(pool(instance(**{**BUSY, **changes})), 40))


def test_an_engine_that_moves_again_works_again() -> None:
    state, view = State(), pool(instance(**BUSY))
    found = [controller.epoch(state, later(view, n), [], Happened()).rulings["a"] for n in range(35)]
    assert found[-1].stalled
    after = controller.epoch(state, later(view, 36, generation_tokens=11), [], Happened()).rulings["a"]
    assert not after.stalled


def test_silence_is_no_standstill() -> None:
    """No snapshot for half a minute: stale by its age, and whether it works is unknown."""
    state, view = State(), pool(instance(**BUSY))
    for second in range(29):
        seen = replace(view, now_ms=NOW + 1000 * second)
        assert not controller.epoch(state, seen, [], Happened()).rulings["a"].stalled


def test_a_stalled_instance_takes_only_what_is_proven() -> None:
    """Its blocks would suffice by the forecast, but who leaves an engine that stands still?"""
    proven = (50, 50, 50, 50, 50, 765)
    free = pool(instance(sessions=2, need=proven))
    stalled = pool(instance(sessions=2, need=proven, stalled=True))
    assert admission.decide(free, ask()).candidates
    verdict = admission.decide(stalled, ask())
    assert (verdict.candidates, verdict.reason) == ((), "STALE_SNAPSHOT")
    assert verdict.detail.startswith("a stands still; ")
    assert stalled.freshness(stalled.instances["a"]) == STALE


def test_a_snapshot_that_was_old_when_it_came_is_stale() -> None:
    view = pool(instance(observed_age_ms=4_000, sessions=1, need=needing(768)))
    assert view.freshness(view.instances["a"]) == STALE
    assert "is known as it was 4.0 s ago" in admission.decide(view, ask()).detail


def test_sessions_do_not_grow_where_nothing_runs() -> None:
    waits = row(1600.0, reported_ms=NOW - 10_000)
    grows = {"rlvr": published(growth=160.0)}
    assert needs(pool(instance(), known=grows), waits)[0] == 200
    assert needs(pool(instance(state="PAUSED"), known=grows), waits)[0] == 100
    assert needs(pool(instance(stalled=True), known=grows), waits)[0] == 100


def test_new_weights_quiet_the_brake_of_that_instance_alone() -> None:
    state = State()
    view = pool(instance("a", preemptions=0), instance("b", preemptions=0))
    controller.epoch(state, view, [], Happened())
    after = later(view, 1.0, preemptions=5)
    after.instances["a"].epoch = 1
    found = controller.epoch(state, after, [], Happened()).rulings
    assert (found["a"].brake, found["b"].brake) == (1.0, pytest.approx(0.976))
    assert beliefs(found["a"])["brake"] == "nothing brakes for 8 s more: weights or cache changed"


def test_nothing_brakes_while_weights_are_loaded() -> None:
    state, view = State(), pool(instance(preemptions=0))
    for second in range(20):
        seen = later(view, second, preemptions=second, waiting_capacity=4, updating_since_ms=NOW)
        ruling = controller.epoch(state, seen, [], Happened()).rulings["a"]
        assert ruling.brake == 1.0
        assert beliefs(ruling)["brake"] == "nothing brakes: weights are being loaded"


def test_signals_say_how_old_they_are() -> None:
    state = State()
    view = pool(instance(hits={"rlvr": (0, 0)}, waiting_capacity=0))
    controller.epoch(state, view, [], Happened())
    seen = later(view, 4.0, hits={"rlvr": (1000, 900)}, hits_at_ms=NOW + 1_000, observed_age_ms=500)
    signals = {n: (v, a) for n, v, a, _ in controller.epoch(state, seen, [], Happened()).rulings["a"].signals}
    assert signals["continuation_hit_rate"] == (0.9, 3.0)
    assert signals["continuation_hit_rate.rlvr"] == (0.9, 3.0)
    assert signals["waiting_for_capacity"] == (0.0, 0.5)
    assert signals["engine_hit_rate"] == (None, None)


def test_where_a_session_failed_nobody_new_goes_until_it_is_heard_of() -> None:
    failed = admission.decide(pool(instance(failed_at_ms=NOW)), ask())
    assert (failed.candidates, failed.reason) == ((), "STALE_SNAPSHOT")
    assert failed.detail == "a session failed on a since it was last heard of"
    assert admission.decide(pool(instance(failed_at_ms=NOW - 3_000)), ask()).candidates


def paces(*looks: dict[str, Any]) -> list[float]:
    """What the pace is made of after looks a second apart: looks that counted, and seconds per step."""
    state, view = State(), pool(instance(**BUSY))
    for second, changes in enumerate(looks):
        controller.epoch(state, later(view, second, **changes), [], Happened())
    pace = state.watched["a"].pace
    return [round(pace.looks, 3), round(pace.t / pace.steps, 6) if pace.steps else 0.0]


def test_tokens_generated_while_the_gauge_was_not_told_are_nobodys_pace() -> None:
    """A minute of tokens in one second would be an engine sixty times as fast."""
    silent = [{"running": None, "generation_tokens": 110 + 100 * n} for n in range(60)]
    again: list[dict[str, Any]] = [{"generation_tokens": 6_200}, {"generation_tokens": 6_300}]
    assert paces({"generation_tokens": 10}, *silent, *again) == [1.0, 0.03]


def test_a_counter_that_began_anew_is_another_engine() -> None:
    before: list[dict[str, Any]] = [{"generation_tokens": 1_000 * n} for n in range(1, 30)]
    assert paces(*before)[0] > 20
    assert paces(*before, {"generation_tokens": 5}) == [0.0, 0.0]
    assert paces(*before, {"generation_tokens": 5}, {"generation_tokens": 105}) == [1.0, 0.03]


def test_the_pace_of_a_former_incarnation_is_forgotten() -> None:
    state, view = State(), pool(instance(**BUSY))
    for second in range(30):
        controller.epoch(state, later(view, second, generation_tokens=1_000 * second), [], Happened())
    assert state.watched["a"].pace.looks > 20
    controller.epoch(state, later(view, 30, generation_tokens=40_000, incarnation="2"), [], Happened())
    assert state.watched["a"].pace.looks == 0
