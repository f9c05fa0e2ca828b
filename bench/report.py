"""A run's results as people and programs read them: a Markdown table row, a few lines of text, a JSON file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.player import RunRecord
from bench.summary import Figures, Summary

HEADINGS = (
    "router",
    "window",
    "samples/min",
    "samples",
    "prompt tokens from cache",
    "continuation hits",
    "mixture deviation",
    "TTFT p50 / p95",
    "hold p50 / max by class",
    "sessions per engine",
    "held",
)

UNKNOWN = "-"

MIN_STEADY_SAMPLES = 20
"""With fewer completions a steady window says less than the whole run."""


def table_header() -> str:
    """Return the two lines that head a table of rows."""
    return f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}"


def table_row(name: str, summary: Summary) -> str:
    """Return one row: the steady window where it holds enough samples, else the whole run."""
    steady = summary.steady
    figures = steady if steady is not None and steady.completed >= MIN_STEADY_SAMPLES else summary.overall
    waits = ", ".join(f"{label} {wait.p50:.1f} / {wait.max:.1f} s" for label, wait in summary.holds.items())
    cells = (
        name,
        f"{figures.start:.0f} to {figures.end:.0f} s",
        _number(figures.samples_per_minute, ".1f"),
        str(figures.completed),
        _number(figures.hit_rate, ".3f"),
        _number(figures.continuation_hit_rate, ".3f"),
        f"{_number(figures.mixture_deviation_points, '.1f')} points",
        f"{_number(figures.ttft_p50_s, '.2f')} / {_number(figures.ttft_p95_s, '.2f')} s",
        waits or UNKNOWN,
        " + ".join(f"{mean:.1f}" for mean in summary.sessions_per_engine.values()) or UNKNOWN,
        f"{summary.held:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def lines_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    head = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


def text(summary: Summary) -> list[str]:
    """Return the closing lines of a run, for a terminal."""
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(summary.outcomes.items()))
    lines = [f"sessions: {outcomes}", _line("whole run", summary.overall)]
    if summary.steady is not None:
        lines.append(_line("steady", summary.steady))
    for name, wait in summary.holds.items():
        lines.append(
            f"held before admission, {name}: p50 {wait.p50:.1f} s, p95 {wait.p95:.1f} s, longest {wait.max:.1f} s"
        )
    return lines


def write_json(path: Path, settings: Mapping[str, Any], summary: Summary, run: RunRecord) -> None:
    """Write settings, summary and every session to a file."""
    document = {"settings": dict(settings), "summary": asdict(summary), "run": asdict(run)}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", "utf-8")


def _line(name: str, figures: Figures) -> str:
    return (
        f"{name} ({figures.start:.0f} to {figures.end:.0f} s): {figures.completed} samples, "
        f"{_number(figures.samples_per_minute, '.1f')} per minute, "
        f"{_number(figures.hit_rate, '.0%')} of prompt tokens from cache, "
        f"continuations hit {_number(figures.continuation_hit_rate, '.0%')}, "
        f"mixture {_number(figures.mixture_deviation_points, '.1f')} points off"
    )


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
