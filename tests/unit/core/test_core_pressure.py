"""The brake of one instance: what makes it bite, how long it listens, how slowly it lets go; and the step of caps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage_server.core import pressure
from moorage_server.core.pressure import Brake, Sample

#: Tokens expected to be found per second where sessions report.
FLOW = 4000
#: After a bite while hits do not collapse, where they do, and at a window of 0.79 that should hit 0.9.
GENTLE, FULL, EARLY = 0.976, 0.88, 0.9575


@dataclass
class Wheel:
    """An instance whose counters run, one epoch per call."""

    brake: Brake = field(default_factory=Brake)
    at_s: float = 100.0
    expected: int = 0
    found: int = 0
    queries: int | None = None
    hits: int | None = None
    preemptions: int | None = 0
    waiting: int | None = 0
    #: Turns of further classes, cumulative; and whether the instance is far from full.
    others: dict[str, tuple[int, int]] = field(default_factory=dict)
    calm: bool = False

    def run(self, seconds: int, rate: float | None = None, *, raw: float | None = None, epoch_s: float = 1.0) -> Wheel:
        """Continuation hits at ``rate``, or none reported; the engine's own at ``raw``, or unknown."""
        for _ in range(seconds):
            self.at_s += epoch_s
            if rate is not None:
                self.expected += FLOW
                self.found += round(FLOW * rate)
            if raw is not None:
                self.queries, self.hits = (self.queries or 0) + FLOW, (self.hits or 0) + round(FLOW * raw)
            self.step(epoch_s)
        return self

    def step(self, epoch_s: float = 1.0) -> None:
        self.brake = pressure.step(self.brake, self.sample(), epoch_s, 0.9, calm=self.calm)

    def sample(self) -> Sample:
        turns = {"agentic": (self.expected, self.found), **self.others}
        return Sample(self.at_s, turns, self.queries, self.hits, self.preemptions, self.waiting)

    def factors(self, seconds: int, rate: float | None) -> list[float]:
        return [self.run(1, rate).brake.factor for _ in range(seconds)]


def test_a_healthy_instance_runs_free() -> None:
    wheel = Wheel().run(60, 0.97)
    assert wheel.brake.factor == 1.0
    assert wheel.brake.pressure < 0.01
    assert wheel.brake.why == ""


def test_it_bites_once_after_confirmation_and_then_listens() -> None:
    """Hits of 0.5 from second 10 on: 8 s means of .91, .85, .79: the second low one confirms. Then 12 s of latch."""
    wheel = Wheel().run(10, 0.97)
    factors = wheel.factors(15, 0.5)
    assert factors[:2] == [1.0, 1.0]
    assert factors[2:14] == [pytest.approx(EARLY)] * 12
    assert factors[14] == pytest.approx(EARLY * 0.88)
    assert wheel.brake.pressure == pytest.approx(0.47, abs=0.01)
    assert wheel.brake.why == "continuation hit rate 0.50"


def test_a_second_of_misses_is_averaged_out() -> None:
    """(7 * 0.97 + 0.45) / 8 = 0.905 over the window."""
    wheel = Wheel().run(10, 0.97)
    wheel.run(1, 0.45).run(12, 1.0)
    assert wheel.brake.factor == 1.0


def test_a_dip_that_mends_is_left_alone() -> None:
    """Low from the start, but rising all the time: the window's rate grows by more than half a point per epoch."""
    wheel = Wheel()
    for rate in (0.6, 0.64, 0.68, 0.72, 0.76, 0.8, 0.84, 0.88, 0.92, 0.96, 1.0, 1.0, 1.0, 1.0):
        assert wheel.run(1, rate).brake.factor == 1.0


def test_what_was_low_while_the_latch_held_does_not_bite_when_it_mends() -> None:
    wheel = Wheel().run(10, 0.97).run(3, 0.5)
    assert wheel.brake.factor == pytest.approx(EARLY)
    wheel.run(8, 0.5).run(4, 0.9)
    assert wheel.at_s >= wheel.brake.latched_until_s
    assert pressure.read(wheel.brake.samples).continuation == pytest.approx(0.7)
    assert wheel.brake.factor == pytest.approx(EARLY + 0.008)


def test_it_lets_go_slowly_and_never_beyond_the_budget() -> None:
    """0.0425 to win back at 0.008 per second: 6 s after the latch."""
    wheel = Wheel().run(10, 0.97).run(3, 0.5)
    wheel.run(11, 0.97)
    assert wheel.brake.factor == pytest.approx(EARLY)
    assert wheel.brake.why == "continuation hit rate 0.79"
    assert wheel.run(1, 0.97).brake.factor == pytest.approx(EARLY + 0.008)
    assert wheel.run(4, 0.97).brake.factor == pytest.approx(EARLY + 0.04)
    assert wheel.run(1, 0.97).brake.factor == 1.0
    assert wheel.run(100, 0.97).brake.factor == 1.0
    assert wheel.brake.why == ""


