"""What one server process counts of its own work, as plain numbers: counting must cost next to nothing.

``runtime.process_metrics`` shows it. One event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter

#: Stands for all names beyond the bound.
OTHER = "other"
#: Pools that are counted apart.
POOLS = 64
#: Upper edges of waits, seconds; the longest wait is ten minutes.
WAIT_EDGES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

#: Seconds that the call under way spent waiting for its turn: not the server's latency.
waited_s: ContextVar[float] = ContextVar("waited_s", default=0.0)


class Labels:
    """The first ``most`` names that are known keep their own label; all others share one.

    Names come from callers, and every label value is kept by whoever scrapes: their number must be bounded.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def know(self, name: str) -> None:
        """Gives a name its own label, while there is room."""
        if name not in self._known and len(self._known) < self._most:
            self._known[name] = name

    def of(self, name: str) -> str:
        """The name's label."""
        return self._known.get(name, OTHER)

    def known(self) -> list[str]:
        """All names with a label of their own."""
        return list(self._known)


@dataclass(slots=True)
class Histogram:
    """Observations by the first of ``edges`` that is not below them; one more bucket holds what is above all."""

    edges: tuple[float, ...]
    total: float = 0.0
    buckets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buckets = self.buckets or [0] * (len(self.edges) + 1)

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.buckets)

    def observe(self, value: float) -> None:
        """Counts one observation, in the unit of the edges."""
        self.total += value
        self.buckets[bisect_left(self.edges, value)] += 1

    def copy(self) -> Histogram:
        """As it is now."""
        return Histogram(self.edges, self.total, list(self.buckets))


class Histograms:
    """Histograms with the same edges, by their labels."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._rows: dict[tuple[str, ...], Histogram] = {}

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        """Counts one observation."""
        row = self._rows.get(labels)
        if row is None:
            row = self._rows[labels] = Histogram(self._edges)
        row.observe(value)

    def rows(self) -> dict[tuple[str, ...], Histogram]:
        """All of them as they are now."""
        return {labels: row.copy() for labels, row in self._rows.items()}


class Meters:
    """The counters of one process that belong to pools."""

    def __init__(self) -> None:
        self.pools = Labels(POOLS)
        #: By pool, rpc, and the numbers of Decision and HoldReason.
        self.decisions: Counter[tuple[str, str, int, int]] = Counter()
        #: Seconds by pool and outcome.
        self.waits = Histograms(WAIT_EDGES_S)
        #: By pool: leases and places in the queue that ran out, and epochs.
        self.expiries: Counter[str] = Counter()
        self.epochs: Counter[str] = Counter()


class Wait:
    """A call's wait for its turn, or for its home: ``with Wait(...) as wait``, and ``outcome`` at its end.

    The time is counted apart, and left out of the call's latency.
    """

    def __init__(self, meters: Meters, pool: str) -> None:
        self._meters = meters
        self._pool = pool
        self._started = perf_counter()
        self.outcome = "failed"

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        seconds = perf_counter() - self._started
        outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else self.outcome
        self._meters.waits.observe((self._meters.pools.of(self._pool), outcome), seconds)
        waited_s.set(waited_s.get() + seconds)
