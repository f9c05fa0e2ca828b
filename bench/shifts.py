"""What the policy makes of a world that changes under it, in virtual time, without any retuning.

Every shift is held against a run of the same seed that had the shifted world from its start. Finished runs are kept, so
that what was interrupted goes on: run the same command again.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import runs
from bench.conditions import Shift
from bench.emulator import COSTS
from bench.player import RunRecord
from bench.recovery import RECOVERED, WINDOW_S, Completions, Recovery, recovery
from bench.report import lines_of
from bench.simulate import Case
from bench.workload import WorkloadConfig
from moorage_server.core.config import INFER_ALL, MISA_T, POLICIES, PoolConfig

RESULTS = Path(__file__).parent / "results"
LIVE_PER_ENGINE = 48
WITHIN = 2.0
"""Residencies within which a run should have recovered."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A shift, and how the pool is configured for it."""

    shift: Shift
    pool: PoolConfig = field(default_factory=PoolConfig)


def _work(**changes: object) -> Shift:
    return Shift(workload=WorkloadConfig(**changes))  # type: ignore[arg-type]


SCENARIOS: Mapping[str, Scenario] = {
    "mixture to 20 / 60 / 20": Scenario(_work(mixture={"agentic": 0.2, "rlvr": 0.6, "rlhf": 0.2})),
    "mixture to agentic only": Scenario(_work(mixture={"agentic": 1.0})),
    "mixture to rlvr only": Scenario(_work(mixture={"rlvr": 1.0})),
    "tools 10 times slower": Scenario(_work(tool_slowdown=10.0)),
    "outputs twice as long": Scenario(_work(output_growth=2.0)),
    "weights, 6 s, cache kept": Scenario(Shift(load_s=6.0)),
    "weights, 6 s, cache cleared": Scenario(Shift(load_s=6.0, clears_cache=True)),
    "an engine away for 20 s": Scenario(Shift(away_s=20.0)),
    "no snapshot for 20 s": Scenario(Shift(silent_s=20.0)),
    "snapshots 5 s late": Scenario(Shift(late_s=5.0)),
    "30 % of labels wrong": Scenario(_work(mislabelled=0.3)),
    "30 % wrong, inference on": Scenario(_work(mislabelled=0.3), PoolConfig(class_inference=INFER_ALL)),
}


def shifted(base: Case, scenario: Scenario, at_s: float) -> Case:
    """Return the case whose world changes in its middle."""
    return replace(base, pool=scenario.pool, shift=replace(scenario.shift, at_s=at_s))