def test_the_release_counts_seconds_not_epochs() -> None:
    slow = Wheel(Brake(factor=0.6)).run(5, 0.97, epoch_s=4.0)
    assert slow.brake.factor == pytest.approx(0.6 + 5 * 4.0 * 0.008)


def test_it_has_a_floor() -> None:
    wheel = Wheel().run(200, 0.1)
    assert wheel.brake.factor == 0.4


@pytest.mark.parametrize(
    ("rate", "factor"), [(0.87, 1.0 - 0.12 * 0.2), (0.8, 1.0 - 0.12 / 3), (0.6, 0.88), (0.1, 0.88)]
)
def test_it_bites_by_how_far_hits_are_below_the_healthy_rate(rate: float, factor: float) -> None:
    """A fifth of 12 % at least, all of it from 0.3 below 0.9 on."""
    assert Wheel().run(3, rate).brake.factor == pytest.approx(factor, abs=1e-3)


def test_few_tokens_say_nothing() -> None:
    wheel = Wheel().run(1, 0.97)
    for _ in range(20):
        wheel.expected += 30
        wheel.run(1)
    assert wheel.brake.factor == 1.0
    assert pressure.read(wheel.brake.samples).continuation is None


@pytest.mark.parametrize("counter", ["found", "expected", "preemptions"])
def test_counters_that_start_again_say_nothing(counter: str) -> None:
    wheel = Wheel(preemptions=50).run(10, 0.97)
    setattr(wheel, counter, 0)
    wheel.run(2)
    assert wheel.brake.factor == 1.0
    wheel.run(20, 0.97)
    assert wheel.brake.factor == 1.0


def test_a_preemption_brakes_at_once() -> None:
    wheel = Wheel().run(10, 0.97)
    wheel.preemptions = 3
    assert wheel.run(1, 0.97).brake.factor == pytest.approx(GENTLE)
    assert wheel.brake.why == "3 preemptions"
    wheel.preemptions = 9
    assert wheel.run(11, 0.97).brake.factor == pytest.approx(GENTLE)


def test_preemptions_before_the_first_look_are_history() -> None:
    assert Wheel(preemptions=1000).run(2, 0.97).brake.factor == 1.0
    assert Wheel(preemptions=None).run(2, 0.97).brake.factor == 1.0


def test_waiting_requests_brake_when_they_persist() -> None:
    """Agentic overload queues with zero preemptions: four epochs in a row."""
    wheel = Wheel(waiting=2).run(3, 0.97)
    assert wheel.brake.factor == 1.0
    wheel.waiting = 0
    wheel.run(1, 0.97)
    wheel.waiting = 2
    assert wheel.run(3, 0.97).brake.factor == 1.0
    assert wheel.run(1, 0.97).brake.factor == pytest.approx(GENTLE)
    assert wheel.brake.why == "2 requests wait for capacity"


def test_waiting_unknown_is_not_waiting() -> None:
    assert Wheel(waiting=None).run(20, 0.97).brake.factor == 1.0


def test_the_engines_counters_serve_where_no_session_reports() -> None:
    """The reference is learnt: 0.8 is healthy here, 0.5 is a drop of more than 0.25."""
    wheel = Wheel().run(20, raw=0.8)
    assert wheel.brake.healthy_raw == pytest.approx(0.8)
    assert wheel.run(1, raw=0.6).brake.factor == 1.0
    wheel.run(8, raw=0.4)
    assert wheel.brake.factor == pytest.approx(FULL)
    assert wheel.brake.why.startswith("engine hit rate")


def test_a_reference_that_was_never_high_is_no_overload() -> None:
    """Unshared prompts hit nothing: with no rate ever seen above, there is nothing to fall from."""
    assert Wheel().run(30, raw=0.02).brake.factor == 1.0


def test_the_engines_counters_are_ignored_once_sessions_report() -> None:
    """All turns wait for tools while cold first prompts come in: the engine's own rate falls, and no turn missed."""
    wheel = Wheel().run(20, raw=0.9).run(10, 0.97, raw=0.9)
    wheel.run(20, raw=0.0)
    assert pressure.read(wheel.brake.samples).continuation is None
    assert wheel.brake.factor == 1.0


def test_the_engines_counters_serve_again_when_sessions_fall_silent() -> None:
    """Callers that stop reporting: after half a minute the second best signal is better than none."""
    wheel = Wheel().run(20, 0.97, raw=0.9)
    wheel.run(int(pressure.DEAF_S) + 10, raw=0.9).run(6, raw=0.1)
    assert wheel.brake.factor == pytest.approx(FULL)
    assert wheel.brake.why.startswith("engine hit rate")


