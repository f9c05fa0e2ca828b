"""The field notes of policy.md section 4, one by one: where a naive reading of the policy fails."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from moorage_server.core import admission, controller, estimates, placement, pressure, queue
from moorage_server.core.config import MISA_T, ClassConfig
from moorage_server.core.controller import Happened, State
from moorage_server.core.estimates import Exposure
from moorage_server.core.view import PAUSED, Class, Instance
from tests.unit.core.builders import (
    NOW,
    ask,
    config,
    instance,
    later,
    line,
    mixture,
    needing,
    needs,
    pool,
    published,
    row,
)


def test_note_01_completions_lie() -> None:
    """Ten sessions of 40 blocks: two short ones of 5 s and 8 blocks are over first. Completions say 8 blocks and 5 s.

    Exposure: Z = 2 * 5 * 8 + 8 * 100 * 40 = 32080, D = 2 * 5 + 8 * 100 = 810: 39.6 blocks, at 2/6 of evidence.
    """
    exposure = Exposure(block_s=32_080.0, session_s=810.0, completions=2.0)
    kbar = estimates.reference_blocks(exposure, prior_blocks=64.0)
    assert kbar == pytest.approx((2 * 32_080 / 810 + 4 * 64.0) / 6)
    assert estimates.residency_s(exposure, 60.0) == pytest.approx((810 + 4 * 60) / 6)
    assert kbar > 5 * 8
    assert estimates.evidence(exposure) == pytest.approx(1 / 3)


def test_note_01_no_completion_at_all_is_not_zero() -> None:
    found = estimates.summarise(
        Exposure(session_s=500.0, block_s=500.0),
        ClassConfig(prior_context_tokens=640),
        starts=np.array([16.0]),
        contexts=np.array([20.0]),
        block_size=16.0,
        max_context=8192,
    )
    assert (found.reference_blocks, found.evidence) == (40.0, 0.0)
    assert found.residency_s > 60.0


def test_note_02_product_divides_measurement_limits() -> None:
    """The product gives rlvr 15 of 19 sessions. Whether one more fits is what the blocks say, not the quota."""
    home = instance(by_class={"rlvr": 16, "agentic": 1}, sessions=17, class_caps={"rlvr": 15, "agentic": 4}, cap=40)
    assert admission.decide(pool(replace(home, need=needing(700))), ask()).candidates
    under = replace(home, by_class={"rlvr": 3}, sessions=3, need=needing(765))
    verdict = admission.decide(pool(under), ask())
    assert (verdict.candidates, verdict.reason) == ((), "KV_BUDGET")


def test_note_02_the_engines_own_count_overrules_the_ledger() -> None:
    """One session of 10 blocks is booked, the engine uses 500: 490 blocks belong to somebody all the same."""
    assert needs(pool(instance(used_blocks=500)), row())[0] == 500
    assert needs(pool(instance(used_blocks=5)), row())[0] == 10
    assert needs(pool(instance(used_blocks=None)), row())[0] == 10


def test_note_02_the_brake_overrules_the_model() -> None:
    view, state = pool(instance(preemptions=0, sessions=5, by_class={"rlvr": 5})), State()
    before = controller.epoch(state, view, [], Happened()).rulings["a"]
    after = controller.epoch(state, later(view, 1.0, preemptions=1), [], Happened()).rulings["a"]
    assert (before.budget, after.budget) == (768, int(768 * 0.976))


def test_note_03_usage_does_not_show_pressure() -> None:
    """Half the blocks are free by the engine's own word, and turns do not find their context: the brake acts."""
    view, state, rulings = pool(instance(used_blocks=380)), State(), []
    for second in range(8):
        seen = later(view, second, hits={"agentic": (9000 * second, 2700 * second)})
        rulings.append(controller.epoch(state, seen, [], Happened()).rulings["a"])
    assert rulings[-1].brake == pytest.approx(0.88)
    assert rulings[-1].pressure == pytest.approx(0.97 - 0.3)
    beliefs = {name: why for name, _, _, why in rulings[-1].signals}
    assert beliefs["brake"].startswith("continuation hit rate 0.30; listens for ")
    assert beliefs["continuation_hit_rate.agentic"] == "over 8 s, 18900 of 63000 tokens, healthy is 0.97"


