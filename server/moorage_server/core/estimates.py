"""What the sessions of a class are like: reference footprint, residency, growth (policy.md section 4, note 1).

Completions lie: the first sessions to finish are the short ones. So all estimates rest on exposure, living sessions
included. Over a decayed window let Z be the block-time and D the session-time accrued by all sessions of the class, and
n its completions: kbar = Z / D and That = D / n, so that kbar That = Z / n holds under censoring (Little's law). A
prior enters as pseudo-counts and never goes to zero; the share of n in n + pseudo-counts is the weight of evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from moorage_server.core import forecast, survival
from moorage_server.core.config import ClassConfig
from moorage_server.core.view import Class, Ended, Pool, Published

#: Pseudo-sessions of the prior.
PRIOR_SESSIONS = 4.0
#: Residency of a class of which nothing is known, seconds.
UNKNOWN_RESIDENCY_S = 60.0
#: Context of a session of which nothing is known and that runs where the largest context is unknown, tokens.
UNKNOWN_CONTEXT = 8192.0
#: Block size to express footprints in while no instance is known, tokens.
UNKNOWN_BLOCK = 16.0
#: Evidence fades over this many mean residencies, and not faster than this many seconds.
_WINDOW_RESIDENCIES, _LEAST_WINDOW_S = 12.0, 120.0
#: Pseudo-gaps of the prior of the tool gap, and its length.
_PRIOR_GAPS, PRIOR_GAP_S = 4.0, 1.0


@dataclass(slots=True)
class Exposure:
    """Decayed evidence of one class, and the cumulative counters it was last read at."""

    block_s: float = 0.0
    session_s: float = 0.0
    completions: float = 0.0
    grown_tokens: float = 0.0
    gap_s: float = 0.0
    gaps: float = 0.0
    expected_hits: float = 0.0
    found_hits: float = 0.0
    survival: survival.Survival = field(default_factory=survival.Survival)
    #: Mean declared final context of those who asked, and how many did.
    declared_tokens: float = 0.0
    declared: float = 0.0
    seen: Class | None = None


def accrued(c: Class, now_ms: int) -> tuple[float, float]:
    """Z in block-seconds and D in session-seconds up to now."""
    ahead = max(0, now_ms - c.accrued_ms) if c.accrued_ms else 0
    return (c.block_ms + c.blocks * ahead) / 1000.0, (c.session_ms + c.active * ahead) / 1000.0


def observe(exposure: Exposure, c: Class, now_ms: int, elapsed_s: float) -> None:
    """Takes in what accrued since the last epoch, and lets the old fade; while nobody lives, nothing is learnt anew."""
    z, d = accrued(c, now_ms)
    before = exposure.seen
    if before is not None:
        if round(d * 1000) > before.session_ms:
            window = max(_LEAST_WINDOW_S, _WINDOW_RESIDENCIES * residency_s(exposure, UNKNOWN_RESIDENCY_S))
            fade(exposure, math.exp(-elapsed_s / window))
        # Counters fall where a session turns out to be of another class, and takes along what it accrued. Where none
        # did, they started again.
        least = -math.inf if c.relabelled > before.relabelled else 0.0
        exposure.block_s = max(0.0, exposure.block_s + max(least, z - before.block_ms / 1000.0))
        exposure.session_s = max(0.0, exposure.session_s + max(least, d - before.session_ms / 1000.0))
        exposure.gap_s = max(0.0, exposure.gap_s + max(least, c.gap_ms - before.gap_ms) / 1000.0)
        exposure.gaps = max(0.0, exposure.gaps + max(least, c.gaps - before.gaps))
        exposure.expected_hits += max(0, c.expected_hit_tokens - before.expected_hit_tokens)
        exposure.found_hits += max(0, c.found_hit_tokens - before.found_hit_tokens)
    exposure.seen = Class(
        block_ms=round(z * 1000),
        session_ms=round(d * 1000),
        gap_ms=c.gap_ms,
        gaps=c.gaps,
        expected_hit_tokens=c.expected_hit_tokens,
        found_hit_tokens=c.found_hit_tokens,
        relabelled=c.relabelled,
    )


def fade(exposure: Exposure, factor: float) -> None:
    """Multiplies all evidence by ``factor``."""
    for name in ("block_s", "session_s", "completions", "grown_tokens", "gap_s", "gaps", "declared"):
        setattr(exposure, name, getattr(exposure, name) * factor)
    # Hits are a recent signal: they fade an order of magnitude faster.
    exposure.expected_hits *= factor**10
    exposure.found_hits *= factor**10
    exposure.survival.decay(factor)


def declare(exposure: Exposure, tokens: float) -> None:
    """One session asked and declared its final context."""
    exposure.declared += 1.0
    exposure.declared_tokens += (tokens - exposure.declared_tokens) / min(exposure.declared, 64.0)


def conclude(exposure: Exposure, end: Ended, config: ClassConfig, max_context: int | None) -> None:
    """One session is over. A natural end counts as a completion; others are censored.

    Where nobody said how far a completed session got, it is taken to have got as far as it declared, else as far as the
    prior says: unknown growth is not none.
    """
    if end.outcome in ("COMPLETED", "FAILED"):
        exposure.completions += 1.0
    final, completed = end.final_tokens, end.outcome == "COMPLETED"
    if final is None and completed:
        final = prior_tokens(exposure, config, max_context) if math.isnan(end.declared) else end.declared
        exposure.grown_tokens += max(0.0, final - end.start_tokens)
    if final is not None:
        exposure.survival.add_end(end.start_tokens, final, completed=completed)


def prior_tokens(exposure: Exposure, config: ClassConfig, max_context: int | None) -> float:
    """Final context of the prior: configured, else declared by callers, else the largest that an instance takes."""
    if config.prior_context_tokens is not None:
        return float(config.prior_context_tokens)
    if exposure.declared > 0:
        return exposure.declared_tokens
    return float(max_context) if max_context is not None else UNKNOWN_CONTEXT


def evidence(exposure: Exposure) -> float:
    """Weight of what was seen against the prior, 0..1."""
    return exposure.completions / (exposure.completions + PRIOR_SESSIONS)


def residency_s(exposure: Exposure, prior_s: float) -> float:
    """That_b = D / n, with the prior's pseudo-sessions. Seconds from admission to release."""
    return (exposure.session_s + PRIOR_SESSIONS * prior_s) / (exposure.completions + PRIOR_SESSIONS)


