"""The ablation: what is swept, what is compared, what is written."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import ablation, shifts
from bench.ablation import table, variants
from bench.ablation_report import markdown, plot
from bench.player import RunRecord, SessionRecord, TurnRecord
from bench.simulate import Case
from bench.tuning import BOUND, TUNED, tune
from bench.workload import WorkloadConfig

BASE = Case("misa-t", engines=2, live=96, duration_s=100.0)
SEEDS = (1, 2)


def rate_of(case: Case) -> int:
    """Samples of a run, made up: best at 10 sessions per engine, and better with the adaptive policy."""
    if case.router in ("cache-aware", "sticky"):
        assert case.cap is not None
        return 100 - 2 * abs(case.cap - 10) + case.seed
    return (130 if case.router == "clairvoyant" else 110) + case.seed


def record_of(case: Case) -> RunRecord:
    count = max(1, rate_of(case))
    record = RunRecord(target={"rlhf": 0.5, "agentic": 0.5}, last_start=100.0, end=100.0)
    for n in range(count):
        end = 100.0 * (n + 0.5) / count
        turns = [TurnRecord("e", end - 2, end - 1, 0.1, 100, 28, 0), TurnRecord("e", end - 1, end, 0.1, 200, 10, 96)]
        name = ("rlhf", "agentic")[n % 2]
        record.sessions.append(SessionRecord(f"{n}", name, end - 5, end - 3, end, "completed", "e", turns))
    return record


def play(cases: Sequence[Case]) -> list[RunRecord]:
    return [record_of(case) for case in cases]


def test_a_sweep_closes_in_on_the_best_cap_and_tries_none_twice() -> None:
    tried: list[tuple[int | None, int]] = []

    def noting(cases: Sequence[Case]) -> list[RunRecord]:
        tried.extend((case.cap, case.seed) for case in cases)
        return play(cases)

    sweep = tune(replace(BASE, router="cache-aware"), SEEDS, 0.0, noting)
    assert sweep.best in (9, 10, 11)
    assert {6, 12, 24, 48} < set(sweep.rates)
    assert len(tried) == len(set(tried)) == 2 * len(sweep.rates)


def test_the_safe_cap_holds_the_largest_contexts() -> None:
    # 7,000 tokens are 219 blocks of 32.
    assert ablation.safe_cap(BASE) == 3
    assert ablation.safe_cap(replace(BASE, blocks=6_000)) == 27
    assert ablation.safe_cap(replace(BASE, workload=WorkloadConfig(max_context=1_000))) == 23


def test_variants_differ_in_nothing_but_their_router_and_unlimited_memory_in_its_blocks() -> None:
    named = variants(BASE, 9, 8)
    assert {name: (case.router, case.cap) for name, case in named.items() if "static" in name} == {
        "static, 128K-safe": ("cache-aware", 3),
        TUNED: ("cache-aware", 9),
        "static, high load": ("cache-aware", 96),
    }
    assert all(case.blocks == BASE.blocks for name, case in named.items() if "unlimited" not in name)
    plain = [replace(c, router=BASE.router, cap=None, blocks=BASE.blocks, pool=BASE.pool) for c in named.values()]
    assert all(case == BASE for case in plain)
    assert {name for name, case in named.items() if case.pool != BASE.pool} == {
        f"{policy}, paper's caps" for policy in ("session", "misa", "misa-t")
    }


def test_the_report_compares_by_seed_and_shows_its_command(tmp_path: Path) -> None:
    made = table(BASE, SEEDS, 0.0, play)
    mix = ablation.mix("rlhf only", BASE, SEEDS, 0.0, play)
    options = ablation.parse(["--duration", "100", "--out", str(tmp_path / "ablation.md")])
    text = markdown([made], [mix], "python -m bench.ablation", options, {"agentic": 1.0})
    assert "Made by `python -m bench.ablation`" in text
    row = next(line for line in text.splitlines() if line.startswith("| misa-t |"))
    best = made.sweep.best
    expected = 50 * ((111 / rate_of(replace(BASE, router="cache-aware", cap=best, seed=1))) - 1)
    expected += 50 * ((112 / rate_of(replace(BASE, router="cache-aware", cap=best, seed=2))) - 1)
    assert f"{expected:+.1f} ±" in row
    assert "| agentic | rlhf |" in text
    # 131 and 132 samples in 100 s.
    assert f"\n| {BOUND} | 78.9 ±" in text
    heading, _, line = (line.split(" | ") for line in text.splitlines()[-5:-2])
    assert line[0] == "| rlhf only"
    assert line[heading.index(BOUND)].startswith("78.9 ±")
    plot([made], [mix], options.out)
    assert {path.name for path in tmp_path.iterdir()} == {
        "ablation-rates-2.png",
        "ablation-sweep-2.png",
        "ablation-mixes.png",
    }
    assert all(path.stat().st_size > 5_000 for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", shifts.SCENARIOS)
def test_a_steady_run_has_the_new_world_from_its_start(name: str) -> None:
    scenario = shifts.SCENARIOS[name]
    changed, steady = shifts.shifted(BASE, scenario, 120.0), shifts.from_start(BASE, scenario)
    assert changed.shift is not None
    assert changed.shift.at_s == 120.0
    assert steady.workload == (changed.shift.workload or BASE.workload)
    assert (steady.shift.late_s if steady.shift else 0.0) == changed.shift.late_s
    # What passes is not there at all.
    assert steady.shift is None or steady.shift.lasts_s == 0.0
    assert steady.pool == changed.pool