def test_note_03_and_is_measured_per_class() -> None:
    view, state = pool(instance(), classes={"agentic": Class(), "rlvr": Class()}), State()
    controller.epoch(state, view, [], Happened())
    view.classes["agentic"] = Class(expected_hit_tokens=10_000, found_hit_tokens=4000)
    found = controller.epoch(state, later(view, 1.0), [], Happened()).published
    assert found["agentic"].hit_rate == pytest.approx(0.4)
    assert found["rlvr"].hit_rate is None


def test_note_04_unknown_is_never_zero_nor_idle() -> None:
    """Blocks not reported: no session. No counters: no reading. A stale page: only what the ledger proves."""
    unknown = admission.decide(pool(instance(total_blocks=None)), ask())
    assert (unknown.candidates, unknown.reason) == ((), "STALE_SNAPSHOT")
    ruling = controller.epoch(State(), pool(instance(used_blocks=None)), [], Happened()).rulings["a"]
    assert {name: value for name, value, _, _ in ruling.signals if name != "brake"} == dict.fromkeys(
        (
            "continuation_hit_rate",
            "engine_hit_rate",
            "preemptions",
            "waiting_for_capacity",
            "allocation_blocks_per_second",
            "stalled",
            "gain",
        )
    )
    proven = (50, 50, 50, 50, 50, 765)
    stale = admission.decide(pool(instance(seen_ms=NOW - 4000, sessions=2, need=proven)), ask())
    assert (stale.candidates, stale.reason) == ((), "STALE_SNAPSHOT")


def test_note_04_between_snapshots_only_the_ledger_moves() -> None:
    """Ninety ask at once on one snapshot: each admission counts before the next is decided."""
    view = pool(
        instance(sessions=1, need=needing(568), used_blocks=0),
        queues={"rlvr": line(*(ask(f"s{n}") for n in range(90)))},
    )
    assert sum(bool(v.candidates) for v in admission.plan(view)) == 20


def test_note_04_a_class_that_no_epoch_has_seen_is_charged_its_prior() -> None:
    """Sessions of a new class come between two epochs: the refresh in between may not forget them."""
    view = pool(instance(max_context=4096), known={})
    assert needs(view, row(16.0, "new"), row(16.0, "new"))[0] == 2 * 256


def test_note_05_shrinks_fast_grows_slowly() -> None:
    """A bite takes 2.4 % at least; the seconds of its latch give nothing back, each one after them 0.8 points."""
    bitten = pressure.step(
        pressure.Brake(samples=[pressure.Sample(9.0, {}, None, None, 0, None)]),
        pressure.Sample(10.0, {}, None, None, 1, None),
        1.0,
        0.9,
    )
    assert bitten.factor == pytest.approx(0.976)
    factor, released = bitten.factor, bitten
    for second in range(11, 24):
        released = pressure.step(released, pressure.Sample(float(second), {}, None, None, 1, None), 1.0, 0.9)
        assert released.factor - factor == pytest.approx(0.0 if second < 22 else 0.008)
        factor = released.factor


def test_note_05_caps_move_by_bounded_steps_and_taper_towards_the_target() -> None:
    up, cap = [], 10
    for _ in range(12):
        cap = pressure.move_cap(cap, 26, least=1, most=0)
        up.append(cap)
    assert up == [12, 14, 16, 19, 22, 26, 26, 26, 26, 26, 26, 26]


def test_note_05_every_published_cap_keeps_to_the_step() -> None:
    """Demand and blocks jump about; session caps and class caps follow by a fifth per epoch, or one."""
    draw, state = np.random.default_rng(5), State()
    view = pool(instance(), settings=config(policy=MISA_T), known={})
    for _ in range(60):
        counts = {name: int(draw.integers(1, 60)) for name in ("agentic", "rlvr", "rlhf")}
        view = replace(view, classes={n: Class(active=c, held=int(draw.integers(0, 90))) for n, c in counts.items()})
        view = later(view, 1.0, by_class=counts, total_blocks=int(draw.integers(100, 5000)))
        ruling = controller.epoch(state, view, [], Happened()).rulings["a"]
        home = view.instances["a"]
        for old, new in [(home.cap, ruling.cap), *((home.class_caps.get(n), c) for n, c in ruling.class_caps.items())]:
            assert old is None or abs(new - old) <= max(1, old / 5)
        home.cap, home.class_caps = ruling.cap, ruling.class_caps


def test_note_05_living_sessions_are_never_in_question() -> None:
    """A cap below what lives on an instance stops admissions; it names nobody who has to go."""
    home = instance(sessions=30, cap=10, budget=100, need=needing(700))
    assert next(admission.plan(pool(home, queues={"rlvr": line(ask())}))).reason == "POOL_CAP"


