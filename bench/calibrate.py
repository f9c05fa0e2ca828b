"""The emulated engine against real ones: the same sessions under the same static concurrency, side by side.

Real engines are given by URL (see `bench.engines` for starting some) and should have the machine to themselves. Each
real run is kept as JSON in `--recorded` and reused, so that the emulator's costs can be tuned without new runs.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import real, report, simulate
from bench.children import measured
from bench.emulator import CostModel
from bench.player import RunRecord
from bench.summary import Figures, summarise

MOST_RATE_ERROR, MOST_HIT_ERROR = 0.15, 0.05
"""What counts as calibrated: relative error of the sample rate, and absolute error of the hit rate."""


@dataclass(frozen=True)
class Pair:
    """Steady figures of one concurrency, measured and emulated."""

    sessions: int
    real: Figures
    emulated: Figures

    @property
    def rate_error(self) -> float:
        """Emulated sample rate over the measured one, minus 1."""
        return (self.emulated.samples_per_minute or 0.0) / (self.real.samples_per_minute or 1.0) - 1.0

    @property
    def hit_error(self) -> float:
        """Emulated share of prompt tokens from the cache, minus the measured one."""
        return (self.emulated.hit_rate or 0.0) - (self.real.hit_rate or 0.0)

    @property
    def within(self) -> bool:
        """Whether both errors are within their bounds."""
        return abs(self.rate_error) <= MOST_RATE_ERROR and abs(self.hit_error) <= MOST_HIT_ERROR


def measure(options: argparse.Namespace, sessions: int) -> Figures:
    """Return the steady figures of a run on the real engines, played now or kept from before."""
    kept: Path = options.recorded / f"sessions{sessions}-seed{options.seed}-{options.duration:g}s.json"
    if not kept.exists():
        cap = sessions // len(options.engines)
        flags = ["--router", "sticky", "--cap", cap, "--duration", options.duration, "--warmup", options.warmup]
        flags += ["--seed", options.seed, "--live", options.live, "--engines", *options.engines]
        run_options = real.parse([str(flag) for flag in flags])
        run = measured(real.play(run_options))
        options.recorded.mkdir(parents=True, exist_ok=True)
        report.write_json(kept, vars(run_options), _steady(run, options.warmup)[1], run)
    steady: Mapping[str, Any] = json.loads(kept.read_text("utf-8"))["summary"]["steady"]
    return Figures(**steady)


def emulate(options: argparse.Namespace, sessions: int) -> Figures:
    """Return the steady figures of the same run on emulated engines."""
    engines = len(options.engines)
    case = simulate.Case(
        "sticky",
        sessions // engines,
        engines,
        blocks=options.blocks,
        live=options.live,
        duration_s=options.duration,
        seed=options.seed,
    )
    return _steady(simulate.run(case), options.warmup)[0]


def _steady(run: RunRecord, warmup_s: float) -> tuple[Figures, Any]:
    summary = summarise(run, warmup_s)
    if summary.steady is None or not summary.steady.completed:
        raise RuntimeError(f"nothing completed between {warmup_s:g} and {run.last_start:.0f} s")
    return summary.steady, summary


def table(pairs: Sequence[Pair]) -> list[str]:
    """Return the comparison as a Markdown table."""
    headings = (
        "sessions",
        "samples/min, real",
        "emulated",
        "error",
        "prompt tokens from cache, real",
        "emulated",
        "error",
        "continuation hits, real",
        "emulated",
        "within bounds",
    )
    rows = []
    for pair in pairs:
        a, b = pair.real, pair.emulated
        cells = (
            f"{pair.sessions}",
            f"{a.samples_per_minute:.1f}",
            f"{b.samples_per_minute:.1f}",
            f"{100 * pair.rate_error:+.1f} %",
            f"{a.hit_rate:.3f}",
            f"{b.hit_rate:.3f}",
            f"{100 * pair.hit_error:+.1f} points",
            f"{a.continuation_hit_rate or 0:.3f}",
            f"{b.continuation_hit_rate or 0:.3f}",
            "yes" if pair.within else "no",
        )
        rows.append(cells)
    return report.lines_of(headings, rows)


def markdown(options: argparse.Namespace, pairs: Sequence[Pair], command: str) -> str:
    """Return the whole report."""
    costs = ", ".join(f"`{name}` {value:g}" for name, value in asdict(CostModel()).items())
    return "\n".join(
        [
            "# The emulated engine against real ones",
            "",
            f"Made by `{command}`: {len(options.engines)} engines of {options.blocks} blocks, sticky sessions under a "
            f"static bound, {options.live} rollouts in hand, seed {options.seed}, {options.duration:g} s of which the "
            f"first {options.warmup:g} s are not counted. Bounds: {100 * MOST_RATE_ERROR:g} % of the sample rate, "
            f"{100 * MOST_HIT_ERROR:g} points of the hit rate.",
            "",
            f"Costs in seconds: {costs}.",
            "",
            *table(pairs),
            "",
        ]
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m bench.calibrate", description=__doc__)
    add = parser.add_argument
    add("--engines", nargs="+", required=True, metavar="URL", help="vLLM servers")
    add("--sessions", nargs="+", type=int, default=[8, 16, 32, 64], help="concurrent sessions in all [8 16 32 64]")
    add("--blocks", type=int, default=768, help="KV blocks of each engine [768]")
    add("--live", type=int, default=96)
    add("--duration", type=float, default=120.0)
    add("--warmup", type=float, default=30.0)
    add("--seed", type=int, default=1)
    add("--recorded", type=Path, required=True, metavar="DIR", help="where real runs are kept, and taken from")
    add("--result", type=Path, help="write the table to this Markdown file")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, emulate, print; the exit code tells whether all are within bounds."""
    options = parse()
    pairs = []
    for sessions in options.sessions:
        print(f"{sessions} sessions ...", file=sys.stderr, flush=True)
        pairs.append(Pair(sessions, measure(options, sessions), emulate(options, sessions)))
    text = markdown(options, pairs, "python -m bench.calibrate " + " ".join(sys.argv[1:]))
    print(text)
    if options.result is not None:
        options.result.write_text(text, "utf-8")
    return 0 if all(pair.within for pair in pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
