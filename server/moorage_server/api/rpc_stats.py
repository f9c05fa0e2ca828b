"""Counts and latencies of the RPCs of one process, in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import grpc

#: Upper edges of the latency buckets, in milliseconds; one more bucket holds what is slower.
BUCKETS_MS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 5000.0, 60_000.0)


@dataclass(slots=True)
class MethodStats:
    """One method: calls by status code, and how long they took, waits included."""

    calls: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    total_ms: float = 0.0
    slowest_ms: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_MS) + 1))

    def observe(self, code: grpc.StatusCode, milliseconds: float) -> None:
        """Counts one finished call."""
        self.calls[code.name] += 1
        self.total_ms += milliseconds
        self.slowest_ms = max(self.slowest_ms, milliseconds)
        self.buckets[bisect_left(BUCKETS_MS, milliseconds)] += 1


class RpcStats:
    """All methods of a process, by full name such as "/moorage.v1.SchedulerService/Admit"."""

    def __init__(self) -> None:
        self._methods: dict[str, MethodStats] = {}

    def of(self, method: str) -> MethodStats:
        """The figures of one method, created at first use."""
        stats = self._methods.get(method)
        if stats is None:
            stats = self._methods[method] = MethodStats()
        return stats

    def methods(self) -> dict[str, MethodStats]:
        """A copy of the table; the figures in it go on counting."""
        return dict(self._methods)
