"""Tables, ratios and targets of the comparison with the peers."""

from typing import Any

import pytest

from bench import peers_report


def document(peer: str, cap: int | None, seed: int, rate: float, **changes: Any) -> dict[str, Any]:
    figures = {
        "start": 0.0,
        "end": 100.0,
        "completed": 50,
        "samples_per_minute": rate,
        "hit_rate": 0.9,
        "continuation_hit_rate": 0.98,
        "mixture_deviation_points": 1.0,
        "ttft_p95_s": 0.5,
        **changes,
    }
    return {
        "settings": {"peer": peer, "cap": cap, "seed": seed, "round": 1, "duration": 100.0, "warmup": 20, "live": 96},
        "summary": {
            "overall": {**figures, "samples_per_minute": 1.0},
            "steady": figures,
            "outcomes": {"completed": 50, "failed": 2},
            "holds": {"rlhf": {"p95": changes.get("hold", 10.0)}, "rlvr": {"p95": 20.0}},
        },
        "cpu_seconds": {"player": 20.0, "engine 8101": 90.0, "engine 8102": 80.0, "elsewhere": 5.0},
    }


TRIALS = [
    document("moorage", None, 1, 90.0),
    document("moorage", None, 2, 100.0),
    document("cache_aware", 12, 1, 45.0),
    document("cache_aware", 12, 2, 40.0),
    document("cache_aware", 16, 1, 50.0),
    document("cache_aware", 16, 2, 50.0),
    document("program", None, 2, 80.0),
    document("clairvoyant", None, 1, 100.0),
    document("unlimited", 64, 1, 120.0),
]


def test_ratios_are_taken_trial_by_trial_at_the_best_cap() -> None:
    ratios = {ratio.peer: ratio for ratio in peers_report.ratios_at_best(list(map(peers_report.result, TRIALS)))}
    assert ratios["cache_aware"].cap == 16
    assert ratios["cache_aware"].values == (1.8, 2.0)
    assert ratios["program"].values == (1.25,)
    assert ratios["unlimited"].values == (0.75,)
    assert ratios["clairvoyant"].values == (0.9,)
    assert [ratios[peer].target for peer in ("cache_aware", "program", "unlimited", "clairvoyant")] == [
        1.65,
        1.3,
        0.8,
        None,
    ]


def test_the_report_marks_what_is_reached_and_what_is_not() -> None:
    lines = peers_report.markdown(TRIALS, "python -m bench.peers").splitlines()
    assert "| samples/min to cache_aware at its best, at least 1.65 | 1.9 | reached |" in lines
    assert "| samples/min to program at its best, at least 1.3 | 1.25 | not reached |" in lines
    assert "| samples/min to unlimited at its best, at least 0.8 | 0.75 | not reached |" in lines
    assert "| continuation hits, at least 0.97 | 0.98 | reached |" in lines
    assert "| mixture deviation in points, at most 2.7 | 1 | reached |" in lines
    assert "| longest p95 hold of a class to the shortest, at most 3 | 2 | reached |" in lines
    assert "| cache_aware | 16 | 1.90 | 1.80 to 2.00 | - | 2 |" in lines
    row = next(line for line in lines if line.startswith("| cache_aware | 12 |"))
    assert row.split(" | ")[2:4] == ["2", "42.5 (40.0 to 45.0)"]
    assert row.endswith("| 0.50 (0.50 to 0.50) | rlhf 10.0, rlvr 20.0 | 4 |")
    assert "| moorage | live | 0.20 | 1.70 | 0.05 |" in lines


def test_the_bound_of_admission_is_told_and_is_no_target() -> None:
    lines = peers_report.markdown(TRIALS, "python -m bench.peers").splitlines()
    rows = [line for line in lines if "clairvoyant" in line and line.startswith("|")]
    assert [row.split(" | ")[:2] for row in rows] == [["| clairvoyant", "live"]] * 3
    assert "| clairvoyant | live | 0.90 | 0.90 to 0.90 | - | 1 |" in rows


def test_without_moorage_there_are_no_ratios() -> None:
    text = peers_report.markdown(TRIALS[2:], "c")
    assert "## Ratios" not in text
    assert "## CPU" in text


def test_a_thin_steady_window_gives_way_to_the_whole_run() -> None:
    assert peers_report.result(document("moorage", None, 1, 90.0, completed=19)).rate == 1.0


def test_a_class_that_never_waited_leaves_the_hold_ratio_unknown() -> None:
    row = document("moorage", None, 1, 90.0, hold=0.0)
    assert peers_report.result(row).hold_ratio is None
    lines = peers_report.markdown([row, *TRIALS[2:]], "c").splitlines()
    assert "| longest p95 hold of a class to the shortest, at most 3 | - | not reached |" in lines


def test_the_interval_is_students() -> None:
    assert peers_report.interval([1.0, 2.0]) is None
    low, high = peers_report.interval([1.0, 2.0, 3.0]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))


def test_a_run_on_one_line_says_what_others_did_meanwhile() -> None:
    line = peers_report.line(document("moorage", None, 1, 90.0))
    assert line == (
        "  90.0 samples/min, continuations hit 0.980, mixture 1.0 points off, 2 failed, "
        "cores: engines 1.70, others' work 0.05"
    )
