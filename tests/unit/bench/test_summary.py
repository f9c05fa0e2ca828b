"""A run in figures, checked by hand."""

import pytest

from bench.player import Occupancy, Outcome, RunRecord, SessionRecord, TurnRecord
from bench.summary import figures, holds, mixture_deviation, percentile, summarise

TARGET = {"agentic": 0.5, "rlvr": 0.5}


def turn(end: float, prompt: int, output: int, cached: int | None, ttft: float = 0.1) -> TurnRecord:
    return TurnRecord("e0", end - 1.0, end, ttft, prompt, output, cached)


def session(name: str, start: float, admitted: float | None, end: float, *turns: TurnRecord) -> SessionRecord:
    outcome: Outcome = "completed" if admitted is not None else "cancelled"
    return SessionRecord(name, name.split("-")[0], start, admitted, end, outcome, "e0", list(turns))


def run() -> RunRecord:
    return RunRecord(
        target=TARGET,
        sessions=[
            session("agentic-0", 0.0, 0.0, 30.0, turn(10, 100, 29, 0), turn(20, 160, 10, 128), turn(30, 200, 4, 32)),
            session("rlvr-0", 0.0, 4.0, 40.0, turn(40, 40, 500, 32)),
            session("rlvr-1", 10.0, 30.0, 60.0, turn(60, 40, 300, None, ttft=0.9)),
            session("rlvr-2", 20.0, None, 60.0),
        ],
        occupancy=[Occupancy(5.0, {"e0": 2, "e1": 0}, 0), Occupancy(25.0, {"e0": 1, "e1": 1}, 2)],
        last_start=20.0,
        end=60.0,
    )


def test_the_whole_run() -> None:
    figures = summarise(run(), warmup_s=30.0).overall
    assert figures.completed_by_class == {"agentic": 1, "rlvr": 2}
    assert figures.samples_per_minute == pytest.approx(3.0)
    # The turn whose hits are unknown is left out, prompt and all.
    assert figures.hit_rate == pytest.approx((0 + 128 + 32 + 32) / (100 + 160 + 200 + 40))
    # 100 + 29 tokens leave 128 in whole blocks (the last one was never computed), 160 + 10 leave 160.
    assert figures.continuation_hit_rate == pytest.approx((128 + 32) / (128 + 160))
    assert figures.mixture_deviation_points == pytest.approx(100 * (2 / 3 - 1 / 2))
    assert (figures.ttft_p50_s, figures.ttft_p95_s) == (0.1, 0.9)


def test_the_steady_window_ends_with_the_last_start() -> None:
    summary = summarise(run(), warmup_s=15.0)
    assert summary.steady is not None
    assert (summary.steady.start, summary.steady.end) == (15.0, 20.0)
    assert summary.steady.completed == 0
    assert summary.steady.mixture_deviation_points is None
    assert summary.steady.continuation_hit_rate == pytest.approx(1.0)
    assert summarise(run(), warmup_s=20.0).steady is None


def test_waits_count_those_still_waiting() -> None:
    holds = summarise(run(), warmup_s=30.0).holds
    assert (holds["rlvr"].sessions, holds["rlvr"].p50, holds["rlvr"].max) == (3, 20.0, 40.0)
    assert holds["agentic"].max == 0.0


def test_outcomes_and_occupancy() -> None:
    summary = summarise(run(), warmup_s=30.0)
    assert summary.outcomes == {"completed": 3, "cancelled": 1}
    assert summary.sessions_per_engine == {"e0": 1.5, "e1": 0.5}
    assert summary.held == 1.0


def test_an_empty_run_has_no_rates() -> None:
    figures = summarise(RunRecord(target=TARGET), warmup_s=1.0).overall
    assert figures.samples_per_minute is None
    assert figures.hit_rate is None
    assert figures.ttft_p50_s is None


def test_mixture_deviation_is_half_the_sum_of_differences() -> None:
    assert mixture_deviation({"agentic": 5, "rlvr": 5}, TARGET) == 0.0
    assert mixture_deviation({"rlvr": 7}, TARGET) == pytest.approx(50.0)
    assert mixture_deviation({"other": 1, "rlvr": 1}, TARGET) == pytest.approx(50.0)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([7.0], 0.0) == 7.0


def test_throughput_counts_turns_and_what_was_computed_for_them() -> None:
    whole = summarise(run(), warmup_s=30.0).overall
    assert whole.requests_per_minute == pytest.approx(5.0)
    assert whole.decode_tokens_per_second == pytest.approx((29 + 10 + 4 + 500 + 300) / 60)
    # Of one turn nobody knows what was computed.
    assert whole.prefill_tokens_per_second is None
    part = figures(run(), 0.0, 50.0, 32)
    assert part.prefill_tokens_per_second == pytest.approx((100 + 160 - 128 + 200 - 32 + 40 - 32) / 50)


def test_waits_that_were_over_before_are_left_out() -> None:
    late = holds(run(), since=15.0)
    assert set(late) == {"rlvr"}
    assert (late["rlvr"].sessions, late["rlvr"].p50) == (2, 20.0)
