"""Recovery, on runs made by hand."""

import pytest

from bench.player import RunRecord, SessionRecord
from bench.recovery import Completions, recovery


def run(rates: list[tuple[float, float, float]], end: float = 300.0) -> RunRecord:
    """A run that completes samples at even distances: (from, to, per minute)."""
    record = RunRecord(target={"rlhf": 1.0}, end=end)
    for start, until, per_minute in rates:
        count = round((until - start) * per_minute / 60.0)
        for n in range(count):
            time = start + (n + 0.5) * (until - start) / count
            record.sessions.append(SessionRecord(f"{time}", "rlhf", time - 12.0, time - 10.0, time, "completed"))
    return record


STEADY = [run([(0, 300, 60)])] * 2


def test_rates_are_per_run() -> None:
    assert Completions(STEADY).rate(100.0, 160.0) == pytest.approx(60.0)
    assert Completions(STEADY).curve(270.0, 400.0)[-1][0] == 280.0


def test_a_dip_is_measured_from_rest_to_the_return() -> None:
    changed = [run([(0, 120, 80), (120, 150, 30), (150, 300, 60)])] * 2
    found = recovery(changed, STEADY, warmup_s=60.0, at_s=120.0, rest_s=120.0)
    assert [found.before, found.steady] == pytest.approx([80.0, 60.0])
    assert found.lowest == pytest.approx(0.5, abs=0.02)
    assert found.usual_lowest == pytest.approx(1.0, abs=0.05)
    # A window of 20 s holds 90 % once at most 4 s of it lie in the dip.
    assert found.recovery_s == pytest.approx(26.0, abs=1.5)
    assert found.residencies == pytest.approx(2.6, abs=0.15)
    assert found.last == pytest.approx(1.0)


def test_a_dip_that_ends_with_its_cause_needs_no_recovery() -> None:
    changed = [run([(0, 120, 60), (120, 140, 6), (140, 300, 60)])]
    found = recovery(changed, STEADY[:1], warmup_s=60.0, at_s=120.0, rest_s=140.0)
    assert found.lowest < 0.2
    assert found.recovery_s == 0.0


def test_what_never_comes_back_is_never_recovered() -> None:
    found = recovery([run([(0, 120, 60), (120, 300, 40)])], STEADY[:1], warmup_s=60.0, at_s=120.0, rest_s=120.0)
    assert found.recovery_s is None
    assert found.residencies is None
    assert found.last == pytest.approx(2 / 3, abs=0.02)


def test_no_dip_no_recovery() -> None:
    found = recovery(STEADY, STEADY, warmup_s=60.0, at_s=120.0, rest_s=120.0)
    assert (found.recovery_s, found.failed, found.moved) == (0.0, 0, 0)
