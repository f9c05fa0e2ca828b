"""Pools as gauges: values, what is unknown, and bounds on labels."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import ClassConfig, PoolConfig
from moorage_server.core.view import Ask, Class, Held, Instance, Pool, Published, Queue
from moorage_server.meters import Labels
from moorage_server.runtime.pool_metrics import CLASSES, INSTANCES, PoolMetrics
from tests.unit.server.exposed import Exposed, exposed

NOW_MS = 1_000_000


def instance(name: str = "i", rank: int = 0, **changes: Any) -> Instance:
    return Instance(f"{rank}|{name}", name, rank, "1", **{"seen_ms": NOW_MS - 500, **changes})


def pool(*instances: Instance, name: str = "p", **fields: Any) -> Pool:
    values = {"config": PoolConfig(), **fields}
    return Pool(name, NOW_MS, instances={i.key: i for i in instances}, **values)


def published(**changes: Any) -> Published:
    values = {"reference_blocks": 40.0, "residency_s": 12.5, "growth": 0.0, "evidence": 1.0, "prior_tokens": 0.0}
    return Published(**{**values, "survival": (), **changes})


def held(since_ms: int, workload_class: str = "a") -> Held:
    return Held(Ask("s", workload_class), "POOL_CAP", since_ms, NOW_MS)


def shown(*views: Pool, seen: Labels | None = None) -> Exposed:
    metrics = PoolMetrics()
    for view in views:
        metrics.add(view, seen or Labels(CLASSES))
    return exposed(metrics.families())


def test_classes() -> None:
    view = pool(
        classes={"a": Class(active=3, held=2, completed=5, admitted=9), "b": Class(active=1)},
        queues={"a": Queue(2, [held(NOW_MS - 1_000), held(NOW_MS - 7_500)])},
        published={"a": published(hit_rate=0.75)},
    )
    found = shown(view)
    at = {"pool": "p", "workload_class": "a"}
    assert found.value("moorage_sessions", **at, state="active") == 3
    assert found.value("moorage_sessions", **at, state="held") == 2
    assert found.value("moorage_completed_total", **at) == 5
    assert found.value("moorage_admitted_total", **at) == 9
    assert found.value("moorage_hold_age_seconds", **at) == 7.5
    assert found.value("moorage_hold_age_seconds", pool="p", workload_class="b") == 0
    assert found.value("moorage_demand_sessions", pool="p") == 2
    assert found.value("moorage_continuation_hit_ratio", **at) == 0.75
    assert found.value("moorage_reference_blocks", **at) == 40
    assert found.value("moorage_residency_seconds", **at) == 12.5


def test_holds_by_what_their_lines_wait_for() -> None:
    """Not by what was noted when they came: who waits inside a call is told nothing anew."""
    view = pool(
        instance(total_blocks=100, cap=1, sessions=1),
        classes={"a": Class(held=7), "b": Class(active=1), "c": Class(held=2)},
        queues={"a": Queue(7, [Held(Ask("s", "a"), "QUEUED_BEHIND", NOW_MS - 1_000, NOW_MS)]), "c": Queue(2, [])},
    )
    found = shown(view)
    assert found.value("moorage_held_sessions", pool="p", workload_class="a", reason="POOL_CAP") == 7
    assert found.value("moorage_held_sessions", pool="p", workload_class="c", reason="UNKNOWN") == 2
    assert found.labels("moorage_held_sessions", "workload_class") == {"a", "c"}
    other = shown(view, seen=Labels(0))
    assert other.value("moorage_held_sessions", pool="p", workload_class="other", reason="POOL_CAP") == 7


def test_the_mode_in_force() -> None:
    found = shown(pool(config=PoolConfig(mode="observe")))
    assert found.value("moorage_pool_mode", pool="p", mode="observe") == 1
    assert found.value("moorage_pool_mode", pool="p", mode="enforce") == 0


def test_a_pressure_without_any_hit_rate_means_nothing() -> None:
    def pressure(*signals: list[Any]) -> float | None:
        item = instance(cap=3, signals=json.dumps([["preemptions", 0.0, 1.0, ""], *signals]))
        return shown(pool(item)).value("moorage_pressure", pool="p", instance="i", dp_rank=0)

    assert pressure(["continuation_hit_rate", None, None, ""], ["engine_hit_rate", None, None, ""]) is None
    assert pressure(["engine_hit_rate", 0.97, 1.0, ""]) == 0
    assert pressure(["continuation_hit_rate.a", 1.0, 1.0, ""], ["continuation_hit_rate", 1.0, 1.0, ""]) == 0


def test_the_mixture() -> None:
    classes = {"a": ClassConfig(target_share=3), "b": ClassConfig(target_share=1)}
    view = pool(config=PoolConfig(classes=classes), classes={"a": Class(completed=1), "b": Class(completed=1)})
    found = shown(view)
    assert found.value("moorage_mixture_share", pool="p", workload_class="a", kind="target") == 0.75
    assert found.value("moorage_mixture_share", pool="p", workload_class="b", kind="consumed") == 0.5
    assert found.value("moorage_mixture_deviation_points", pool="p") == pytest.approx(25)
    assert found.value("moorage_mixture_samples", pool="p") == 2


def test_an_instance() -> None:
    snapshot = pb.InstanceSnapshot(cached_blocks=70).SerializeToString()
    item = instance(
        rank=1, reserved_blocks=30, used_blocks=40, total_blocks=100, budget=90, need=(50, 60, 55), cap=8,
        pressure=0.25, brake=0.9, stalled=True, updating_since_ms=1, snapshot=snapshot, observed_age_ms=1_500,
    )  # fmt: skip
    found = shown(pool(item))
    at = {"pool": "p", "instance": "i", "dp_rank": 1}
    blocks = {"reserved": 30, "used": 40, "total": 100, "budget": 90, "forecast": 60, "cached": 70}
    assert {kind: found.value("moorage_blocks", **at, kind=kind) for kind in blocks} == blocks
    assert found.value("moorage_session_cap", **at) == 8
    assert (found.value("moorage_pressure", **at), found.value("moorage_brake", **at)) == (0.25, 0.9)
    assert found.value("moorage_instance_age_seconds", **at) == 2
    assert found.value("moorage_instance_stalled", **at) == 1
    assert found.value("moorage_instance_updating_weights", **at) == 1
    states = {name: found.value("moorage_instance_freshness", **at, freshness=name) for name in ("fresh", "stale")}
    assert states == {"fresh": 0, "stale": 1}, "an engine that stands still is stale"


def test_the_unknown_has_no_sample() -> None:
    view = pool(
        instance(reserved_blocks=0),
        classes={"a": Class(held=1)},
        queues={"a": Queue(1, [])},
        published={"a": published()},
    )
    found = shown(view)
    at = {"pool": "p", "instance": "i", "dp_rank": 0}
    assert found.labels("moorage_blocks", "kind") == {"reserved"}
    for name in ("moorage_session_cap", "moorage_pressure", "moorage_brake"):
        assert found.value(name, **at) is None, name
    assert found.value("moorage_hold_age_seconds", pool="p", workload_class="a") is None
    assert found.value("moorage_continuation_hit_ratio", pool="p", workload_class="a") is None
    assert found.value("moorage_mixture_deviation_points", pool="p") is None
    assert not any(math.isnan(value) for value in found.samples.values())


def test_of_a_lost_engine_the_bookings_are_known() -> None:
    item = instance(gone=True, reserved_blocks=5, used_blocks=4, total_blocks=9, budget=9, cap=3)
    found = shown(pool(item))
    at = {"pool": "p", "instance": "i", "dp_rank": 0}
    assert found.labels("moorage_blocks", "kind") == {"reserved"}
    assert found.value("moorage_instance_freshness", **at, freshness="gone") == 1
    assert found.value("moorage_session_cap", **at) is None
    assert found.value("moorage_instance_stalled", **at) is None


def test_the_static_cap_is_known_from_the_start() -> None:
    found = shown(pool(instance(), config=PoolConfig(policy="static", static_cap=7)))
    assert found.value("moorage_session_cap", pool="p", instance="i", dp_rank=0) == 7


def test_classes_that_nobody_configured_are_bounded() -> None:
    config = PoolConfig(classes={"z-configured": ClassConfig(target_share=1)})
    names = [f"c-{n:03}" for n in range(CLASSES + 10)]
    classes = {name: Class(active=1, held=1, completed=2) for name in [*names, "z-configured"]}
    queues = {name: Queue(1, [held(NOW_MS - 1_000 * n, name)]) for n, name in enumerate(names)}
    estimates = {name: published(hit_rate=0.5) for name in names}
    found = shown(pool(config=config, classes=classes, queues=queues, published=estimates))
    labels = found.labels("moorage_sessions", "workload_class")
    assert len(labels) == CLASSES + 2
    assert {"other", "z-configured"} <= labels
    at = {"pool": "p", "workload_class": "other"}
    assert found.value("moorage_sessions", **at, state="active") == 10
    assert found.value("moorage_completed_total", **at) == 20
    assert found.value("moorage_hold_age_seconds", **at) == CLASSES + 9
    assert found.value("moorage_mixture_share", **at, kind="consumed") == pytest.approx(10 / (CLASSES + 11))
    assert found.value("moorage_continuation_hit_ratio", **at) is None, "no average of averages"
    assert found.value("moorage_demand_sessions", pool="p") == len(classes)


def test_a_class_keeps_the_label_that_it_had() -> None:
    seen = Labels(1)
    shown(pool(classes={"m": Class()}), seen=seen)
    found = shown(pool(classes={"a": Class(), "m": Class(active=1)}), seen=seen)
    assert found.value("moorage_sessions", pool="p", workload_class="m", state="active") == 1
    assert found.labels("moorage_sessions", "workload_class") == {"m", "other"}


def test_instances_are_bounded_and_the_lost_ones_go_first() -> None:
    items = [instance(f"i-{n:03}", reserved_blocks=1, total_blocks=10, cap=2) for n in range(INSTANCES + 3)]
    items[0].gone = True
    found = shown(pool(*items))
    labels = found.labels("moorage_blocks", "instance")
    assert len(labels) == INSTANCES + 1
    assert "i-000" not in labels
    at = {"pool": "p", "instance": "other", "dp_rank": ""}
    assert found.value("moorage_blocks", **at, kind="reserved") == 3
    assert found.value("moorage_blocks", **at, kind="total") == 20
    assert found.value("moorage_session_cap", **at) == 4
    assert "other" not in found.labels("moorage_brake", "instance")


def test_any_name_survives() -> None:
    name = 'a "quoted" \\ back\nslash {é} 😀'
    found = shown(pool(instance(name), name=name, classes={name: Class(active=1)}))
    assert found.value("moorage_sessions", pool=name, workload_class=name, state="active") == 1
    assert found.labels("moorage_blocks", "instance") == {name}


def test_every_gauge_says_how_to_aggregate() -> None:
    families = shown(pool()).families.values()
    assert len(families) == 21
    for family in families:
        assert family.documentation.endswith("aggregate over servers with max, not sum."), family.name