def test_a_small_class_that_suffers_is_weighed_by_what_it_lost() -> None:
    """Per class against its own reference, summed in tokens: a tenth of the turns missing all is not yet overload."""
    wheel = Wheel()
    for _ in range(30):
        before = wheel.others.get("chat", (0, 0))
        wheel.others = {"chat": (before[0] + FLOW // 20, before[1])}
        wheel.run(1, 0.97)
    assert wheel.brake.factor == 1.0
    assert wheel.brake.pressure == pytest.approx(0.97 / 21, abs=0.005)


def test_a_class_that_never_hits_even_on_an_idle_instance_is_not_overload() -> None:
    """Its client rewrites the history: learnt while the instance is calm, and held against nobody when it is full."""
    wheel = Wheel(calm=True).run(200, 0.4)
    wheel.calm = False
    assert wheel.run(60, 0.4).brake.factor == 1.0
    assert wheel.brake.healthy["agentic"] == pytest.approx(0.4, abs=0.02)
    assert wheel.run(30, 0.2).brake.factor < 0.9


def test_a_rate_that_is_low_when_full_teaches_nothing() -> None:
    assert Wheel().run(200, 0.4).brake.healthy["agentic"] == pytest.approx(0.97)


def test_after_new_weights_references_are_learnt_anew_and_nothing_brakes() -> None:
    """The cache is cold, all prefill at once, some are preempted: none of it is overload for a while."""
    wheel = Wheel(queries=0, hits=0).run(30, 0.97, raw=0.9)
    before = wheel.brake
    wheel.brake = pressure.settle(wheel.brake, wheel.sample())
    assert (wheel.brake.factor, wheel.brake.healthy, wheel.brake.healthy_raw) == (before.factor, {}, None)
    wheel.preemptions, wheel.waiting = 7, 3
    assert wheel.run(int(pressure.SETTLE_S) - 1, 0.1).brake.factor == 1.0
    assert wheel.run(2, 0.1).brake.factor == pytest.approx(FULL)


def test_what_was_braked_before_new_weights_is_let_go_as_slowly() -> None:
    wheel = Wheel(Brake(factor=0.6))
    wheel.brake = pressure.settle(wheel.brake, wheel.sample())
    assert wheel.run(5, 0.97).brake.factor == pytest.approx(0.64)


def test_epochs_longer_than_the_window_still_see_differences() -> None:
    wheel = Wheel().run(3, 0.97, epoch_s=30.0)
    wheel.preemptions = 1
    assert wheel.run(1, 0.97, epoch_s=30.0).brake.factor == pytest.approx(GENTLE)
    wheel = Wheel().run(3, 0.97, epoch_s=30.0).run(2, 0.3, epoch_s=30.0)
    assert wheel.brake.factor == pytest.approx(FULL)


def test_step_leaves_its_argument_alone() -> None:
    wheel = Wheel().run(10, 0.97)
    before = wheel.brake
    samples = list(before.samples)
    wheel.run(3, 0.2)
    assert (before.factor, before.samples) == (1.0, samples)


def test_no_more_is_remembered_than_the_window_needs() -> None:
    assert len(Wheel().run(100, 0.97).brake.samples) <= pressure.WINDOW_S + 2


def walk(current: int | None, targets: Iterable[int], least: int, most: int) -> list[int]:
    caps: list[int] = []
    for target in targets:
        current = pressure.move_cap(current, target, least=least, most=most)
        caps.append(current)
    return caps


def test_caps_walk_by_hand() -> None:
    """A fifth of 10 is 2, of 12 is 2, of 14 is 2, of 16 is 3, of 19 is 3; below 5 the least step of one."""
    assert walk(10, [100] * 5, 1, 0) == [12, 14, 16, 19, 22]
    assert walk(10, [1] * 8, 1, 0) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert walk(10, [11] * 3, 1, 0) == [11, 11, 11]
    assert walk(None, [40, 1], 1, 0) == [40, 32]
    assert walk(10, [100] * 3, 1, 13) == [12, 13, 13]
    assert walk(10, [1] * 3, 9, 0) == [9, 9, 9]


@settings(deadline=None)
@given(
    current=st.integers(0, 2**40), target=st.integers(0, 2**40), least=st.integers(0, 100), spread=st.integers(0, 10**6)
)
def test_no_cap_moves_by_more_than_a_fifth(current: int, target: int, least: int, spread: int) -> None:
    most = least + spread if spread else 0
    new = pressure.move_cap(current, target, least=least, most=most)
    assert abs(new - current) <= max(1, current / 5)
    goal = max(least, min(target, most) if most else target)
    assert min(current, goal) <= new <= max(current, goal)
    if current != goal:
        assert new != current
