"""Once per epoch: estimates, brakes, budgets, quotas and caps of one pool.

A pure function of its state, the pool as read from the ledger, and what its sessions did since. Between epochs
``needs`` alone is computed again whenever sessions came, grew or went.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from moorage_server.core import config as cfg
from moorage_server.core import estimates, forecast, pace, placement, pressure, quotas, watch
from moorage_server.core.config import ClassConfig, PoolConfig
from moorage_server.core.estimates import Exposure
from moorage_server.core.labels import Memory
from moorage_server.core.view import SERVING, Class, Ended, Instance, Pool, Published
from moorage_server.core.watch import Signal, Watched


@dataclass(slots=True)
class Row:
    """A living session, as the epoch's holder mirrors it."""

    workload_class: str
    instance: str
    start_tokens: float
    tokens: float
    #: When ``tokens`` was reported; they grow from then on, unless the session waits for a tool.
    reported_ms: int
    growing: bool
    shared_blocks: int
    ceiling: float = math.inf
    #: Final context that it expects; NaN where it did not say.
    declared: float = math.nan
    #: It has, or announced, more turns than one: what it leaves in the cache between them must last.
    returns: bool = False


@dataclass(slots=True)
class Happened:
    """What sessions did since the last epoch."""

    ended: list[Ended] = field(default_factory=list)
    #: Tokens of context gained, by class; below zero where a session took its own to another class.
    grown: dict[str, float] = field(default_factory=dict)
    #: Final contexts that callers declared, by class.
    declared: list[tuple[str, float]] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """All that outlives an epoch."""

    at_ms: int = 0
    exposures: dict[str, Exposure] = field(default_factory=dict)
    watched: dict[str, Watched] = field(default_factory=dict)
    labels: Memory = field(default_factory=Memory)


