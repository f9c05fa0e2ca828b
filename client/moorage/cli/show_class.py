"""Printers for workload classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from moorage.cli import show_pool
from moorage.cli.cells import NONE, UNKNOWN, cell, duration, optional, percent
from moorage.cli.tables import indented, labelled, table

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import WorkloadClass
    from moorage.v1.operator_pb2 import PoolConfig

_HEADERS = (
    "NAME", "ACTIVE", "HELD", "DONE", "TARGET", "REF-BLOCKS", "RESIDENCY", "QUOTA-BLOCKS", "EVIDENCE", "HIT-RATE",
    "OLDEST-HOLD",
)  # fmt: skip
_WIDE = ("DEMAND", "TOKENS/S", "TOOL-GAP")


def rows(classes: Iterable[WorkloadClass], wide: bool) -> list[str]:
    """One row per class. REF-BLOCKS is what a session holds on average, TOKENS/S how fast it grows."""
    body = []
    for item in classes:
        row = [
            cell(item.workload_class), str(item.active), str(item.held), str(item.completed), _target(item),
            _reference(item), duration(item, "residency"), f"{item.quota_blocks:.0f}", f"{item.evidence:.2f}",
            optional(item, "continuation_hit_rate", ".2f"),
        ]  # fmt: skip
        if wide:
            growth = f"{item.growth_tokens_per_second:.1f}"
            row += [str(item.demand_sessions), growth, duration(item, "tool_gap")]
        body.append([*row, duration(item, "oldest_hold", NONE)])
    return table((*_HEADERS[:-1], *_WIDE, _HEADERS[-1]) if wide else _HEADERS, body)


def details(item: WorkloadClass, configuration: PoolConfig) -> list[str]:
    """One class at length: load, what the policy believes of it, its configuration."""
    lines = labelled(
        [
            ("Name", cell(item.workload_class)),
            ("Sessions", f"{item.active} active, {item.held} held, {item.completed} completed"),
            ("Oldest hold", duration(item, "oldest_hold", NONE)),
            ("Target share", _target(item)),
            ("Demand", f"{item.demand_sessions} sessions"),
            ("Reference", f"{_reference(item)} blocks a session holds on average"),
            ("Residency", duration(item, "residency")),
            ("Quota", f"{item.quota_blocks:.0f} blocks over all instances"),
            ("Evidence", f"{item.evidence:.2f} (0 is the prior alone, 1 what was seen)"),
            ("Growth", f"{item.growth_tokens_per_second:.1f} tokens/s"),
            ("Tool gap", duration(item, "tool_gap")),
            ("Continuation hit rate", optional(item, "continuation_hit_rate", ".2f")),
        ]
    )
    if item.workload_class in configuration.classes:
        entry = configuration.classes[item.workload_class]
        return [*lines, "Config:", *indented(show_pool.config(entry))]
    return [*lines, f"Config: {NONE}"]


def _target(item: WorkloadClass) -> str:
    return percent(item.target) if item.target else NONE


def _reference(item: WorkloadClass) -> str:
    return f"{item.reference_blocks:.1f}" if item.reference_blocks else UNKNOWN
