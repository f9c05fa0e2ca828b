"""Counts and latencies of the RPCs of one process, in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from moorage_server.meters import Histogram

#: Upper edges of the latency buckets, seconds.
EDGES_S = (0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 60.0)


@dataclass(slots=True)
class MethodStats:
    """One method: how long its calls took, by status code; what they spent waiting for their turn is left out."""

    latencies: dict[str, Histogram] = field(default_factory=dict)
    under_way: int = 0

    @property
    def calls(self) -> dict[str, int]:
        """Finished calls by status code."""
        return {code: latencies.count for code, latencies in self.latencies.items()}

    def observe(self, code: grpc.StatusCode, seconds: float) -> None:
        """Counts one finished call."""
        name = code.name
        latencies = self.latencies.get(name)
        if latencies is None:
            latencies = self.latencies[name] = Histogram(EDGES_S)
        latencies.observe(seconds)


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