def test_note_06_footprints_grow() -> None:
    """Twenty sessions of 10 blocks hold 200 of 768 now; growing by 16 tokens/s, they hold 800 in 30 s."""
    view = pool(instance(sessions=20, used_blocks=200), known={"rlvr": published(growth=16.0)})
    need = needs(view, *(row() for _ in range(20)))
    assert (need[0], need[4]) == (200, 800)
    verdict = admission.decide(replace(view, instances={"a": replace(view.instances["a"], need=need)}), ask())
    assert (verdict.candidates, verdict.reason) == ((), "KV_BUDGET")
    assert "800 blocks needed + 40 asked > 768 on a" in verdict.detail


def test_note_06_growth_runs_on_between_reports_up_to_the_ceiling() -> None:
    view = pool(instance(max_context=300), known={"rlvr": published(growth=16.0)})
    old = row(reported_ms=NOW - 5000)
    assert needs(view, old)[0] == math.ceil((160 + 80) / 16)
    assert needs(view, row(reported_ms=NOW - 5000, growing=False))[0] == 10
    assert needs(view, row(reported_ms=NOW - 500_000))[4] == math.ceil(300 / 16)
    assert needs(view, row(reported_ms=NOW - 500_000, ceiling=200.0))[4] == math.ceil(200 / 16)


def test_note_07_siblings_share() -> None:
    """A prompt of 1600 tokens: 100 blocks for the first sample, one for the second where the first one lives."""
    home, other = instance("a", groups={"g": 100}, sessions=1), instance("b", sessions=1)
    verdict = admission.decide(pool(home, other), ask("s2", prompt=1600, group_id="g"))
    assert [(c.instance, c.asks[0], c.expected_cached, c.prefill) for c in verdict.candidates] == [
        ("a", 1, 1600, 0),
        ("b", 100, 0, 100),
    ]
    assert all(c.shared == 100 for c in verdict.candidates)


def test_note_07_the_shared_part_is_charged_once_per_instance() -> None:
    """The prefix is its own line of 100 blocks; three samples add a block each, whatever the prompt is."""
    view = pool(instance(shared_blocks=100))
    assert needs(view, *(row(1616.0, shared_blocks=100) for _ in range(3)))[0] == 103


def test_note_07_a_group_that_enters_together_shares_from_the_second_on() -> None:
    group = [ask(f"s{n}", prompt=1600, group_id="g") for n in range(8)]
    view = pool(instance(sessions=1, need=needing(600)), queues={"rlvr": line(*group)})
    placed = [v for v in admission.plan(view) if v.candidates]
    assert [v.candidates[0].asks[0] for v in placed] == [100] + [1] * 7


def test_note_07_siblings_prefer_each_others_home_even_if_it_is_fuller() -> None:
    home = instance("b", groups={"g": 100}, need=needing(500), budget=768)
    empty = instance("a", need=needing(0), budget=768)
    wanted = ask(prompt=1600, group_id="g")
    assert [i.key for i in placement.ranked(wanted, [empty, home])] == ["b", "a"]


def test_note_08_a_paused_pool_holds_for_the_weight_update() -> None:
    """And bookings survive: a paused instance is alive, its needs are still computed."""
    view = pool(instance(state=PAUSED))
    assert admission.decide(view, ask()).reason == "WEIGHT_UPDATE"
    assert needs(view, row())[0] == 10


def test_note_09_young_incarnation_starts_fresh() -> None:
    """Brake, counters and rates belong to the incarnation; the new one under the old name has none of them."""
    view, state = pool(instance(preemptions=0, prefill_tokens=0, generation_tokens=0)), State()
    controller.epoch(state, view, [], Happened())
    busy = later(view, 1.0, preemptions=5, prefill_tokens=64_000, generation_tokens=1000)
    controller.epoch(state, busy, [], Happened())
    assert state.watched["a"].brake.factor == pytest.approx(0.976)
    assert state.watched["a"].allocation == pytest.approx(65_000 / 16)
    reborn = later(view, 2.0, incarnation="2", preemptions=0, prefill_tokens=100, generation_tokens=0)
    ruling = controller.epoch(state, reborn, [], Happened()).rulings["a"]
    assert (ruling.brake, state.watched["a"].incarnation) == (1.0, "2")
    assert state.watched["a"].allocation is None