def reference_blocks(exposure: Exposure, prior_blocks: float) -> float:
    """kbar_b = Z / D, weighted with the prior by completions: time alone makes no young cohort representative."""
    if exposure.session_s <= 0:
        return prior_blocks
    weight = evidence(exposure)
    return max(1.0, weight * exposure.block_s / exposure.session_s + (1.0 - weight) * prior_blocks)


def growth_per_s(exposure: Exposure, prior: float, prior_s: float) -> float:
    """g_b: tokens of context gained per second of residency, with the prior's pseudo-sessions."""
    time_s = exposure.session_s + PRIOR_SESSIONS * prior_s
    return (exposure.grown_tokens + PRIOR_SESSIONS * prior_s * prior) / time_s


def tool_gap_s(exposure: Exposure) -> float | None:
    """Mean tool gap in seconds; None while the class never waited for a tool."""
    if exposure.gaps <= 0:
        return None
    return (exposure.gap_s + _PRIOR_GAPS * PRIOR_GAP_S) / (exposure.gaps + _PRIOR_GAPS)


def summarise(
    exposure: Exposure,
    config: ClassConfig,
    *,
    starts: survival.Floats,
    contexts: survival.Floats,
    block_size: float,
    max_context: int | None,
) -> Published:
    """What is published of a class. ``starts`` and ``contexts``: tokens at admission and now, by living session."""
    prior_s = UNKNOWN_RESIDENCY_S if config.prior_residency_s is None else config.prior_residency_s
    tokens = prior_tokens(exposure, config, max_context)
    start = float(np.mean(starts)) if len(starts) else 0.0
    prior_growth = max(0.0, tokens - start) / prior_s
    hits = exposure.found_hits / exposure.expected_hits if exposure.expected_hits >= 1.0 else None
    values = survival.table(exposure.survival, starts, contexts, tokens, PRIOR_SESSIONS)
    return Published(
        reference_blocks=reference_blocks(exposure, max(1.0, tokens / block_size)),
        residency_s=residency_s(exposure, prior_s),
        growth=growth_per_s(exposure, prior_growth, prior_s),
        evidence=evidence(exposure),
        prior_tokens=tokens,
        survival=tuple(round(float(v), 5) for v in values),
        gap_s=tool_gap_s(exposure),
        hit_rate=hits,
    )


def unseen(pool: Pool, name: str) -> Published:
    """What is known of a class that no epoch has seen yet: its prior."""
    sizes = [i.max_context for i in pool.instances.values() if i.max_context is not None]
    return summarise(
        Exposure(),
        pool.config.classes.get(name, ClassConfig()),
        starts=np.zeros(0),
        contexts=np.zeros(0),
        block_size=UNKNOWN_BLOCK,
        max_context=max(sizes, default=None),
    )


def growth_of(pool: Pool, name: str) -> forecast.Growth:
    """What the forecast knows of a class."""
    return forecast.growth(pool.published.get(name) or unseen(pool, name))