@dataclass(frozen=True, slots=True)
class Ruling:
    """What an epoch decided for one instance. Blocks, sessions."""

    budget: int
    cap: int
    class_caps: Mapping[str, int]
    brake: float
    pressure: float
    drained_blocks: int
    stalled: bool
    signals: tuple[Signal, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an epoch publishes."""

    published: Mapping[str, Published]
    rulings: Mapping[str, Ruling]
    needs: Mapping[str, tuple[int, ...]]


def epoch(state: State, pool: Pool, rows: Iterable[Row], happened: Happened) -> Outcome:
    """One epoch; advances ``state``."""
    elapsed_s = max(0.0, (pool.now_ms - state.at_ms) / 1000.0) if state.at_ms else 0.0
    rows = list(rows)
    published = _estimate(state, pool, rows, happened, elapsed_s)
    returning = {r.workload_class for r in rows if r.returns}
    alive = {i.key: i for i in pool.alive()}
    state.watched = {key: watch.of(state.watched.get(key), i) for key, i in alive.items()}
    rulings: dict[str, Ruling] = {}
    for key, instance in alive.items():
        ruling, blocks = _rule(state.watched[key], instance, pool, published, returning, elapsed_s)
        rulings[key] = ruling
        for name, quota in blocks.items():
            if name in published:
                held = published[name].quota_blocks
                published[name] = replace(published[name], quota_blocks=held + quota)
    state.at_ms = pool.now_ms
    return Outcome(published, rulings, needs(pool, rows, published))


def needs(pool: Pool, rows: Iterable[Row], published: Mapping[str, Published]) -> dict[str, tuple[int, ...]]:
    """Blocks needed per instance at each horizon, from what is known now."""
    instances = [i for i in pool.instances.values() if not i.gone]
    index = {i.key: n for n, i in enumerate(instances)}
    kept = [r for r in rows if r.instance in index]
    # The first sessions of a class come before the epoch that sees it: they are charged its prior, not nothing.
    models = {name: published.get(name) or estimates.unseen(pool, name) for name in {r.workload_class for r in kept}}
    names = {name: n for n, name in enumerate(models)}
    growth = {n: forecast.growth(models[name]) for name, n in names.items()}
    ceilings = [min(r.ceiling, _limit(pool.instances[r.instance])) for r in kept]
    runs = {i.key: i.state == SERVING and not i.stalled for i in instances}
    tokens = [
        tokens_now(r, models[r.workload_class].growth if runs[r.instance] else 0.0, most, pool.now_ms)
        for r, most in zip(kept, ceilings, strict=True)
    ]
    living = forecast.Living(
        instance=np.array([index[r.instance] for r in kept], dtype=np.int64),
        workload_class=np.array([names[r.workload_class] for r in kept], dtype=np.int64),
        tokens=np.array(tokens),
        shared=np.array([float(r.shared_blocks) for r in kept]),
        ceiling=np.array(ceilings),
        declared=np.array([r.declared for r in kept]),
    )
    block_size = np.array([float(i.block_size) for i in instances])
    mean, variance, proven = forecast.moments(living, growth, block_size, len(instances))
    extra = np.array([float(i.shared_blocks) for i in instances])
    used = np.array([float(i.used_blocks or 0) for i in instances])
    # Blocks in use that no booking explains belong to somebody all the same.
    held_now = mean[:, 0] + extra if len(instances) else extra
    extra = extra + np.maximum(0.0, used - held_now)
    table = forecast.need(mean, variance, proven, extra, pool.config.forecast_margin)
    return {i.key: tuple(int(n) for n in table[row]) for row, i in enumerate(instances)}


def tokens_now(row: Row, growth: float, ceiling: float, now_ms: int) -> float:
    """Context now: the last report, grown by its age up to ``ceiling``, the most that session and instance take."""
    age_s = max(0, now_ms - row.reported_ms) / 1000.0 if row.growing else 0.0
    return min(row.tokens + growth * age_s, max(ceiling, row.tokens))


def _limit(instance: Instance) -> float:
    return math.inf if instance.max_context is None else float(instance.max_context)


def _estimate(state: State, pool: Pool, rows: list[Row], happened: Happened, elapsed_s: float) -> dict[str, Published]:
    """Updates the exposures of all classes and summarises them."""
    for name in set(pool.classes) | set(pool.config.classes):
        exposure = state.exposures.setdefault(name, Exposure())
        estimates.observe(exposure, pool.classes.get(name, Class()), pool.now_ms, elapsed_s)
    for name, tokens in happened.grown.items():
        exposure = state.exposures.setdefault(name, Exposure())
        exposure.grown_tokens = max(0.0, exposure.grown_tokens + tokens)
    for name, tokens in happened.declared:
        estimates.declare(state.exposures.setdefault(name, Exposure()), tokens)
    alive = pool.alive()
    block_size = float(np.mean([i.block_size for i in alive])) if alive else estimates.UNKNOWN_BLOCK
    contexts = [i.max_context for i in alive if i.max_context is not None]
    max_context = max(contexts, default=None)
    for end in happened.ended:
        config = pool.config.classes.get(end.workload_class, ClassConfig())
        estimates.conclude(state.exposures.setdefault(end.workload_class, Exposure()), end, config, max_context)
    published = {}
    for name, exposure in state.exposures.items():
        mine = [r for r in rows if r.workload_class == name]
        published[name] = estimates.summarise(
            exposure,
            pool.config.classes.get(name, ClassConfig()),
            starts=np.array([r.start_tokens for r in mine]),
            contexts=np.array([r.tokens for r in mine]),
            block_size=block_size,
            max_context=max_context,
        )
    return published


def _rule(
    watched: Watched,
    instance: Instance,
    pool: Pool,
    published: Mapping[str, Published],
    returning: Collection[str],
    elapsed_s: float,
) -> tuple[Ruling, dict[str, float]]:
    """Brake, budget, cap and quotas of one instance; also its quotas in blocks by class."""
    config = pool.config
    watched.look(pool, instance, elapsed_s)
    brake = watched.brake
    gaps = [published[n].gap_s for n, count in instance.by_class.items() if count > 0 and n in published]
    gap_s = max((g for g in gaps if g is not None), default=0.0)
    capacity = instance.capacity(config)
    allocation = watched.allocation or 0.0
    demand = _demand(pool, instance)
    over = pace.over(watched.pace.gain(), _protected(demand, published, returning))
    budget = forecast.budget(capacity, allocation, gap_s, brake.factor, over) if capacity is not None else 0
    room = int((capacity or 0) * brake.factor) if config.reference_caps else budget
    cap = _cap(config, instance, room, demand, published)
    table = _quotas(config, capacity, demand, published)
    rate = instance.prefill_rate or placement.UNKNOWN_PREFILL_RATE
    drained = int(rate * elapsed_s / instance.block_size)
    ruling = Ruling(
        budget=budget,
        cap=cap,
        class_caps={
            name: pressure.move_cap(instance.class_caps.get(name), quota.sessions, least=1, most=0)
            for name, quota in table.items()
        },
        brake=brake.factor,
        pressure=brake.pressure,
        drained_blocks=drained,
        stalled=watched.stalled,
        signals=watched.signals(pool, instance, gap_s),
    )
    return ruling, {name: quota.blocks for name, quota in table.items()}


def _protected(demand: Mapping[str, float], published: Mapping[str, Published], returning: Collection[str]) -> float:
    """Share of the demanded blocks that is of classes of several turns; all of them while a class is unknown.

    Who waits counts like who is there: what they will leave in the cache must last. Not every caller says when it waits
    for a tool: whoever placed a later turn (``returning``), or was expected to find an earlier one, has several.
    """
    held = {name: count for name, count in demand.items() if count > 0}
    if not held or any(name not in published for name in held):
        return 1.0

    def kept(name: str) -> bool:
        return name in returning or published[name].gap_s is not None or published[name].hit_rate is not None

    blocks = {name: count * published[name].reference_blocks for name, count in held.items()}
    return math.fsum(n for name, n in blocks.items() if kept(name)) / math.fsum(blocks.values())


def _demand(pool: Pool, instance: Instance) -> dict[str, float]:
    """N_wb: sessions of each class on the instance, plus its share of the held ones (by capacity)."""
    alive = pool.alive()
    total = sum(i.total_blocks or 1 for i in alive)
    part = (instance.total_blocks or 1) / total if total else 0.0
    names = set(instance.by_class) | {n for n, c in pool.classes.items() if c.held}
    demand = {}
    for name in names:
        held = pool.classes[name].held if name in pool.classes else 0
        demand[name] = instance.by_class.get(name, 0) + part * held
    return demand


def _cap(
    config: PoolConfig, instance: Instance, budget: int, demand: Mapping[str, float], published: Mapping[str, Published]
) -> int:
    """K_w. Adaptive: what ``budget`` holds of the demand's mean footprint; moves by bounded steps."""
    least, most = config.min_sessions_per_instance, config.max_sessions_per_instance
    if config.policy == cfg.STATIC or not instance.total_blocks:
        return pressure.move_cap(instance.cap, config.static_cap, least=least, most=most)
    known = {n: d for n, d in demand.items() if d > 0 and n in published}
    weight = math.fsum(known.values())
    # While nobody is here or wants in, the footprint of what will come is unknown: the KV budget alone decides.
    mean = math.fsum(d * published[n].reference_blocks for n, d in known.items()) / weight if weight > 0 else 1.0
    return pressure.move_cap(instance.cap, max(1, int(budget / mean)), least=least, most=most)


def _quotas(
    config: PoolConfig, capacity: int | None, demand: Mapping[str, float], published: Mapping[str, Published]
) -> dict[str, quotas.Quota]:
    """M_wb and K_wb under `misa` and `misa-t`; nothing under the others."""
    if capacity is None or config.policy not in (cfg.MISA, cfg.MISA_T):
        return {}
    known = {n: d for n, d in demand.items() if n in published}
    footprint = {n: published[n].reference_blocks for n in known}
    residency = {n: published[n].residency_s for n in known} if config.policy == cfg.MISA_T else None
    return quotas.shares(float(capacity), known, footprint, residency)
