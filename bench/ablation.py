"""The policies against static caps and peers, in virtual time, in the shape of the paper's table; and on other mixes.

Finished runs are kept, so that a sweep that was interrupted goes on where it was: run the same command again.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import ablation_report, runs
from bench.emulator import COSTS, EngineConfig
from bench.player import RunRecord
from bench.simulate import Case
from bench.summary import Figures, Wait, holds
from bench.tuning import BOUND, COARSE, STICKY, TUNED, Play, Sweep, steady, tune
from bench.workload import TARGET_MIXTURE, WorkloadConfig
from moorage_server.core.config import MISA, MISA_T, SESSION

RESULTS = Path(__file__).parent / "results"
LIVE_PER_ENGINE = 48
UNLIMITED_BLOCKS = 6_000
CACHE_AWARE = "cache-aware"
CLAIRVOYANT = "clairvoyant"

MIXES: Mapping[str, Mapping[str, float]] = {
    "agentic only": {"agentic": 1.0},
    "rlvr only": {"rlvr": 1.0},
    "rlhf only": {"rlhf": 1.0},
    "mostly agentic": {"agentic": 0.8, "rlvr": 0.1, "rlhf": 0.1},
    "mostly rlvr": {"agentic": 0.15, "rlvr": 0.7, "rlhf": 0.15},
    "mostly rlhf": {"agentic": 0.15, "rlvr": 0.15, "rlhf": 0.7},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One router's runs, one per seed in the order of the seeds."""

    name: str
    figures: list[Figures]
    holds: list[Mapping[str, Wait]]

    @property
    def rates(self) -> list[float]:
        """Samples per minute."""
        return [f.samples_per_minute or 0.0 for f in self.figures]


@dataclass(frozen=True, slots=True)
class Table:
    """All rows at one number of engines, and the sweeps of the static caps: of the cache-aware router, and sticky."""

    engines: int
    rows: list[Row]
    sweep: Sweep
    sticky: Sweep

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True, slots=True)
class Mix:
    """One mix: the sweep of the sticky router's cap, what the policy made of it, and who knows all plans in advance."""

    name: str
    sweep: Sweep
    adaptive: Row
    clairvoyant: Row


