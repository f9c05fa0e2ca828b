"""Runs are kept and played once; means and their intervals."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import runs
from bench.intervals import gains, interval
from bench.simulate import Case
from bench.workload import WorkloadConfig

SHORT = Case("sticky", cap=4, live=12, duration_s=12.0)


def test_a_finished_run_is_not_played_again(tmp_path: Path) -> None:
    said: list[str] = []
    cases = [SHORT, replace(SHORT, seed=2), SHORT]
    with runs.Runs(1, tmp_path, said.append) as kept:
        first = kept.play(cases)
    assert len(said) == 2
    assert first[0] == first[2] != first[1]
    with runs.Runs(1, tmp_path, said.append) as kept:
        again = kept.play([SHORT, replace(SHORT, router="misa-t")])
    assert again[0] == first[0]
    assert len(said) == 3
    assert len(again[1].published) > 0
    assert "misa-t" in said[2]


def test_whatever_changes_a_run_changes_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [SHORT, replace(SHORT, cap=5), replace(SHORT, workload=WorkloadConfig(mixture={"rlvr": 1.0}))]
    names = {runs.key(case) for case in cases}
    assert len(names) == 3
    assert runs.key(replace(SHORT)) in names
    monkeypatch.setattr(runs, "code_version", lambda: "other code")
    assert runs.key(SHORT) not in names


def test_all_code_that_a_run_depends_on_is_known() -> None:
    program = "import sys, bench.simulate; print(*(n for n in sys.modules if n.startswith('bench.')))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path.cwd())
    # None of these has a say in what happens in a run.
    reporting = {"children", "report", "summary"}
    assert {name.removeprefix("bench.") for name in found.stdout.split()} - reporting == set(runs.CODE)


def test_intervals_follow_students_t() -> None:
    assert interval([3.0]).half is None
    three = interval([1.0, 2.0, 3.0])
    assert three.mean == 2.0
    # 4.303 is the 97.5 % point at two degrees of freedom.
    assert three.half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert three.text(".1f") == "2.0 ± 2.5"
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_gains_are_paired() -> None:
    gain = gains([110.0, 220.0], [100.0, 200.0])
    assert gain.mean == pytest.approx(0.1)
    assert gain.half == pytest.approx(0.0, abs=1e-9)
