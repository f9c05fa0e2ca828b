"""Answers as a server with two instances and three classes would give them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration

from moorage.v1 import inspector_pb2 as inspector
from moorage.v1 import operator_pb2 as operator
from moorage.v1 import scheduler_pb2 as scheduler

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def pool(**changes: Any) -> inspector.GetPoolResponse:
    """A pool at work, healthy, with four sessions held."""
    fields: dict[str, Any] = {
        "pool": "default", "mode": operator.MODE_ENFORCE, "policy": "misa-t", "active_sessions": 22,
        "held_sessions": 4, "reserved_blocks": 980, "used_blocks": 900, "total_blocks": 1536, "session_cap": 30,
        "pressure": 0.02, "held_by_class": {"agentic": 3, "rlvr": 1},
        "active_by_class": {"agentic": 12, "rlvr": 7, "rlhf": 3},
        "released_by_class": {"agentic": 130, "rlvr": 90, "rlhf": 50},
        "completed_by_class": {"agentic": 120, "rlvr": 85, "rlhf": 45},
        "target_mixture": {"agentic": 0.486, "rlvr": 0.331, "rlhf": 0.183},
        "consumed_mixture": {"agentic": 0.48, "rlvr": 0.34, "rlhf": 0.18},
        "mixture_deviation": 0.9, "unlabelled_total": 5, "unknown_class_total": 1, "decisions_per_second": 12.5,
        "epochs": 321, "config": operator.PoolConfig(policy="misa-t", healthy_hit_rate=0.9),
    }  # fmt: skip
    fields.update(changes)
    return inspector.GetPoolResponse(**fields)


def instance(name: str = "vllm-0", rank: int = 0, **changes: Any) -> inspector.Instance:
    """A serving instance that tells everything."""
    fields: dict[str, Any] = {
        "snapshot": scheduler.InstanceSnapshot(
            instance_id=name, endpoint=f"http://{name}:8000", dp_rank=rank, incarnation="i1", sequence=7,
            state=scheduler.INSTANCE_STATE_SERVING, block_size=16, total_blocks=768, used_blocks=450,
            cached_blocks=200, running=8, waiting=1, preemptions_total=0, weight_version="step-12",
        ),
        "freshness": inspector.FRESHNESS_FRESH, "active_sessions": 11, "active_by_class": {"agentic": 6, "rlvr": 5},
        "reserved_blocks": 490, "session_cap": 15, "class_caps": {"agentic": 9, "rlvr": 6}, "pressure": 0.02,
        "brake": 1.0, "budget_blocks": 700, "forecast_blocks": 520,
        "prefix_index": inspector.PrefixIndex(source="events", blocks=640, age=Duration(seconds=1)),
        "signals": [
            inspector.Signal(name="continuation_hit_rate", value=0.95, detail="over 8 s"),
            inspector.Signal(name="prefill_backlog"),
        ],
    }  # fmt: skip
    fields.update(changes)
    built = inspector.Instance(**fields)
    built.age.FromMilliseconds(400)
    return built


def bare_instance(name: str = "vllm-1") -> inspector.Instance:
    """An instance of which next to nothing is known."""
    snapshot = scheduler.InstanceSnapshot(instance_id=name, incarnation="i9")
    return inspector.Instance(snapshot=snapshot, freshness=inspector.FRESHNESS_STALE)


def instances(*items: inspector.Instance) -> inspector.ListInstancesResponse:
    """One page of instances."""
    return inspector.ListInstancesResponse(instances=items or (instance(), bare_instance()))


def workload_class(name: str = "agentic", **changes: Any) -> inspector.WorkloadClass:
    """A class with evidence."""
    fields: dict[str, Any] = {
        "workload_class": name, "reference_blocks": 40.25, "demand_sessions": 15, "quota_blocks": 880.7,
        "evidence": 0.8, "target": 0.486, "completed": 120, "held": 3, "active": 12,
        "growth_tokens_per_second": 35.0, "continuation_hit_rate": 0.95,
    }  # fmt: skip
    fields.update(changes)
    built = inspector.WorkloadClass(**fields)
    built.residency.FromSeconds(60)
    built.tool_gap.FromMilliseconds(1500)
    if built.held:
        built.oldest_hold.FromSeconds(41)
    return built


def bare_class(name: str = "new") -> inspector.WorkloadClass:
    """A class of which nothing is known yet."""
    return inspector.WorkloadClass(workload_class=name)


def classes(*items: inspector.WorkloadClass) -> inspector.ListClassesResponse:
    """One page of classes."""
    if not items:
        items = (workload_class(), workload_class("rlvr", held=1, active=7, target=0.331, completed=85), bare_class())
    return inspector.ListClassesResponse(classes=items)


def hold(reason: str = "KV_BUDGET", now: datetime = NOW, **changes: Any) -> scheduler.Hold:
    """A hold of 41 s, third in its queue."""
    fields: dict[str, Any] = {"position": 3, "ahead": 5, "detail": "needs 40 blocks, 12 fit"}
    fields.update(changes)
    built = scheduler.Hold(reason=scheduler.HoldReason.Value(f"HOLD_REASON_{reason}"), **fields)
    built.retry_after.FromSeconds(1)
    built.held_since.FromDatetime(now - timedelta(seconds=41))
    return built


def session(name: str = "s1", now: datetime = NOW, **changes: Any) -> inspector.Session:
    """A running session, admitted 12 minutes ago."""
    fields: dict[str, Any] = {
        "session_id": name, "workload_class": "agentic", "declared_class": "tools", "group_id": "g1",
        "phase": scheduler.PHASE_RUNNING, "instance_id": "vllm-0", "incarnation": "i1", "reserved_blocks": 40,
        "context_tokens": 512, "turn": 3, "block_seconds": 1234.5,
    }  # fmt: skip
    fields.update(changes)
    built = inspector.Session(**fields)
    built.admitted_time.FromDatetime(now - timedelta(minutes=12))
    built.lease.expire_time.FromDatetime(now + timedelta(seconds=50))
    built.lease.ttl.FromSeconds(60)
    return built


def held_session(name: str = "h1", now: datetime = NOW, reason: str = "KV_BUDGET") -> inspector.Session:
    """A session that waits."""
    return inspector.Session(
        session_id=name, workload_class="agentic", phase=scheduler.PHASE_HELD, hold=hold(reason, now)
    )


def history(*kinds: str) -> list[inspector.HistoryEntry]:
    """Entries a second apart."""
    entries = [inspector.HistoryEntry(kind=kind, reason=f"why {kind}", instance_id="vllm-0") for kind in kinds]
    for second, entry in enumerate(entries):
        entry.time.FromDatetime(NOW + timedelta(seconds=second))
    return entries


def event(token: str, **changes: Any) -> inspector.WatchEventsResponse:
    """An admission, as an event."""
    fields: dict[str, Any] = {
        "kind": "admit", "session_id": "s1", "instance_id": "vllm-0", "decision": scheduler.DECISION_PLACE,
        "values": {"blocks": "40", "note": "two words"},
    }  # fmt: skip
    fields.update(changes)
    built = inspector.WatchEventsResponse(resume_token=token, **fields)
    built.time.FromDatetime(NOW)
    return built


def placed(**changes: Any) -> scheduler.AdmitResponse:
    """An admission to vllm-0."""
    built = scheduler.AdmitResponse(
        decision=scheduler.DECISION_PLACE,
        placement=scheduler.Placement(instance_id="vllm-0", endpoint="http://vllm-0:8000", dp_rank=1),
        lease=scheduler.Lease(token="t-1"),
        workload_class="agentic",
        **changes,
    )
    built.lease.ttl.FromSeconds(60)
    return built
