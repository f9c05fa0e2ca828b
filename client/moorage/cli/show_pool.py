"""Printers for a pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from moorage.cli import show_instance, show_label
from moorage.cli.cells import NONE, UNKNOWN, cell, enum_name, optional, pairs, percent
from moorage.cli.emit import to_yaml
from moorage.cli.tables import indented, labelled, table

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import GetPoolResponse, Instance
    from moorage.v1.operator_pb2 import ClassConfig, PoolConfig

_HEADERS = (
    "NAME", "MODE", "POLICY", "ACTIVE", "HELD", "CAP", "RESERVED", "USED", "TOTAL", "PRESSURE", "POINTS-OFF",
)  # fmt: skip
_WIDE = (
    "ACTIVE-BY-CLASS",
    "HELD-BY-CLASS",
    "COMPLETED-BY-CLASS",
    "UNLABELLED",
    "UNKNOWN-CLASS",
    "MISLABELLED",
    "INFERRED",
    "DECISIONS/S",
)


def mode(pool: GetPoolResponse) -> str:
    """ENFORCE or OBSERVE; unspecified reads as ENFORCE."""
    name = enum_name(pool, "mode")
    return "ENFORCE" if name == UNKNOWN else name


def deviation(pool: GetPoolResponse) -> float | None:
    """Mixture deviation in points; None while there is no target, or nothing was completed."""
    return pool.mixture_deviation if pool.target_mixture and pool.consumed_mixture else None


def pressure(pool: GetPoolResponse, instances: Iterable[Instance]) -> str:
    """Largest shortfall of the hit rate, 0..1; `<unknown>` while no instance has a hit rate."""
    return f"{pool.pressure:.2f}" if show_instance.any_measured(pool, instances) else UNKNOWN


def rows(pool: GetPoolResponse, instances: Iterable[Instance], wide: bool) -> list[str]:
    """The pool as a table of one row."""
    points = deviation(pool)
    row = [
        cell(pool.pool), mode(pool), cell(pool.policy), str(pool.active_sessions), str(pool.held_sessions),
        str(pool.session_cap), str(pool.reserved_blocks), optional(pool, "used_blocks"),
        optional(pool, "total_blocks"), pressure(pool, instances), UNKNOWN if points is None else f"{points:.1f}",
    ]  # fmt: skip
    if wide:
        row += [pairs(pool.active_by_class), pairs(pool.held_by_class), pairs(pool.completed_by_class)]
        row += [str(pool.unlabelled_total), str(pool.unknown_class_total), str(pool.mislabelled_total)]
        row += [str(pool.inferred_total), f"{pool.decisions_per_second:.1f}"]
    return table((*_HEADERS, *_WIDE) if wide else _HEADERS, [row])


def details(pool: GetPoolResponse, instances: Iterable[Instance]) -> list[str]:
    """The pool at length: load, mixture by class, configuration."""
    points = deviation(pool)
    used, total = optional(pool, "used_blocks"), optional(pool, "total_blocks")
    fields = [
        ("Name", cell(pool.pool)),
        ("Policy", f"{cell(pool.policy)} ({mode(pool)})"),
        ("Sessions", f"{pool.active_sessions} active, {pool.held_sessions} held, cap {pool.session_cap}"),
        ("Blocks", f"{pool.reserved_blocks} reserved, {used} used, {total} usable"),
        ("Pressure", pressure(pool, instances)),
        ("Decisions", f"{pool.decisions_per_second:.1f}/s, {pool.epochs} epochs"),
        ("Labels", show_label.totals(pool)),
        ("Mixture", UNKNOWN if points is None else f"{points:.1f} points off target"),
    ]
    lines = [*labelled(fields), "Classes:", *indented(_classes(pool))]
    return [*lines, "Config:", *indented(config(pool.config))]


def config(configuration: PoolConfig | ClassConfig) -> list[str]:
    """A configuration: the fields that are set, in YAML, by the names that `config set --unset` takes."""
    return to_yaml(configuration, only_set=True).splitlines()


def _classes(pool: GetPoolResponse) -> list[str]:
    counts = (pool.active_by_class, pool.held_by_class, pool.released_by_class, pool.completed_by_class)
    shares: tuple[Mapping[str, float], ...] = (pool.consumed_mixture, pool.target_mixture)
    names = sorted({name for column in (*counts, *shares) for name in column})
    body = [
        [
            cell(name),
            *(str(column.get(name, 0)) for column in counts),
            *(percent(column[name]) if name in column else NONE for column in shares),
        ]
        for name in names
    ]
    return table(("NAME", "ACTIVE", "HELD", "RELEASED", "COMPLETED", "CONSUMED", "TARGET"), body)
