"""The best static cap for a case, found by trying: what an operator would have to do for every mix by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.intervals import Interval, interval
from bench.player import RunRecord
from bench.simulate import Case
from bench.summary import Figures, summarise

Play = Callable[[Sequence[Case]], list[RunRecord]]

TUNED = "static, sweep-tuned"
"""The row of the best static cap under the cache-aware policy of the usual routers: the paper's baseline."""
STICKY = "sticky router, sweep-tuned"
"""The row of the best cap of a plain router: first come first served, a session stays where it began."""
BOUND = "bound: clairvoyant admission"
"""The row of who knows every session's plan in advance: what admission can get from the same memory."""
COARSE = (3, 6, 12, 24, 48)
"""Caps tried first, in sessions per engine."""
ROUNDS = 3
"""Times that the middles between the best cap and its neighbours are tried."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sample rates by cap, one per seed in the order of the seeds, and continuation hit rates."""

    rates: dict[int, list[float]]
    hits: dict[int, list[float]]

    @property
    def best(self) -> int:
        """The cap of the highest mean rate."""
        return max(self.rates, key=lambda cap: interval(self.rates[cap]).mean)

    def points(self) -> list[tuple[int, Interval, Interval | None]]:
        """Cap, rate and continuation hit rate (None without continuations), by cap."""
        return [
            (cap, interval(self.rates[cap]), interval(self.hits[cap]) if self.hits[cap] else None)
            for cap in sorted(self.rates)
        ]


def steady(record: RunRecord, warmup_s: float) -> Figures:
    """Return the figures of the steady window, or of the whole run where there was none."""
    summary = summarise(record, warmup_s)
    return summary.steady or summary.overall


def rate(record: RunRecord, warmup_s: float) -> float:
    """Return samples per minute; 0 where nothing ended."""
    return steady(record, warmup_s).samples_per_minute or 0.0


def tune(
    case: Case, seeds: Sequence[int], warmup_s: float, play: Play, caps: Sequence[int] = COARSE, rounds: int = ROUNDS
) -> Sweep:
    """Sweep the cap of a case whose router takes one: `caps`, then `rounds` times between the best and its neighbours.

    No cap is tried twice.
    """
    sweep = Sweep({}, {})
    wanted = set(caps)
    for _ in range(rounds + 1):
        _try(sweep, sorted(wanted - set(sweep.rates)), case, seeds, warmup_s, play)
        tried = sorted(sweep.rates)
        at = tried.index(sweep.best)
        wanted = {(sweep.best + tried[n]) // 2 for n in (at - 1, at + 1) if 0 <= n < len(tried)}
    return sweep


def _try(sweep: Sweep, caps: Sequence[int], case: Case, seeds: Sequence[int], warmup_s: float, play: Play) -> None:
    cases = [replace(case, cap=cap, seed=seed) for cap in caps for seed in seeds]
    records = play(cases) if cases else []
    for n, cap in enumerate(caps):
        figures = [steady(record, warmup_s) for record in records[n * len(seeds) : (n + 1) * len(seeds)]]
        sweep.rates[cap] = [f.samples_per_minute or 0.0 for f in figures]
        sweep.hits[cap] = [f.continuation_hit_rate for f in figures if f.continuation_hit_rate is not None]
