"""Rows, lines and files of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import real, report
from bench.player import RunRecord, SessionRecord
from bench.summary import Summary, summarise


def run(completed: int) -> RunRecord:
    sessions = [SessionRecord(f"s{n}", "rlvr", n, n + 2.0, n + 10.0, "completed", "e0") for n in range(completed)]
    return RunRecord(target={"rlvr": 1.0}, sessions=sessions, last_start=100.0, end=120.0)


def summary(completed: int) -> Summary:
    return summarise(run(completed), warmup_s=10.0)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_row_has_a_cell_per_heading_and_marks_the_unknown() -> None:
    heading, rule = report.table_header().splitlines()
    row = cells(report.table_row("sticky", summary(60)))
    assert len(row) == len(cells(heading)) == rule.count("---")
    assert row[:4] == ["sticky", "10 to 100 s", "40.0", "60"]
    assert row[4:6] == ["-", "-"]
    assert "rlvr 2.0 / 2.0 s" in row


def test_a_thin_steady_window_gives_way_to_the_whole_run() -> None:
    assert cells(report.table_row("sticky", summary(19)))[1] == "0 to 120 s"
    without = replace(summary(60), steady=None)
    assert cells(report.table_row("sticky", without))[1] == "0 to 120 s"


def test_the_closing_lines_name_outcomes_windows_and_waits() -> None:
    lines = report.text(summary(60))
    assert lines[0] == "sessions: 60 completed"
    assert lines[1].startswith("whole run (0 to 120 s): 60 samples, 30.0 per minute")
    assert lines[2].startswith("steady (10 to 100 s)")
    assert lines[3] == "held before admission, rlvr: p50 2.0 s, p95 2.0 s, longest 2.0 s"


def test_the_file_holds_settings_summary_and_sessions(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report.write_json(path, {"router": "sticky", "out": path}, summary(3), run(3))
    document = json.loads(path.read_text("utf-8"))
    assert document["settings"]["router"] == "sticky"
    assert document["summary"]["overall"]["completed"] == 3
    assert len(document["run"]["sessions"]) == 3


def test_a_run_on_real_engines_needs_a_bound_and_gets_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--engines", "http://a", "http://b", "--router", "moorage"]
    with pytest.raises(SystemExit):
        real.parse(flags)
    assert "--sessions or --duration" in capsys.readouterr().err
    options = real.parse([*flags, "--policy", "misa-t", "--duration", "60"])
    assert options.engines == ["http://a", "http://b"]
    assert real.name_of(vars(options)) == "moorage misa-t"
    assert real.name_of({"router": "sticky", "cap": 16}) == "sticky cap 16"
