"""The comparison of emulated and real engines: errors, bounds, and real runs that are kept and reused."""

import json
from pathlib import Path

import pytest

from bench import calibrate
from bench.calibrate import Pair, markdown, measure, parse, table
from bench.summary import Figures


def figures(rate: float, hits: float) -> Figures:
    return Figures(
        start=30.0,
        end=100.0,
        completed=70,
        completed_by_class={"rlvr": 70},
        samples_per_minute=rate,
        requests_per_minute=None,
        prefill_tokens_per_second=None,
        decode_tokens_per_second=None,
        hit_rate=hits,
        continuation_hit_rate=None,
        mixture_deviation_points=0.0,
        ttft_p50_s=0.1,
        ttft_p95_s=0.2,
    )


@pytest.mark.parametrize(
    ("rate", "hits", "within"), [(60.0, 0.9, True), (68.0, 0.94, True), (71.0, 0.9, False), (60.0, 0.84, False)]
)
def test_both_errors_count(rate: float, hits: float, within: bool) -> None:
    assert Pair(16, figures(60.0, 0.9), figures(rate, hits)).within is within


def test_the_report_names_command_costs_and_errors() -> None:
    options = parse(["--engines", "http://a", "http://b", "--recorded", "kept"])
    pairs = [Pair(8, figures(60.0, 0.9), figures(66.0, 0.87))]
    assert table(pairs)[2].startswith("| 8 | 60.0 | 66.0 | +10.0 % | 0.900 | 0.870 | -3.0 points |")
    text = markdown(options, pairs, "python -m bench.calibrate")
    assert "Made by `python -m bench.calibrate`: 2 engines of 768 blocks" in text
    assert "`decode_seq_s`" in text


def test_a_real_run_is_kept_and_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(["--engines", "http://a", "http://b", "--recorded", str(tmp_path)])
    kept = {"summary": {"steady": {name: getattr(figures(61.0, 0.8), name) for name in Figures.__slots__}}}
    (tmp_path / "sessions16-seed1-120s.json").write_text(json.dumps(kept))
    monkeypatch.setattr(calibrate, "measured", None)
    assert measure(options, 16).samples_per_minute == 61.0