def safe_cap(case: Case) -> int:
    """Return how many contexts of the largest size one engine holds."""
    block = EngineConfig().block_size
    return max(1, (case.blocks - 1) // -(-case.workload.max_context // block))


def variants(base: Case, best: int, best_sticky: int) -> dict[str, Case]:
    """Return the rows of the table, by name."""
    unlimited = replace(base, router="sticky", cap=base.live, blocks=UNLIMITED_BLOCKS)
    paper = replace(base, pool=replace(base.pool, reference_caps=True))
    return {
        "static, 128K-safe": replace(base, router=CACHE_AWARE, cap=safe_cap(base)),
        TUNED: replace(base, router=CACHE_AWARE, cap=best),
        f"{SESSION}, paper's caps": replace(paper, router=SESSION),
        f"{MISA}, paper's caps": replace(paper, router=MISA),
        f"{MISA_T}, paper's caps": replace(paper, router=MISA_T),
        SESSION: replace(base, router=SESSION),
        MISA: replace(base, router=MISA),
        MISA_T: replace(base, router=MISA_T),
        "static, high load": replace(base, router=CACHE_AWARE, cap=base.live),
        "least loaded, no admission": replace(base, router="least-loaded"),
        STICKY: replace(base, router="sticky", cap=best_sticky),
        BOUND: replace(base, router=CLAIRVOYANT),
        "bound: unlimited KV": unlimited,
    }


def row(name: str, records: Sequence[RunRecord], warmup_s: float) -> Row:
    """Return the row of some runs."""
    return Row(name, [steady(r, warmup_s) for r in records], [holds(r, warmup_s) for r in records])


def table(base: Case, seeds: Sequence[int], warmup_s: float, play: Play) -> Table:
    """Tune the static caps, then play every variant on every seed."""
    sticky = tune(replace(base, router="sticky"), seeds, warmup_s, play)
    sweep = tune(replace(base, router=CACHE_AWARE), seeds, warmup_s, play)
    named = variants(base, sweep.best, sticky.best)
    records = play([replace(case, seed=seed) for case in named.values() for seed in seeds])
    count = len(seeds)
    rows = [row(name, records[n * count : (n + 1) * count], warmup_s) for n, name in enumerate(named)]
    return Table(base.engines, rows, sweep, sticky)


def mix(name: str, base: Case, seeds: Sequence[int], warmup_s: float, play: Play) -> Mix:
    """Hold the policy against the best static cap of one mix, and against the bound."""
    case = replace(base, workload=replace(base.workload, mixture=dict(MIXES[name])))
    # What is known in advance is played at once.
    count = len(seeds)
    uncapped = [replace(case, router=router, seed=seed) for router in (MISA_T, CLAIRVOYANT) for seed in seeds]
    first = [replace(case, router="sticky", cap=cap, seed=seed) for cap in COARSE for seed in seeds]
    records = play([*uncapped, *first])
    sweep = tune(replace(case, router="sticky"), seeds, warmup_s, play)
    adaptive, clairvoyant = records[:count], records[count : 2 * count]
    return Mix(name, sweep, row(MISA_T, adaptive, warmup_s), row(BOUND, clairvoyant, warmup_s))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=5, help="seeds per case: 1 to this [5]")
    add("--duration", type=float, default=300.0, help="seconds of virtual time per run [300]")
    add("--warmup", type=float, default=90.0, help="seconds before the steady window [90]")
    add("--replicas", type=int, nargs="*", default=[2, 4], help="numbers of engines of the main table [2 4]")
    add("--mixes", nargs="*", choices=MIXES, default=list(MIXES), metavar="MIX", help=f"{', '.join(MIXES)} [all]")
    add("--mix-seeds", type=int, default=3, help="seeds per case of the mixes [3]")
    add("--mix-duration", type=float, default=480.0, help="seconds per run of the mixes: some hold long sessions [480]")
    add("--costs", choices=COSTS, default="accelerator", help="kind of engine [accelerator]")
    add("--blocks", type=int, default=768, help="blocks per engine [768]")
    add("--jobs", type=int, default=2, help="processes [2]")
    add("--cache", type=Path, default=runs.default_directory(), help="where finished runs are kept [%(default)s]")
    add("--out", type=Path, default=RESULTS / "ablation.md", help="the report; plots go beside it [%(default)s]")
    return parser.parse_args(arguments)


def main() -> int:
    """Entry point."""
    options = parse()
    with runs.Runs(options.jobs, options.cache, runs.say) as kept:
        tables, mixes = compare(options, kept.play)
    command = f"python -m bench.ablation {shlex.join(sys.argv[1:])}".strip()
    text = ablation_report.markdown(tables, mixes, command, options, dict(TARGET_MIXTURE))
    options.out.write_text(text, "utf-8")
    ablation_report.plot(tables, mixes, options.out)
    print(text)
    return 0


def compare(options: argparse.Namespace, play: Play) -> tuple[list[Table], list[Mix]]:
    """Play all that the options ask for."""
    seeds = range(1, options.seeds + 1)
    tables, mixes = [], []
    for engines in options.replicas:
        runs.say(f"== {engines} engines")
        base = Case(
            MISA_T,
            None,
            engines,
            options.blocks,
            LIVE_PER_ENGINE * engines,
            options.duration,
            workload=WorkloadConfig(),
            costs=options.costs,
        )
        tables.append(table(base, seeds, options.warmup, play))
    for name in options.mixes:
        runs.say(f"== {name}")
        base = Case(MISA_T, None, 2, options.blocks, 2 * LIVE_PER_ENGINE, options.mix_duration, costs=options.costs)
        mixes.append(mix(name, base, range(1, options.mix_seeds + 1), options.warmup, play))
    return tables, mixes


if __name__ == "__main__":
    sys.exit(main())
