"""The ablation as Markdown tables and plots."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from bench import runs
from bench.emulator import COSTS, EngineConfig
from bench.intervals import Interval, gains, interval
from bench.report import lines_of
from bench.summary import Figures
from bench.tuning import BOUND, STICKY, TUNED, Sweep
from bench.workload import WorkloadConfig

if TYPE_CHECKING:
    from bench.ablation import Mix, Row, Table

ADAPTIVE = "misa-t"
UNKNOWN = "-"

_COLUMNS: Mapping[str, tuple[Callable[[Figures], float | None], str]] = {
    "requests/min": (lambda f: f.requests_per_minute, ".0f"),
    "prefill tokens/s": (lambda f: f.prefill_tokens_per_second, ".0f"),
    "decode tokens/s": (lambda f: f.decode_tokens_per_second, ".0f"),
    "prompt tokens from cache": (lambda f: f.hit_rate, ".3f"),
    "continuation hits": (lambda f: f.continuation_hit_rate, ".3f"),
    "mixture off by, points": (lambda f: f.mixture_deviation_points, ".1f"),
}


def markdown(
    tables: Sequence[Table],
    mixes: Sequence[Mix],
    command: str,
    options: argparse.Namespace,
    mixture: Mapping[str, float],
) -> str:
    """Return the whole report."""
    shares = " / ".join(f"{100 * share:.1f} % {name}" for name, share in mixture.items())
    workload, engine = WorkloadConfig(), EngineConfig(costs=COSTS[options.costs])
    lines = [
        "# Ablation in virtual time",
        "",
        f"Made by `{command}` at commit {runs.commit()}: {options.duration:.0f} s of virtual time per run, the first "
        f"{options.warmup:.0f} s left out; contexts of up to {workload.max_context} tokens, groups of "
        f"{workload.group_size}, {shares} of sessions; engines of {options.blocks} blocks of {engine.block_size} "
        f"tokens, of kind `{options.costs}` ({engine.costs}); 48 live rollouts per engine. All routers see the same "
        "sessions. Intervals are 95 % confidence of the mean over seeds (Student's t); differences are paired by seed.",
    ]
    for table in tables:
        lines += ["", f"## {table.engines} engines, {len(table.rows[0].figures)} seeds", ""]
        lines += _rates(table)
        lines += [
            "",
            "Wait for admission, of sessions not admitted before the steady window: p50 / p95 / longest, in s.",
            "",
        ]
        lines += _holds(table)
        lines += ["", "The sweep of the static cap (cache-aware router):", "", *_sweep(table.sweep)]
        lines += ["", "And of the sticky router's:", "", *_sweep(table.sticky)]
        lines += ["", f"![Sample rates]({options.out.stem}-rates-{table.engines}.png)"]
        lines += [f"![Static cap against {ADAPTIVE}]({options.out.stem}-sweep-{table.engines}.png)"]
    if mixes:
        lines += [
            "",
            f"## Other mixes, 2 engines, {len(mixes[0].adaptive.figures)} seeds, {options.mix_duration:.0f} s",
            "",
            f"`{BOUND}` never lets the memory run over. Where what is preempted is cheap to compute again, as long "
            "single answers are, running over can pay, and a cap exceed it.",
            "",
        ]
        lines += _mixes(mixes)
        lines += ["", f"![Mixes]({options.out.stem}-mixes.png)"]
    return "\n".join(lines) + "\n"


def _rates(table: Table) -> list[str]:
    baseline = table.row(TUNED)
    rows = []
    for row in table.rows:
        caps = {TUNED: table.sweep.best, STICKY: table.sticky.best}
        name = f"{row.name} ({caps[row.name]} sessions per engine)" if row.name in caps else row.name
        gain = "0" if row is baseline else f"{gains(row.rates, baseline.rates).text('+.1f', 100.0)} %"
        cells = [name, interval(row.rates).text(), gain]
        cells += [_cell([get(f) for f in row.figures], form) for get, form in _COLUMNS.values()]
        rows.append(cells)
    return lines_of(["router", "samples/min", "against sweep-tuned", *_COLUMNS], rows)


def _cell(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return interval(known).text(form) if known else UNKNOWN


def _holds(table: Table) -> list[str]:
    classes = sorted({name for row in table.rows for holds in row.holds for name in holds})
    rows = []
    for row in table.rows:
        cells = [row.name]
        p95 = {}
        for name in classes:
            waits = [holds[name] for holds in row.holds if name in holds]
            if not waits:
                cells.append(UNKNOWN)
                continue
            p95[name] = fmean(w.p95 for w in waits)
            cells.append(f"{fmean(w.p50 for w in waits):.1f} / {p95[name]:.1f} / {max(w.max for w in waits):.1f}")
        least = min(p95.values(), default=0.0)
        cells.append(f"{max(p95.values()) / least:.2f}" if least > 0 else UNKNOWN)
        rows.append(cells)
    return lines_of(["router", *classes, "longest p95 / shortest p95"], rows)


def _sweep(sweep: Sweep) -> list[str]:
    rows = [[str(cap), rate.text(), hits.text(".3f") if hits else UNKNOWN] for cap, rate, hits in sweep.points()]
    return lines_of(["sessions per engine", "samples/min", "continuation hits"], rows)


def _mixes(mixes: Sequence[Mix]) -> list[str]:
    rows = []
    for mix in mixes:
        best = mix.sweep.best
        tried = ", ".join(f"{cap}: {rate.mean:.1f}" for cap, rate, _ in mix.sweep.points())
        rows.append(
            [
                mix.name,
                f"{interval(mix.sweep.rates[best]).text()} (cap {best})",
                interval(mix.adaptive.rates).text(),
                f"{gains(mix.adaptive.rates, mix.sweep.rates[best]).text('+.1f', 100.0)} %",
                _cell([f.continuation_hit_rate for f in mix.adaptive.figures], ".3f"),
                _cell([f.mixture_deviation_points for f in mix.adaptive.figures], ".1f"),
                interval(mix.clairvoyant.rates).text(),
                tried,
            ]
        )
    return lines_of(
        [
            "mix",
            "sticky router, best cap",
            ADAPTIVE,
            "difference",
            "continuation hits",
            "mixture off by, points",
            BOUND,
            "rate by cap",
        ],
        rows,
    )


def plot(tables: Sequence[Table], mixes: Sequence[Mix], report: Path) -> None:
    """Write the plots that the report shows, beside it."""
    from bench import plots

    for table in tables:
        names = [row.name for row in table.rows]
        rates = [interval(row.rates) for row in table.rows]
        title = f"{table.engines} engines"
        plots.bars(names, {"samples/min": rates}, title, report.with_name(f"{report.stem}-rates-{table.engines}.png"))
        adaptive: Row = table.row(ADAPTIVE)
        hits = [f.continuation_hit_rate for f in adaptive.figures if f.continuation_hit_rate is not None]
        plots.sweep(
            table.sticky.points(),
            interval(adaptive.rates),
            interval(hits) if hits else None,
            title,
            report.with_name(f"{report.stem}-sweep-{table.engines}.png"),
        )
    if mixes:
        series: dict[str, list[Interval]] = {
            "sticky router, best cap": [interval(mix.sweep.rates[mix.sweep.best]) for mix in mixes],
            ADAPTIVE: [interval(mix.adaptive.rates) for mix in mixes],
            BOUND: [interval(mix.clairvoyant.rates) for mix in mixes],
        }
        plots.bars([mix.name for mix in mixes], series, "2 engines", report.with_name(f"{report.stem}-mixes.png"))