def test_note_09_silence_of_our_own_is_nobodys_death() -> None:
    view = pool(instance(seen_ms=NOW - 60_000))
    assert view.alive() == []
    assert [i.key for i in replace(view, in_grace=True).alive()] == ["a"]
    assert replace(view, in_grace=True).freshness(view.instances["a"]) == "STALE"


def test_note_10_first_come_first_served_inside_a_class() -> None:
    """A retry, and a smaller session behind a larger one, do not overtake."""
    home = instance(sessions=1, budget=100, need=needing(80))
    queues = {"rlvr": line(ask("large", prompt=1600), ask("small", prompt=16))}
    verdicts = list(admission.plan(pool(home, queues=queues)))
    assert [(v.ask.session_id, bool(v.candidates)) for v in verdicts] == [("large", False)]
    assert admission.decide(pool(home, queues=queues), ask("small", prompt=16)).reason == "QUEUED_BEHIND"


def test_note_10_between_classes_the_largest_deficit_first() -> None:
    shares = config(classes=mixture(agentic=0.5, rlvr=0.5))
    queues = {"agentic": line(ask("a", "agentic")), "rlvr": line(ask("b", "rlvr"))}
    classes = {"agentic": Class(virtual_time=6 * queue.UNIT), "rlvr": Class(virtual_time=4 * queue.UNIT)}
    view = pool(instance(), settings=shares, queues=queues, classes=classes)
    assert [v.ask.session_id for v in admission.plan(view)] == ["b", "a"]


def test_note_10_what_does_not_fit_is_passed_but_not_for_ever() -> None:
    """rlvr goes first and does not fit: agentic sessions may pass until it is twelve behind; then blocks are saved."""
    home = instance(sessions=1, budget=700, need=needing(300))
    queues = {"rlvr": line(ask("big", prompt=8000)), "agentic": line(*(ask(f"a{n}", "agentic", 16) for n in range(30)))}
    shares = config(classes=mixture(rlvr=0.5, agentic=0.5))
    classes = {"rlvr": Class(held=1), "agentic": Class(held=30, virtual_time=1)}
    view = pool(home, settings=shares, queues=queues, classes=classes)
    assert sum(bool(v.candidates) for v in admission.plan(view)) == 13
    assert sum(bool(v.candidates) for v in admission.plan(replace(view, config=replace(shares, max_passes=3)))) == 4


HOLDS: dict[str, tuple[Instance, ...]] = {
    "NO_INSTANCE": (),
    "WEIGHT_UPDATE": (instance(state=PAUSED),),
    "DRAINING": (instance(cordoned=True),),
    "POOL_CAP": (instance(sessions=5, cap=5),),
    "KV_BUDGET": (instance(sessions=5, need=needing(760)),),
    "STALE_SNAPSHOT": (instance(total_blocks=None),),
}


@pytest.mark.parametrize("reason", HOLDS)
def test_note_11_every_hold_explains_itself(reason: str) -> None:
    verdict = admission.decide(pool(*HOLDS[reason]), ask())
    assert verdict.reason == reason
    assert verdict.detail
    assert not verdict.rejected


def test_note_11_behind_whom() -> None:
    home = instance(sessions=1, budget=100, need=needing(85))
    verdict = admission.decide(pool(home, queues={"agentic": line(ask("first", "agentic", 1600))}), ask("new"))
    assert verdict.candidates
    behind = {"agentic": Class(held=1), "rlvr": Class(held=1, virtual_time=12 * queue.UNIT)}
    queues = {"agentic": line(ask("first", "agentic", 1600))}
    shut = pool(home, queues=queues, classes=behind, global_virtual_time=12 * queue.UNIT)
    verdict = admission.decide(shut, ask("new"))
    assert verdict.reason == "QUEUED_BEHIND"
    assert "'agentic' goes first and does not fit: 85 blocks needed + 100 asked > 100 on a" in verdict.detail


def test_note_11_past_its_quota() -> None:
    home = instance(sessions=9, by_class={"rlvr": 9}, class_caps={"rlvr": 4, "agentic": 6}, need=needing(765))
    verdict = admission.decide(pool(home, queues={"agentic": line(ask("first", "agentic", 1600))}), ask("new"))
    assert verdict.reason == "CLASS_CAP"
    assert verdict.detail.startswith("9 sessions of a quota of 4, while other classes wait; 765 blocks needed")