def from_start(base: Case, scenario: Scenario) -> Case:
    """Return the case that had the new world from its start; after what passes, that is the old one."""
    late = Shift(late_s=scenario.shift.late_s) if scenario.shift.late_s else None
    return replace(base, pool=scenario.pool, workload=scenario.shift.workload or base.workload, shift=late)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario, played."""

    name: str
    figures: Recovery
    shifted: list[RunRecord]
    rest_s: float
    unshifted: float
    """Samples per minute after the time of the shift where nothing ever changes."""


def play(names: Sequence[str], base: Case, options: argparse.Namespace) -> list[Outcome]:
    """Play scenarios on all seeds."""
    seeds = range(1, options.seeds + 1)
    cases = []
    for name in names:
        scenario = SCENARIOS[name]
        cases += [replace(shifted(base, scenario, options.at), seed=seed) for seed in seeds]
        cases += [replace(from_start(base, scenario), seed=seed) for seed in seeds]
    cases += [replace(base, seed=seed) for seed in seeds]
    with runs.Runs(options.jobs, options.cache, runs.say) as kept:
        records = kept.play(cases)
    calm = Completions(records[-len(seeds) :])
    unshifted = calm.rate(options.at, calm.end)
    outcomes = []
    for n, name in enumerate(names):
        mine = records[2 * n * len(seeds) : 2 * (n + 1) * len(seeds)]
        changed, steady = mine[: len(seeds)], mine[len(seeds) :]
        rest = options.at + SCENARIOS[name].shift.lasts_s
        figures = recovery(changed, steady, options.warmup, options.at, rest)
        outcomes.append(Outcome(name, figures, changed, rest, unshifted))
    return outcomes


def markdown(outcomes: Sequence[Outcome], options: argparse.Namespace, command: str) -> str:
    """Return the report."""
    rows = [_row(outcome) for outcome in outcomes]
    headings = [
        "shift",
        "without it, samples/min",
        "before",
        "new steady rate",
        "lowest (by chance)",
        "recovery, s",
        "in residencies",
        "last minute",
        "continuation hits (steady)",
        "failed",
        "moved",
        f"within {WITHIN:.0f}",
    ]
    lines = [
        "# Shifts in virtual time",
        "",
        f"Made by `{command}` at commit {runs.commit()}: {options.policy}, {options.engines} engines of kind "
        f"`{options.costs}`, "
        f"{options.seeds} seeds, {options.duration:.0f} s each, the shift after {options.at:.0f} s.",
        "",
        "Without it is the rate, over the time after the shift, of runs in which nothing changes. "
        "The new steady rate is that of runs of the same seeds that had the shifted world from their start, over the "
        f"same time. Lowest and last minute are shares of it. A rate is that of the samples of the next {WINDOW_S:.0f} "
        "s, over all seeds; by chance is what those steady runs themselves sink to. Recovery is counted from when the "
        "engines serve, or snapshots come, again, to the first moment after the lowest at which the rate is back at "
        f"{RECOVERED:.0%}. A residency is the mean time from admission to end in the steady runs. Failed and moved are "
        "sessions of all seeds.",
        "",
        *lines_of(headings, rows),
        "",
        f"![Rates after each shift]({options.out.stem}.png)",
    ]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> list[str]:
    f = outcome.figures
    within = f.residencies is not None and f.residencies <= WITHIN
    return [
        outcome.name,
        f"{outcome.unshifted:.1f}",
        f"{f.before:.1f}",
        f"{f.steady:.1f}",
        f"{f.lowest:.0%} ({f.usual_lowest:.0%})",
        "never" if f.recovery_s is None else f"{f.recovery_s:.0f}",
        "-" if f.residencies is None else f"{f.residencies:.1f} of {f.residency_s:.1f} s",
        f"{f.last:.0%}",
        f"{_rate(f.hit_rate)} ({_rate(f.steady_hit_rate)})",
        str(f.failed),
        str(f.moved),
        "yes" if within else "**no**",
    ]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def timeline(record: RunRecord, start: float, end: float) -> list[str]:
    """Return what the control plane published between two times, per engine, every five seconds."""
    rows = []
    for p in record.published:
        if start <= p.time <= end and round(p.time) % 5 == 0:
            cells = [f"{p.time:.0f}", p.engine, p.state, p.budget, p.need, p.used_blocks, p.cap, p.sessions, p.held]
            rows.append([*map(str, cells), f"{p.brake:.2f}", str(p.preemptions), p.why])
    return lines_of(
        ["s", "engine", "state", "budget", "need", "used", "cap", "sessions", "held", "brake", "preempted", "why"], rows
    )


def plot(outcomes: Sequence[Outcome], options: argparse.Namespace, path: Path) -> None:
    """Draw the rate over the time since each shift."""
    from bench import plots

    series = {}
    for outcome in outcomes:
        curve = Completions(outcome.shifted).curve(options.warmup, options.duration)
        # A window is drawn at its middle.
        times = [t + WINDOW_S / 2 - options.at for t, _ in curve]
        series[outcome.name] = (times, [rate / outcome.figures.steady for _, rate in curve])
    plots.curves(series, path)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m bench.shifts", description=__doc__)
    add = parser.add_argument
    add(
        "--only", nargs="+", choices=SCENARIOS, metavar="SHIFT", help=f"{'; '.join(SCENARIOS).replace('%', '%%')} [all]"
    )
    add("--policy", choices=POLICIES, default=MISA_T, help="[misa-t]")
    add("--seeds", type=int, default=5, help="seeds per case: 1 to this [5]")
    add("--duration", type=float, default=300.0, help="seconds of virtual time per run [300]")
    add("--at", type=float, default=120.0, help="when the shift comes [120]")
    add("--warmup", type=float, default=60.0, help="seconds before the rate before is taken [60]")
    add("--engines", type=int, default=2, help="[2]")
    add("--costs", choices=COSTS, default="accelerator", help="kind of engine [accelerator]")
    add("--blocks", type=int, default=768, help="blocks per engine [768]")
    add("--jobs", type=int, default=2, help="processes [2]")
    add("--cache", type=Path, default=runs.default_directory(), help="where finished runs are kept [%(default)s]")
    add("--out", type=Path, default=RESULTS / "shifts.md", help="the report; the plot goes beside it [%(default)s]")
    add("--timeline", action="store_true", help="print what was published around each shift, for the first seed")
    return parser.parse_args(arguments)


def main() -> int:
    """Entry point."""
    options = parse()
    live = LIVE_PER_ENGINE * options.engines
    base = Case(options.policy, None, options.engines, options.blocks, live, options.duration, costs=options.costs)
    outcomes = play(options.only or list(SCENARIOS), base, options)
    if options.timeline:
        for outcome in outcomes:
            print("", outcome.name, "", sep="\n")
            print("\n".join(timeline(outcome.shifted[0], options.at - 10.0, outcome.rest_s + 60.0)))
    text = markdown(outcomes, options, f"python -m bench.shifts {shlex.join(sys.argv[1:])}".strip())
    options.out.write_text(text, "utf-8")
    plot(outcomes, options, options.out.with_suffix(".png"))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
