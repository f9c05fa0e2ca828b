"""What one server process counted, as metrics. Pure; sums over servers make sense here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.meters import Histogram

_DECISIONS = {int(n): name.removeprefix("DECISION_").lower() for name, n in pb.Decision.items()}
_REASONS = {int(n): name.removeprefix("HOLD_REASON_") for name, n in pb.HoldReason.items()} | {0: ""}


@dataclass(slots=True)
class ProcessSample:
    """The counters of a process as they were at one moment. Histograms by the values of their labels, in seconds."""

    version: str
    ready: bool = False
    decisions: Mapping[tuple[str, str, int, int], int] = field(default_factory=dict)
    rpcs: Mapping[tuple[str, ...], Histogram] = field(default_factory=dict)
    under_way: Mapping[str, int] = field(default_factory=dict)
    waits: Mapping[tuple[str, ...], Histogram] = field(default_factory=dict)
    scripts: Mapping[tuple[str, ...], Histogram] = field(default_factory=dict)
    store_errors: Mapping[str, int] = field(default_factory=dict)
    #: By pool.
    expiries: Mapping[str, int] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    holders: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)


def families(sample: ProcessSample) -> Iterable[Metric]:
    """All metrics of the process."""
    decisions: Counter[tuple[str, ...]] = Counter()
    for (pool, rpc, decision, reason), count in sample.decisions.items():
        decisions[pool, rpc, _DECISIONS.get(decision, ""), _REASONS.get(reason, "")] += count
    yield _counter(
        "moorage_decisions_total",
        "Answers of Admit and Place. A place with a reason is one that mode observe would not have enforced.",
        ("pool", "rpc", "decision", "reason"),
        decisions,
    )
    yield _histogram(
        "moorage_rpc_seconds",
        "How long calls took, their waits for a turn left out; streams last as long as they are watched.",
        ("rpc", "code"),
        sample.rpcs,
    )
    yield _gauge("moorage_rpcs_under_way", "Calls under way, waiting ones included.", ("rpc",), _ones(sample.under_way))
    yield _histogram(
        "moorage_wait_seconds",
        "How long calls with max_wait waited, by what came of it: place, hold, reject, moved (its home was lost"
        " meanwhile), cancelled, failed.",
        ("pool", "outcome"),
        sample.waits,
    )
    yield _gauge("moorage_waiting_calls", "Calls that wait here for their turn.", ("pool",), _ones(sample.waiting))
    yield _counter(
        "moorage_lease_expiries_total",
        "Leases and places in the queue that ran out, as this process found them.",
        ("pool",),
        _ones(sample.expiries),
    )
    yield _counter("moorage_epochs_total", "Controller epochs that this process ran.", ("pool",), _ones(sample.epochs))
    yield _gauge(
        "moorage_epoch_holder", "1 at the process that drives the pool's controller.", ("pool",), _ones(sample.holders)
    )
    yield _histogram(
        "moorage_store_seconds",
        "How long script calls took, the wait for a shared round trip included.",
        ("script",),
        sample.scripts,
    )
    yield _counter(
        "moorage_store_errors_total", "Script calls that failed, by error.", ("kind",), _ones(sample.store_errors)
    )
    yield _gauge("moorage_ready", "1 while the store answers and the server does not end.", (), {(): int(sample.ready)})
    yield _gauge("moorage_build_info", "Always 1.", ("version",), {(sample.version,): 1})


def _ones(values: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(name,): value for name, value in values.items()}


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, row in rows.items():
        edges = [*map(str, row.edges), "+Inf"]
        family.add_metric(key, list(zip(edges, accumulate(row.buckets), strict=True)), row.total)
    return family
