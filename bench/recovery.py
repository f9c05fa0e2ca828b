"""How a run takes a shift: the rate before, the steady rate after, the lowest in between, and the time to recover."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.player import RunRecord
from bench.summary import figures

WINDOW_S = 20.0
"""A rate at a moment is that of the samples of the next so many seconds."""
STEP_S = 1.0
RECOVERED = 0.9
"""Share of the new steady rate at which a run has recovered."""
LOOK_S = 90.0
"""The lowest rate is looked for until so long after the world is at rest again: all runs fluctuate some time."""
BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Recovery:
    """Figures over all seeds together. Rates in samples per minute and run, times in seconds."""

    before: float
    steady: float
    """Rate of the runs that had the shifted workload from their start, over the time after the shift."""
    lowest: float
    """Lowest rate after the shift, as a share of `steady`."""
    usual_lowest: float
    """The same of the runs without a shift in their middle: what mere chance does."""
    recovery_s: float | None
    """From the moment that the world is at rest until the rate is back; None where that never happened."""
    last: float
    """Rate of the last minute, as a share of `steady`."""
    residency_s: float
    """Mean time from admission to end in the steady runs."""
    hit_rate: float | None
    """Continuation hits after the shift; likewise in the steady runs."""
    steady_hit_rate: float | None
    failed: int
    moved: int
    """Sessions of all shifted runs."""

    @property
    def residencies(self) -> float | None:
        """The recovery in mean residencies."""
        return None if self.recovery_s is None else self.recovery_s / self.residency_s


class Completions:
    """When the samples of several runs were completed."""

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs = len(runs)
        self.end = min(run.end for run in runs)
        self._times = sorted(s.end for run in runs for s in run.sessions if s.outcome == "completed" and s.end)

    def rate(self, start: float, end: float) -> float:
        """Samples per minute and run between two times."""
        count = bisect_left(self._times, end) - bisect_left(self._times, start)
        return 60.0 * count / (end - start) / self.runs

    def curve(self, start: float, end: float) -> list[tuple[float, float]]:
        """Moments and their rates, as far as a whole window follows."""
        last = min(end, self.end - WINDOW_S)
        steps = math.floor((last - start) / STEP_S)
        return [
            (start + n * STEP_S, self.rate(start + n * STEP_S, start + n * STEP_S + WINDOW_S)) for n in range(steps + 1)
        ]


def recovery(
    shifted: Sequence[RunRecord], steady: Sequence[RunRecord], warmup_s: float, at_s: float, rest_s: float
) -> Recovery:
    """Return the figures of a shift at `at_s` that leaves the world at rest at `rest_s`."""
    moved, calm = Completions(shifted), Completions(steady)
    new_rate = calm.rate(at_s, calm.end)
    fall = moved.curve(at_s, rest_s + LOOK_S)
    low_at, low = min(fall, key=lambda point: point[1])
    back: float | None = rest_s
    if low < RECOVERED * new_rate:
        after = [t for t, rate in moved.curve(max(rest_s, low_at), moved.end) if rate >= RECOVERED * new_rate]
        back = after[0] if after else None
    done = [
        s.end - s.admitted
        for run in steady
        for s in run.sessions
        if s.outcome == "completed" and s.end is not None and s.admitted is not None and s.end >= at_s
    ]
    return Recovery(
        before=moved.rate(warmup_s, at_s),
        steady=new_rate,
        lowest=low / new_rate,
        usual_lowest=min(rate for _, rate in calm.curve(at_s, rest_s + LOOK_S)) / new_rate,
        recovery_s=None if back is None else back - rest_s,
        last=moved.rate(moved.end - 60.0, moved.end) / new_rate,
        residency_s=fmean(done),
        hit_rate=_hits(shifted, at_s),
        steady_hit_rate=_hits(steady, at_s),
        failed=sum(s.outcome == "failed" for run in shifted for s in run.sessions),
        moved=sum(run.moved for run in shifted),
    )


def _hits(records: Sequence[RunRecord], start: float) -> float | None:
    rates = [figures(run, start, run.end, BLOCK_SIZE).continuation_hit_rate for run in records]
    known = [rate for rate in rates if rate is not None]
    return fmean(known) if known else None
