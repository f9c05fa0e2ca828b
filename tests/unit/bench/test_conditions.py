"""Shifts in the middle of a simulated run do what they say."""

from collections.abc import Iterator

import pytest

from bench.conditions import Shift
from bench.player import Published, RunRecord
from bench.simulate import Case, run
from bench.workload import WorkloadConfig

AT_S = 8.0


def shifted(shift: Shift, duration_s: float = 24.0) -> RunRecord:
    return run(Case("misa-t", live=16, duration_s=duration_s, shift=shift))


def during(record: RunRecord, start: float, end: float) -> Iterator[Published]:
    return (p for p in record.published if start < p.time < end)


def test_another_mixture_is_started_and_wanted() -> None:
    record = shifted(Shift(AT_S, WorkloadConfig(mixture={"rlhf": 1.0})))
    late = [s for s in record.sessions if s.start > AT_S + 0.1]
    assert {s.workload_class for s in late} == {"rlhf"}
    assert {s.workload_class for s in record.sessions if s.start < AT_S} == {"agentic", "rlhf", "rlvr"}
    # The pool's target follows, or sessions of a class of another share would wait.
    assert sum(s.outcome == "completed" for s in late) > 5


@pytest.mark.parametrize("clears", [False, True])
def test_engines_stand_still_while_weights_are_loaded(clears: bool) -> None:
    record = shifted(Shift(AT_S, load_s=4.0, clears_cache=clears))
    turns = [turn for session in record.sessions for turn in session.turns]
    assert not [turn for turn in turns if AT_S + 0.5 < turn.end < AT_S + 4.0]
    after = [t for s in record.sessions for t in s.turns[1:] if AT_S + 4.0 < t.start < AT_S + 6.0]
    assert any(turn.cached_tokens == 0 for turn in after) is clears
    assert "weights or cache changed" in " ".join(p.why for p in during(record, AT_S + 5, AT_S + 8))
    assert not any(session.outcome == "failed" for session in record.sessions)


def test_sessions_of_a_lost_engine_move_and_it_comes_back_as_another() -> None:
    record = shifted(Shift(AT_S, away_s=6.0))
    lost = next(p.engine for p in during(record, AT_S + 3, AT_S + 6) if p.state == "GONE")
    assert {p.state for p in during(record, AT_S + 8, 24.0) if p.engine == lost} == {"FRESH"}
    turns = [turn for session in record.sessions for turn in session.turns if turn.engine == lost]
    assert not [turn for turn in turns if AT_S < turn.end < AT_S + 6.0]
    assert any(turn.end > AT_S + 6.0 for turn in turns)
    assert record.moved > 0
    assert not any(session.outcome == "failed" for session in record.sessions)


def test_silent_and_late_collectors_make_stale_instances() -> None:
    silent = shifted(Shift(AT_S, silent_s=6.0))
    assert {p.state for p in during(silent, AT_S + 4, AT_S + 6)} == {"STALE"}
    assert {p.state for p in during(silent, AT_S + 8, 24.0)} == {"FRESH"}
    late = shifted(Shift(AT_S, late_s=5.0))
    assert {p.state for p in during(late, AT_S + 6, 24.0)} == {"STALE"}
