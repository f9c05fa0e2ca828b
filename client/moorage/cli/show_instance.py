"""Printers for instances."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from moorage.cli.cells import NONE, UNKNOWN, cell, duration, enum_name, optional, pairs, printable
from moorage.cli.tables import indented, labelled, table

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import GetPoolResponse, Instance

_HEADERS = (
    "NAME", "RANK", "STATUS", "FRESHNESS", "SESSIONS", "CAP", "RESERVED", "USED", "BUDGET", "PRESSURE", "BRAKE", "AGE",
)  # fmt: skip
_WIDE = ("ENDPOINT", "INCARNATION", "BY-CLASS", "CLASS-CAPS", "FORECAST", "TOTAL", "RUNNING", "WAITING", "WEIGHTS")


def status(instance: Instance) -> str:
    """The engine's own state, and what an operator added: SERVING, SERVING,CORDONED, ..."""
    state = enum_name(instance.snapshot, "state")
    words = ["SERVING" if state == UNKNOWN else state]  # unspecified reads as SERVING
    if instance.draining and "DRAINING" not in words:
        words.append("DRAINING")
    if instance.cordoned:
        words.append("CORDONED")
    if instance.updating_weights:
        words.append("UPDATING")
    if instance.stalled:
        words.append("STALLED")
    return ",".join(words)


def brake(instance: Instance) -> str:
    """The brake's factor; `<unknown>` before the first epoch (it is never 0)."""
    return f"{instance.brake:.2f}" if instance.brake else UNKNOWN


def measured(instance: Instance) -> bool:
    """Whether any hit rate is known; without one, a pressure of 0 means nothing."""
    return any(signal.name.endswith("hit_rate") and signal.HasField("value") for signal in instance.signals)


def any_measured(pool: GetPoolResponse, instances: Iterable[Instance]) -> bool:
    """The same for a pool with these instances."""
    return pool.pressure > 0 or any(map(measured, instances))


def pressure(instance: Instance) -> str:
    """Shortfall of the hit rate, 0..1; `<unknown>` while no hit rate is."""
    return f"{instance.pressure:.2f}" if instance.pressure or measured(instance) else UNKNOWN


def rows(instances: Iterable[Instance], wide: bool) -> list[str]:
    """One row per instance and rank; AGE is the age of the last snapshot."""
    body = []
    for instance in instances:
        snapshot = instance.snapshot
        row = [
            cell(snapshot.instance_id), str(snapshot.dp_rank), status(instance), enum_name(instance, "freshness"),
            str(instance.active_sessions), str(instance.session_cap), str(instance.reserved_blocks),
            optional(snapshot, "used_blocks"), optional(instance, "budget_blocks"), pressure(instance),
            brake(instance),
        ]  # fmt: skip
        if wide:
            row += [
                cell(snapshot.endpoint), cell(snapshot.incarnation), pairs(instance.active_by_class),
                pairs(instance.class_caps), optional(instance, "forecast_blocks"), optional(snapshot, "total_blocks"),
                optional(snapshot, "running"), optional(snapshot, "waiting"), cell(snapshot.weight_version),
            ]  # fmt: skip
        body.append([*row, duration(instance, "age")])
    return table((*_HEADERS[:-1], *_WIDE, _HEADERS[-1]) if wide else _HEADERS, body)


def details(instance: Instance) -> list[str]:
    """One rank of an instance at length: identity, load, what the policy listens to."""
    snapshot = instance.snapshot
    return [
        *labelled(
            [
                ("Name", cell(snapshot.instance_id)),
                ("Rank", str(snapshot.dp_rank)),
                ("Endpoint", cell(snapshot.endpoint)),
                ("Incarnation", cell(snapshot.incarnation)),
                ("Status", f"{status(instance)}, {enum_name(instance, 'freshness')}"),
                ("Last snapshot", f"{duration(instance, 'age')} ago, sequence {snapshot.sequence}"),
                ("Weights", _weights(instance)),
                ("Cache epoch", optional(snapshot, "cache_epoch")),
                ("Sessions", f"{instance.active_sessions} of cap {instance.session_cap}"),
                ("Booked blocks", f"{instance.reserved_blocks} of budget {optional(instance, 'budget_blocks')}"),
                ("Forecast blocks", optional(instance, "forecast_blocks")),
                ("Engine blocks", _engine_blocks(instance)),
                ("Prefix index", _prefix_index(instance)),
                ("Requests", _requests(instance)),
                ("Pressure", pressure(instance)),
                ("Brake", brake(instance)),
            ]
        ),
        "Classes:",
        *indented(_classes(instance)),
        "Signals:",
        *indented(_signals(instance)),
    ]


def _weights(instance: Instance) -> str:
    version, changes = cell(instance.snapshot.weight_version), instance.weight_epoch
    return f"{version}, policy version {optional(instance, 'policy_version')}, changed {changes} times"


def _engine_blocks(instance: Instance) -> str:
    snapshot = instance.snapshot
    used, cached, total = (optional(snapshot, name) for name in ("used_blocks", "cached_blocks", "total_blocks"))
    return f"{used} used, {cached} cached, {total} usable, {optional(snapshot, 'block_size')} tokens each"


def _prefix_index(instance: Instance) -> str:
    """What is known of its prefix cache, and whether placement goes by it."""
    index = instance.prefix_index
    if index.source in ("", "none"):
        return NONE
    known = f"{index.blocks} blocks, {printable(index.source)}, updated {duration(index, 'age')} ago"
    return f"{known}, behind: not used" if index.behind else known


def _requests(instance: Instance) -> str:
    running, waiting, preempted = (
        optional(instance.snapshot, name) for name in ("running", "waiting", "preemptions_total")
    )
    return f"{running} running, {waiting} waiting, {preempted} preempted so far"


def _classes(instance: Instance) -> list[str]:
    active, caps = instance.active_by_class, instance.class_caps
    body = [
        [cell(name), str(active.get(name, 0)), str(caps[name]) if name in caps else NONE]
        for name in sorted({*active, *caps})
    ]
    return table(("NAME", "ACTIVE", "CAP"), body)


def _signals(instance: Instance) -> list[str]:
    body = [
        [cell(signal.name), optional(signal, "value", ".3g"), duration(signal, "age"), printable(signal.detail) or NONE]
        for signal in instance.signals
    ]
    return table(("NAME", "VALUE", "AGE", "DETAIL"), body)
