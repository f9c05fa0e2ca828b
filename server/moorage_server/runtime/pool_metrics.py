"""Pools as gauges, from the views that decisions rest on. Pure; what is unknown has no sample.

Every server shows the same shared state. Label values are bounded: classes and instances beyond the bound share one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api import present
from moorage_server.core import config as cfg
from moorage_server.core import forecast, lines
from moorage_server.core.view import FRESH, GONE, STALE, Instance, Pool
from moorage_server.meters import OTHER, Labels

#: Classes that no configuration names, and instances of one pool, that are shown apart.
CLASSES, INSTANCES = 32, 256

_CLASS = ("pool", "workload_class")
_INSTANCE = ("pool", "instance", "dp_rank")

#: Name -> what it says, and its labels.
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "moorage_sessions": ("Sessions that are placed (active) or wait for their turn (held).", (*_CLASS, "state")),
    "moorage_held_sessions": (
        "Held sessions of a class, under the reason that the first in its line waits for.",
        (*_CLASS, "reason"),
    ),
    "moorage_demand_sessions": (
        "Sessions that wait for their turn, all classes: what more engines are for.",
        ("pool",),
    ),
    "moorage_hold_age_seconds": ("How long the oldest held session waits; 0 while none is held.", _CLASS),
    "moorage_continuation_hit_ratio": ("Share of their context that next turns found in the cache.", _CLASS),
    "moorage_mixture_share": ("Share of completed samples: the trainer's target, or consumed.", (*_CLASS, "kind")),
    "moorage_mixture_deviation_points": (
        "Half the sum of |consumed - target| over the classes, in percentage points.",
        ("pool",),
    ),
    "moorage_mixture_samples": ("Completed samples that the mixture rests on; below 100, chance moves it.", ("pool",)),
    "moorage_pool_mode": ("1 for the mode in force: enforce or observe.", ("pool", "mode")),
    "moorage_reference_blocks": ("Blocks that a session of the class holds on average.", _CLASS),
    "moorage_residency_seconds": ("Seconds from admission to release of a session of the class.", _CLASS),
    "moorage_blocks": (
        "KV cache blocks of an instance: reserved in the ledger, used, cached and total as reported, the budget in"
        " force, and the highest forecast.",
        (*_INSTANCE, "kind"),
    ),
    "moorage_session_cap": ("Sessions that an instance may hold.", _INSTANCE),
    "moorage_pressure": ("Shortfall of an instance's hit rate, 0 to 1; none while no hit rate is known.", _INSTANCE),
    "moorage_brake": ("Factor on an instance's budget: 1 is no brake.", _INSTANCE),
    "moorage_instance_freshness": ("1 for what an instance is: fresh, stale or gone.", (*_INSTANCE, "freshness")),
    "moorage_instance_age_seconds": ("Age of what is known of an instance.", _INSTANCE),
    "moorage_instance_updating_weights": ("1 while weights are loaded into an instance.", _INSTANCE),
    "moorage_instance_stalled": ("1 while an instance has work and does none of it.", _INSTANCE),
}
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "moorage_completed_total": ("Samples completed since the pool began.", _CLASS),
    "moorage_admitted_total": ("Sessions admitted since the pool began.", _CLASS),
}
_SHARED = " Every server shows the same: aggregate over servers with max, not sum."

Family = GaugeMetricFamily | CounterMetricFamily


class PoolMetrics:
    """Collects the samples of one scrape."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {
            **{name: GaugeMetricFamily(name, text + _SHARED, labels=at) for name, (text, at) in _GAUGES.items()},
            **{name: CounterMetricFamily(name, text + _SHARED, labels=at) for name, (text, at) in _COUNTERS.items()},
        }

    def families(self) -> Iterable[Family]:
        """All metrics, those without a sample included."""
        return self._families.values()

    def add(self, view: Pool, seen: Labels) -> None:
        """The samples of one pool. ``seen`` remembers which of its classes have a label of their own."""
        labels = class_labels(view, seen)
        self._classes(view, labels)
        self._holds(view, labels)
        self._mixture(view, labels)
        self._instances(view)
        for mode in cfg.MODES:
            self._put("moorage_pool_mode", int(mode == view.config.mode), view.name, mode)

    def _put(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._families[name].add_metric(labels, value)

    def _classes(self, view: Pool, labels: Mapping[str, str]) -> None:
        sums: dict[tuple[str, str], int] = defaultdict(int)
        for name, counters in view.classes.items():
            for what in ("active", "held", "completed", "admitted"):
                sums[what, labels[name]] += getattr(counters, what)
        for (what, label), value in sums.items():
            if what in ("active", "held"):
                self._put("moorage_sessions", value, view.name, label, what)
            else:
                self._put(f"moorage_{what}_total", value, view.name, label)
        for name, found in view.published.items():
            if (label := labels[name]) != OTHER:
                self._put("moorage_continuation_hit_ratio", found.hit_rate, view.name, label)
                self._put("moorage_reference_blocks", found.reference_blocks, view.name, label)
                self._put("moorage_residency_seconds", found.residency_s, view.name, label)

    def _holds(self, view: Pool, labels: Mapping[str, str]) -> None:
        self._put("moorage_demand_sessions", sum(c.held for c in view.classes.values()), view.name)
        for label, age in _hold_ages(view, labels).items():
            self._put("moorage_hold_age_seconds", age, view.name, label)
        sums: dict[tuple[str, str], int] = defaultdict(int)
        for name, reason in lines.reasons(view).items():
            if name in view.classes:
                sums[labels[name], reason] += view.classes[name].held
        for (label, reason), held in sums.items():
            self._put("moorage_held_sessions", held, view.name, label, reason)

    def _mixture(self, view: Pool, labels: Mapping[str, str]) -> None:
        target = view.config.target_mixture()
        consumed = present.mixture({name: c.completed for name, c in view.classes.items()})
        for kind, shares in (("target", target), ("consumed", consumed)):
            sums: dict[str, float] = defaultdict(float)
            for name, share in shares.items():
                sums[labels[name]] += share
            for label, share in sums.items():
                self._put("moorage_mixture_share", share, view.name, label, kind)
        self._put("moorage_mixture_samples", sum(c.completed for c in view.classes.values()), view.name)
        if target and consumed:
            self._put("moorage_mixture_deviation_points", present.deviation(consumed, target), view.name)

    def _instances(self, view: Pool) -> None:
        # Those that are gone are the first to go without a label.
        items = sorted(view.instances.values(), key=lambda i: (view.freshness(i) == GONE, i.instance_id, i.dp_rank))
        for item in items[:INSTANCES]:
            at = (view.name, item.instance_id, str(item.dp_rank))
            for kind, blocks in _blocks(view, item).items():
                self._put("moorage_blocks", blocks, *at, kind)
            self._put("moorage_session_cap", _cap(view, item), *at)
            self._state(view, item, at)
        rest = items[INSTANCES:]
        for kind in ("reserved", "used", "total", "budget", "forecast", "cached"):
            known = [blocks for item in rest if (blocks := _blocks(view, item).get(kind)) is not None]
            self._put("moorage_blocks", sum(known) if known else None, view.name, OTHER, "", kind)
        caps = [cap for item in rest if (cap := _cap(view, item)) is not None]
        self._put("moorage_session_cap", sum(caps) if caps else None, view.name, OTHER, "")

    def _state(self, view: Pool, item: Instance, at: tuple[str, ...]) -> None:
        freshness = view.freshness(item)
        for name in (FRESH, STALE, GONE):
            self._put("moorage_instance_freshness", int(name == freshness), *at, name.lower())
        self._put("moorage_instance_age_seconds", max(0.0, view.age_s(item)), *at)
        if freshness == GONE:
            return
        self._put("moorage_instance_updating_weights", int(item.updating), *at)
        self._put("moorage_instance_stalled", int(item.stalled), *at)
        if item.cap is not None:
            # The controller ruled on it.
            self._put("moorage_pressure", item.pressure if _measured(item) else None, *at)
            self._put("moorage_brake", item.brake, *at)


def class_labels(view: Pool, seen: Labels) -> dict[str, str]:
    """The label of every class of the pool: configured ones keep their names, and the first of the others."""
    names = present.class_names(view)
    for name in names:
        if name not in view.config.classes:
            seen.know(name)
    return {name: name if name in view.config.classes else seen.of(name) for name in names}


def _hold_ages(view: Pool, labels: Mapping[str, str]) -> dict[str, float | None]:
    """Age of the oldest held session by label, seconds; None while those held are not looked at."""
    ages: dict[str, float | None] = {}
    for name, counters in view.classes.items():
        queue = view.queues.get(name)
        label = labels[name]
        if queue is not None and queue.heads:
            oldest_ms = min(held.since_ms for held in queue.heads)
            ages[label] = max(ages.get(label) or 0.0, (view.now_ms - oldest_ms) / 1000.0)
        elif counters.held:
            ages.setdefault(label, None)
        else:
            ages[label] = ages.get(label) or 0.0
    return ages


def _blocks(view: Pool, item: Instance) -> dict[str, int | None]:
    """Blocks by kind. What a lost engine reported is no longer known; what is booked there still is."""
    if view.freshness(item) == GONE:
        return {"reserved": item.reserved_blocks}
    return {
        "reserved": item.reserved_blocks,
        "used": item.used_blocks,
        "total": item.total_blocks,
        "budget": item.budget,
        "forecast": max(item.need[: len(forecast.HORIZONS)], default=None),
        "cached": _cached(item.snapshot),
    }


def _measured(item: Instance) -> bool:
    """Whether any hit rate is known; without one, a pressure of 0 means nothing."""
    rows = json.loads(item.signals) if item.signals else ()
    return item.pressure > 0 or any(name.endswith("hit_rate") and value is not None for name, value, *_ in rows)


@lru_cache(maxsize=4096)
def _cached(raw: bytes) -> int | None:
    snapshot = pb.InstanceSnapshot.FromString(raw)
    return snapshot.cached_blocks if snapshot.HasField("cached_blocks") else None


def _cap(view: Pool, item: Instance) -> int | None:
    """K_w; before the controller's first epoch the configured bound, None where there is none."""
    if view.freshness(item) == GONE:
        return None
    if item.cap is not None:
        return item.cap
    config = view.config
    return config.static_cap if config.policy == cfg.STATIC else config.max_sessions_per_instance or None
