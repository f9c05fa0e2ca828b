"""What one more session would bring, and what may be asked for beyond the budget."""

import math

import pytest

from moorage_server.core.pace import Pace
from moorage_server.core.pace import over as over_the_budget


def looked_at(overhead_s: float, per_sequence_s: float, looks: int = 60) -> Pace:
    """An engine whose step takes a + b n, seen with 4 to 12 sequences."""
    pace = Pace()
    for look in range(looks):
        running = 4.0 + look % 9
        pace.take(running, running / (overhead_s + per_sequence_s * running), 1.0)
    return pace


@pytest.mark.parametrize(
    ("overhead_s", "per_sequence_s", "expected"),
    [(0.008, 0.0, 1.0), (0.0, 0.001, 0.0), (0.008, 0.001, 0.5)],
)
def test_gain_is_the_share_of_its_lone_pace_that_a_session_adds(
    overhead_s: float, per_sequence_s: float, expected: float
) -> None:
    """The mean n is about 8: with a = 8 b half of the step is overhead."""
    gain = looked_at(overhead_s, per_sequence_s).gain()
    assert gain == pytest.approx(expected, abs=0.03)


def test_too_little_says_nothing() -> None:
    assert Pace().gain() is None
    assert looked_at(0.008, 0.0, looks=10).gain() is None, "too few looks"
    constant = Pace()
    for _ in range(60):
        constant.take(8.0, 1000.0, 1.0)
    assert constant.gain() is None, "all at the same n: no slope to be seen"


def test_what_was_learnt_fades() -> None:
    pace = looked_at(0.0, 0.001)
    for look in range(600):
        running = 4.0 + look % 9
        pace.take(running, running / 0.008, 1.0)
    assert pace.gain() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("running", "rate"), [(0.0, 100.0), (0.5, 100.0), (4.0, 0.0)])
def test_an_idle_look_says_nothing(running: float, rate: float) -> None:
    pace = Pace()
    pace.take(running, rate, 1.0)
    assert pace == Pace()


@pytest.mark.parametrize(
    ("gain", "protected", "over"),
    [(1.0, 0.0, 0.8), (0.4, 0.0, 0.32), (None, 0.0, 0.0), (1.0, 0.15, 0.4), (1.0, 0.3, 0.0), (1.0, 0.6, 0.0)],
)
def test_beyond_the_budget_only_where_nobody_is_idle_between_turns(
    gain: float | None, protected: float, over: float
) -> None:
    assert math.isclose(over_the_budget(gain, protected), over)


@pytest.mark.parametrize(("running", "step_s"), [(1.0, 1.0), (2.0, 10.0)])
def test_one_slow_look_does_not_hide_what_all_others_say(running: float, step_s: float) -> None:
    """A prefill of seconds at the start, on an engine where one more session brings nothing."""
    pace = Pace()
    pace.take(running, running / step_s, 1.0)
    for look in range(60):
        n = 4.0 + look % 9
        pace.take(n, n / (0.001 * n), 1.0)
    assert pace.gain() == pytest.approx(0.0, abs=0.1)
