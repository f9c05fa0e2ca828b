"""One frame of `moorage top`: what a pool looks like now, as lines of text. Pure: answers in, lines out.

The headline answers three questions in words: is the pool thrashing, who is waiting and why, is the mixture what the
trainer asked for. The tables below hold the numbers behind the answers.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from moorage.cli import show_instance, show_label, show_pool
from moorage.cli.cells import (
    NONE,
    UNKNOWN,
    age,
    cell,
    duration,
    enum_name,
    optional,
    pairs,
    percent,
    printable,
    seconds,
)
from moorage.cli.holds import REASONS, reason
from moorage.cli.show_pool import deviation, mode
from moorage.cli.tables import table

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import (
        GetPoolResponse,
        Instance,
        ListClassesResponse,
        ListInstancesResponse,
        Session,
        WorkloadClass,
    )

#: Continuation hit rate taken as healthy where the pool's configuration does not say.
_HEALTHY = 0.9
#: Shortfall of the hit rate from which a pool loses more to cold prefills than admission wins.
_THRASHING = 0.2
#: Shortfall below which nobody needs to look.
_CALM = 0.05
#: Points of mixture deviation that a trainer would notice.
_OFF_TARGET = 5.0
#: With fewer completed samples, chance alone moves the mixture by more than _OFF_TARGET.
_MIN_SAMPLES = 100
#: Booked share of the budget from which another session hardly fits.
_BOOKED = 0.9
#: A session cap so many times what is there and what waits limits nobody.
_LOOSE_CAP = 2
#: Blocks used beyond those booked that growth between two reports does not explain: share of all, and of those booked.
_FOREIGN, _FOREIGN_OF_BOOKED = 0.1, 0.5
#: Age from which a hit rate speaks of the past, in seconds.
_OLD_S = 60.0
_LABEL_WIDTH = 12


def render(
    pool: GetPoolResponse,
    instances: ListInstancesResponse,
    classes: ListClassesResponse,
    width: int,
    now: datetime | None = None,
    held: Sequence[Session] = (),
    first: Session | None = None,
) -> list[str]:
    """Lines of at most `width` characters, without colours.

    `now` is the time of day to show. `held` is a sample of the held sessions: the headline counts their reasons, and
    without one it names what the instances suggest. `first` is the session that goes first, with its hold of now.
    """
    living = [item for item in instances.instances if enum_name(item, "freshness") != "GONE"]
    headline = [
        ("Thrashing?", _thrashing(pool, living, classes.classes)),
        ("Waiting?", _waiting(pool, living, classes.classes, held, first)),
        ("Mixture?", _mixture(pool)),
        ("Load", _load(pool, living)),
    ]
    if trouble := _trouble(instances.instances):
        headline.append(("Engines", trouble))
    if show_label.suspicious(pool):
        headline.append(("Labels", show_label.totals(pool)))
    lines = [_title(pool, now)]
    for label, answer in headline:
        lines += textwrap.wrap(
            f"{label:<{_LABEL_WIDTH}}{answer}", max(width, 20), subsequent_indent=" " * _LABEL_WIDTH,
            break_on_hyphens=False,
        )  # fmt: skip
    lines += ["", *_classes(pool, classes.classes), "", *_instances(instances.instances)]
    return [line if len(line) <= width else line[: max(width - 1, 0)] + ">" for line in lines]


def _title(pool: GetPoolResponse, now: datetime | None) -> str:
    parts = [f"pool {cell(pool.pool)}", f"policy {cell(pool.policy)}", mode(pool)]
    if mode(pool) == "OBSERVE":
        parts[-1] += " (nothing is held; holds are what ENFORCE would say)"
    parts.append(f"{pool.decisions_per_second:.1f} decisions/s")
    if now is not None:
        parts.append(now.strftime("%H:%M:%S"))
    return "  ".join(parts)


def _load(pool: GetPoolResponse, living: Sequence[Instance]) -> str:
    loose = pool.session_cap > _LOOSE_CAP * (pool.active_sessions + pool.held_sessions)
    cap = "" if loose or not pool.session_cap else f" of cap {pool.session_cap}"
    forecasts = [item.forecast_blocks for item in living if item.HasField("forecast_blocks")]
    facts = (
        f"{pool.active_sessions} active{cap}, {pool.held_sessions} held; blocks: {pool.reserved_blocks} booked, "
        f"{sum(forecasts) if forecasts else UNKNOWN} forecast, {optional(pool, 'used_blocks')} used, "
        f"{optional(pool, 'total_blocks')} usable"
    )
    foreign = [item for item in living if _used_by_others(item)]
    if foreign:
        used, booked = sum(item.snapshot.used_blocks for item in foreign), sum(i.reserved_blocks for i in foreign)
        facts += f"; {used} used on {_names(foreign)}, {booked} booked there: other traffic?"
    return facts


def _used_by_others(instance: Instance) -> bool:
    """Whether more blocks are in use than what is booked there explains."""
    snapshot, fresh = instance.snapshot, enum_name(instance, "freshness") == "FRESH"
    if not (fresh and snapshot.HasField("used_blocks") and snapshot.HasField("total_blocks")):
        return False
    booked, used = instance.reserved_blocks, snapshot.used_blocks
    # The forecast has room for growth, and for those who were released since the engine reported.
    expected = used <= max(booked, instance.forecast_blocks)
    return not expected and used - booked > max(_FOREIGN * snapshot.total_blocks, _FOREIGN_OF_BOOKED * booked)


def _trouble(instances: Sequence[Instance]) -> str:
    """Instances that are not fresh and serving, by what they are; empty where all are."""
    found: dict[str, list[Instance]] = {}
    for item in instances:
        freshness = enum_name(item, "freshness")
        words = [] if freshness == "FRESH" else [freshness]
        if freshness != "GONE":
            words += show_instance.status(item).removeprefix("SERVING").strip(",").split(",")
        for word in filter(None, words):
            found.setdefault(word.lower(), []).append(item)
    if not found:
        return ""
    fine = len(instances) - len({id(item) for items in found.values() for item in items})
    return f"{fine} of {len(instances)} fresh and serving; " + ", ".join(
        f"{k}: {_names(v)}" for k, v in sorted(found.items())
    )


def _thrashing(pool: GetPoolResponse, living: Sequence[Instance], classes: Iterable[WorkloadClass]) -> str:
    """Judged by the worst shortfall of continuation hits, measured by instance (pressure) or by class."""
    if not living:
        return "UNKNOWN: no living instance reports"
    rates = {
        item.workload_class: item.continuation_hit_rate for item in classes if item.HasField("continuation_hit_rate")
    }
    braked = [item for item in living if 0 < item.brake < 1]
    healthy = pool.config.healthy_hit_rate if pool.config.HasField("healthy_hit_rate") else _HEALTHY
    shortfall = max(pool.pressure, healthy - min(rates.values(), default=healthy))
    measured = show_instance.any_measured(pool, living)
    facts = [f"{'worst ' if measured else ''}pressure {show_pool.pressure(pool, living)}"]
    if rates:
        worst = min(rates, key=lambda name: rates[name])
        told = f"{cell(worst)}, healthy is {healthy:.2f}{_told_long_ago(living)}"
        facts.insert(0, f"continuations hit {rates[worst]:.2f} at worst ({told})")
    facts.append(f"brake on {_names(braked)}{_brake_reason(braked[0])}" if braked else "no brake")
    if shortfall >= _THRASHING:
        verdict = "YES: continuations miss their own cache"
    elif braked or shortfall >= _CALM:
        verdict = "NEAR: signs of it"
    elif not (rates or measured):
        verdict = "UNKNOWN: no continuation was measured yet"
    else:
        verdict = "no"
    return f"{verdict}; {', '.join(facts)}"


def _told_long_ago(living: Sequence[Instance]) -> str:
    """How long ago the last turn was reported, where that is long."""
    ages = [
        seconds(signal.age)
        for item in living
        for signal in item.signals
        if signal.name == "continuation_hit_rate" and signal.HasField("age")
    ]
    return f", last reported {age(min(ages))} ago" if ages and min(ages) >= _OLD_S else ""


def _brake_reason(instance: Instance) -> str:
    reasons = [signal.detail for signal in instance.signals if signal.name == "brake" and signal.detail]
    return f" ({printable(reasons[0])})" if reasons else ""


def _waiting(
    pool: GetPoolResponse,
    living: Sequence[Instance],
    classes: Iterable[WorkloadClass],
    held: Sequence[Session],
    first: Session | None,
) -> str:
    if not pool.held_sessions:
        return "nobody"
    queue = sorted((item for item in classes if item.held), key=lambda item: -item.held)
    who = ", ".join(
        f"{cell(item.workload_class)} {item.held} (oldest {duration(item, 'oldest_hold')})" for item in queue
    )
    who = who or pairs(pool.held_by_class)
    counted = Counter(reason(session.hold) for session in held if session.HasField("hold"))
    if not counted:
        return f"{pool.held_sessions} held: {who}; because {_likely_cause(living)}"
    top, _ = counted.most_common(1)[0]
    why = ", ".join(f"{name} {count}" for name, count in counted.most_common())
    seen = f" (of {counted.total()} looked at)" if counted.total() < pool.held_sessions else ""
    if first is not None:
        waits_for = printable(first.hold.detail.partition("; enters when")[0])
        if reason(first.hold) != top:
            waits_for = f"first in line, {cell(first.workload_class)}: {reason(first.hold)}, {waits_for}"
        return f"{pool.held_sessions} held: {who}; {why}{seen}; {waits_for}"
    meaning, until = REASONS.get(top, ("", ""))
    return f"{pool.held_sessions} held: {who}; {why}{seen}" + (f": {meaning}, until {until}" if meaning else "")


def _likely_cause(living: Sequence[Instance]) -> str:
    """What the instances suggest, most binding first."""
    usable = [item for item in living if show_instance.status(item) == "SERVING"]
    if not living:
        return "no instance is alive"
    if not usable:
        return "every instance is cordoned, draining or paused"
    if all(item.active_sessions >= item.session_cap for item in usable):
        return "every instance is at its session cap"
    if all(_booked(item) >= _BOOKED for item in usable):
        return "the blocks of every instance are booked"
    if any(0 < item.brake < 1 for item in usable):
        return f"the brake is on at {_names([item for item in usable if 0 < item.brake < 1])}"
    return "others go first (order of the queue, quotas of the classes)"


def _booked(instance: Instance) -> float:
    """Share of the budget that is booked or forecast; 0 while there is no budget to compare with."""
    if not instance.HasField("budget_blocks"):
        return 0.0
    return max(instance.reserved_blocks, instance.forecast_blocks) / max(instance.budget_blocks, 1)


def _mixture(pool: GetPoolResponse) -> str:
    if not pool.target_mixture:
        return "UNKNOWN: no target is configured (moorage config mixture CLASS=SHARE...)"
    samples = sum(pool.completed_by_class.values())
    points = deviation(pool)
    if points is None:
        return "UNKNOWN: nothing was completed yet"
    gaps = {name: pool.consumed_mixture.get(name, 0.0) - target for name, target in pool.target_mixture.items()}
    worst = max(gaps, key=lambda name: abs(gaps[name]))
    share = f"{percent(pool.consumed_mixture.get(worst, 0.0))} of {percent(pool.target_mixture[worst])} wanted"
    if samples < _MIN_SAMPLES:
        so_far = f"{samples} of {_MIN_SAMPLES} samples"
        return f"too early to say ({so_far}); {points:.1f} points off; {cell(worst)} has {share}"
    facts = f"{points:.1f} points off over {samples} samples; {cell(worst)} has {share}"
    return f"as asked; {facts}" if points < _OFF_TARGET else f"OFF TARGET; {facts}"


def _classes(pool: GetPoolResponse, classes: Iterable[WorkloadClass]) -> list[str]:
    consumed = pool.consumed_mixture if pool.consumed_mixture else None
    body = [
        [
            cell(item.workload_class), str(item.held), str(item.active), str(item.completed),
            UNKNOWN if consumed is None else percent(consumed.get(item.workload_class, 0.0)),
            percent(item.target) if item.target else NONE, optional(item, "continuation_hit_rate", ".2f"),
            duration(item, "oldest_hold", NONE),
        ]
        for item in classes
    ]  # fmt: skip
    return table(("CLASS", "HELD", "ACTIVE", "DONE", "CONSUMED", "TARGET", "HIT-RATE", "OLDEST-HOLD"), body)


def _instances(instances: Iterable[Instance]) -> list[str]:
    body = [
        [
            _name(item), str(item.active_sessions), str(item.session_cap), str(item.reserved_blocks),
            optional(item.snapshot, "used_blocks"), optional(item, "budget_blocks"), show_instance.pressure(item),
            show_instance.brake(item), _state(item), pairs(item.active_by_class),
        ]
        for item in instances
    ]  # fmt: skip
    headers = ("INSTANCE", "SESSIONS", "CAP", "RESERVED", "USED", "BUDGET", "PRESSURE", "BRAKE", "STATE", "BY-CLASS")
    return table(headers, body)


def _state(instance: Instance) -> str:
    """Freshness with the age of the last snapshot, and the status where it is not plain serving."""
    words = [f"{enum_name(instance, 'freshness')}:{duration(instance, 'age')}"]
    status = show_instance.status(instance)
    return ",".join(words if status == "SERVING" else [*words, status])


def _names(instances: Sequence[Instance]) -> str:
    """Names, the first three of them."""
    shown = ", ".join(_name(item) for item in instances[:3])
    return shown if len(instances) <= 3 else f"{shown} and {len(instances) - 3} more"


def _name(instance: Instance) -> str:
    """Name, with the rank where it is not the first."""
    rank = instance.snapshot.dp_rank
    return cell(instance.snapshot.instance_id) + (f"/{rank}" if rank else "")
