"""From the ledger's plain values to the messages that the Inspector shows. Pure; unknown stays absent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api import pool_config
from moorage_server.api.times import to_duration, to_timestamp
from moorage_server.core import config as cfg
from moorage_server.core import forecast, prefixes
from moorage_server.core.view import GONE, UNINDEXED, Instance, Pool
from moorage_server.store import keys
from moorage_server.store.records import Event, SessionRecord

_FRESHNESS = {
    "FRESH": ipb.FRESHNESS_FRESH,
    "STALE": ipb.FRESHNESS_STALE,
    "GONE": ipb.FRESHNESS_GONE,
}
_PHASES: dict[str, pb.Phase.ValueType] = {
    "PLACED": pb.PHASE_PLACED,
    "RUNNING": pb.PHASE_RUNNING,
    "TOOL_WAIT": pb.PHASE_TOOL_WAIT,
}
#: Fields of an event that have their own place in the message.
_EVENT_FIELDS = {"at", "kind", "sid", "inst", "decision", "reason"}


def pool(view: Pool) -> ipb.GetPoolResponse:
    """The pool as a whole."""
    counters = view.classes
    alive = [i for i in view.instances.values() if view.freshness(i) != GONE]
    completed = {name: c.completed for name, c in counters.items()}
    target = view.config.target_mixture()
    consumed = mixture(completed)
    message = ipb.GetPoolResponse(
        pool=view.name,
        mode=pool_config.mode_to_proto(view.config.mode),
        policy=view.config.policy,
        active_sessions=sum(c.active for c in counters.values()),
        held_sessions=sum(c.held for c in counters.values()),
        reserved_blocks=sum(i.reserved_blocks for i in view.instances.values()),
        used_blocks=_known_sum(i.used_blocks for i in alive),
        total_blocks=_known_sum(i.total_blocks for i in alive),
        session_cap=sum(_session_cap(view, i) for i in alive),
        pressure=max((i.pressure for i in alive), default=0.0),
        held_by_class={name: c.held for name, c in counters.items()},
        active_by_class={name: c.active for name, c in counters.items()},
        released_by_class={name: c.released for name, c in counters.items()},
        completed_by_class=completed,
        target_mixture=target,
        consumed_mixture=consumed,
        mixture_deviation=deviation(consumed, target),
        unlabelled_total=view.unlabelled,
        unknown_class_total=view.unknown_class,
        inferred_total=view.inferred,
        mislabelled_total=view.mislabelled,
        decisions_per_second=view.decisions_per_second,
        epochs=view.epochs,
        policy_version=view.policy_version,
    )
    message.config.CopyFrom(pool_config.to_proto(view.config))
    return message


def mixture(counts: Mapping[str, int]) -> dict[str, float]:
    """Shares of the counts; empty while all are zero."""
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total else {}


def deviation(consumed: Mapping[str, float], target: Mapping[str, float]) -> float:
    """Total variation, half the sum of |p_b - rho_b|, in percentage points; 0 while either is not known."""
    if not consumed or not target:
        return 0.0
    names = {*consumed, *target}
    return 50.0 * math.fsum(abs(consumed.get(name, 0.0) - target.get(name, 0.0)) for name in names)


def instance(view: Pool, item: Instance) -> ipb.Instance:
    """One instance with its bookings and limits."""
    age = to_duration(max(0, view.now_ms - item.seen_ms) / 1000.0)
    message = ipb.Instance(
        freshness=_FRESHNESS[view.freshness(item)],
        active_sessions=item.sessions,
        active_by_class=item.by_class,
        reserved_blocks=item.reserved_blocks,
        session_cap=_session_cap(view, item),
        class_caps=item.class_caps,
        pressure=item.pressure,
        brake=item.brake,
        cordoned=item.cordoned,
        draining=item.drain_asked,
        budget_blocks=item.budget,
        forecast_blocks=max(item.need[: len(forecast.HORIZONS)], default=None),
        age=age,
        updating_weights=item.updating,
        policy_version=item.policy_version,
        weight_epoch=item.epoch,
        stalled=item.stalled,
    )
    message.prefix_index.CopyFrom(_prefix_index(view, item))
    message.snapshot.ParseFromString(item.snapshot)
    for name, value, value_age, detail in json.loads(item.signals) if item.signals else ():
        signal = message.signals.add(name=name, value=value, detail=detail)
        if value_age is not None:
            signal.age.CopyFrom(to_duration(value_age))
    return message


def _prefix_index(view: Pool, item: Instance) -> ipb.PrefixIndex:
    index = item.prefixes
    behind = index.source != UNINDEXED and not prefixes.reliable(view, item)
    message = ipb.PrefixIndex(source=index.source, blocks=index.blocks, behind=behind)
    if index.updated_ms is not None:
        message.age.CopyFrom(to_duration(max(0, view.now_ms - index.updated_ms) / 1000.0))
    return message


def workload_class(view: Pool, name: str) -> ipb.WorkloadClass:
    """One class: its counters, and what the controller last found for it (nothing before its first epoch)."""
    message = ipb.WorkloadClass(workload_class=name, target=view.config.target_mixture().get(name, 0.0))
    if (counters := view.classes.get(name)) is not None:
        message.active = counters.active
        message.held = counters.held
        message.demand_sessions = counters.active + counters.held
        message.completed = counters.completed
    if (found := view.published.get(name)) is not None:
        message.reference_blocks = found.reference_blocks
        message.residency.CopyFrom(to_duration(found.residency_s))
        message.quota_blocks = found.quota_blocks
        message.evidence = found.evidence
        message.growth_tokens_per_second = found.growth
        if found.gap_s is not None:
            message.tool_gap.CopyFrom(to_duration(found.gap_s))
        if found.hit_rate is not None:
            message.continuation_hit_rate = found.hit_rate
    queue = view.queues.get(name)
    if queue is not None and queue.heads:
        oldest_ms = min(held.since_ms for held in queue.heads)
        message.oldest_hold.CopyFrom(to_duration(max(0, view.now_ms - oldest_ms) / 1000.0))
    return message


def class_names(view: Pool) -> list[str]:
    """All classes that are configured, counted or estimated, in order."""
    return sorted({*view.config.classes, *view.classes, *view.published})


def session(now_ms: int, record: SessionRecord) -> ipb.Session:
    """One session; its lease without the token. The hold is left to the caller."""
    row = record.fields
    message = ipb.Session(
        session_id=record.session_id,
        workload_class=row.get("class", ""),
        declared_class=row.get("declared", ""),
        group_id=row.get("group", ""),
        phase=phase(record),
        incarnation=row.get("inc", ""),
        reserved_blocks=int(row.get("blocks") or 0),
        block_seconds=_block_ms(now_ms, row) / 1000.0,
        inferred_class=row.get("inf", ""),
        inferred_confidence=float(row.get("conf") or 0.0),
    )
    if row.get("inst"):
        message.instance_id, message.dp_rank = keys.split_instance(row["inst"])
    if row.get("admitted"):
        message.admitted_time.CopyFrom(to_timestamp(int(row["admitted"]) / 1000.0))
        # What is booked at admission is an estimate; it was reported only if it came later.
        if row.get("ctx") and row.get("ctx_at") != row["admitted"]:
            message.context_tokens = int(row["ctx"])
    if row.get("turn"):
        message.turn = int(row["turn"])
    if row.get("pv"):
        message.policy_version = int(row["pv"])
    if row.get("token") and row.get("exp") and row.get("st") != "paused":
        message.lease.ttl.CopyFrom(to_duration(int(row["ttl"]) / 1000.0))
        message.lease.expire_time.CopyFrom(to_timestamp(int(row["exp"]) / 1000.0))
    return message


def phase(record: SessionRecord) -> pb.Phase.ValueType:
    """Where the session is in its life."""
    state = record.fields.get("st")
    if state == "held":
        return pb.PHASE_HELD
    if state == "paused":
        return pb.PHASE_PAUSED
    return _PHASES.get(record.fields.get("phase", ""), pb.PHASE_UNSPECIFIED)


def history(rows: Iterable[tuple[int, str, str, str]]) -> list[ipb.HistoryEntry]:
    """What happened to a session, in the order given."""
    return [
        ipb.HistoryEntry(
            time=to_timestamp(at_ms / 1000.0), kind=kind, reason=reason, instance_id=instance_name(instance_key)
        )
        for at_ms, kind, reason, instance_key in rows
    ]


def event(item: Event) -> ipb.WatchEventsResponse:
    """One event of a pool's stream."""
    row = item.fields
    values = {name: value for name, value in row.items() if name not in _EVENT_FIELDS}
    if row.get("inst"):
        values["dp_rank"] = str(keys.split_instance(row["inst"])[1])
    return ipb.WatchEventsResponse(
        resume_token=item.token,
        time=to_timestamp(int(row.get("at", 0)) / 1000.0),
        kind=row.get("kind", ""),
        session_id=row.get("sid", ""),
        instance_id=instance_name(row.get("inst", "")),
        decision=pb.Decision.Value(row.get("decision") or "DECISION_UNSPECIFIED"),
        reason=row.get("reason", ""),
        values=values,
    )


def instance_name(key: str) -> str:
    """The instance's id from its key; empty for none."""
    return keys.split_instance(key)[0] if key else ""


def _session_cap(view: Pool, item: Instance) -> int:
    """K_w; before the controller's first epoch the configured bound, 0 where there is none."""
    if item.cap is not None:
        return item.cap
    return view.config.static_cap if view.config.policy == cfg.STATIC else view.config.max_sessions_per_instance


def _known_sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _block_ms(now_ms: int, row: Mapping[str, str]) -> int:
    """Z_s up to now: what was accrued at the last change of blocks, and what the blocks held since."""
    accrued, blocks = int(row.get("z") or 0), int(row.get("blocks") or 0)
    return accrued + blocks * max(0, now_ms - int(row.get("at") or now_ms))
