"""S_b(x): the chance that a session of class b grows beyond a context of x tokens.

A Kaplan-Meier estimate over geometric bins of context, with sessions that are still alive counted as censored
(policy.md section 4, note 1: completions alone are biased short) and a prior of pseudo-sessions that end at the prior's
context. Sessions enter at the size of their prompt, so smaller bins say nothing of them (left truncation). A session
censored inside a bin was at risk in half of it (the actuarial rule): a cohort of equal age sits in one bin, and the few
that end there first must not pass for all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Bins per doubling of the context.
_PER_OCTAVE = 4
#: Edges of the bins in tokens: 64 to 2^21.
EDGES: Floats = 64.0 * 2.0 ** (np.arange(15 * _PER_OCTAVE + 1) / _PER_OCTAVE)
_LOG_EDGES: Floats = np.log2(EDGES)
BINS = len(EDGES) - 1


def bin_of(tokens: float) -> int:
    """Index of the bin that a context of ``tokens`` lies in."""
    return int(np.clip(np.searchsorted(EDGES, tokens, side="right") - 1, 0, BINS - 1))


@dataclass(slots=True)
class Survival:
    """Decayed counts per bin: sessions that ended in it, and sessions that were at risk in it."""

    ended: Floats = field(default_factory=lambda: np.zeros(BINS))
    at_risk: Floats = field(default_factory=lambda: np.zeros(BINS))

    def decay(self, factor: float) -> None:
        """Lets old evidence fade."""
        self.ended *= factor
        self.at_risk *= factor

    def add_end(self, start: float, final: float, *, completed: bool) -> None:
        """A session that entered with ``start`` tokens ended at ``final``; one that did not complete is censored."""
        first, last = bin_of(start), bin_of(max(start, final))
        self.at_risk[first:last] += 1.0
        self.at_risk[last] += 1.0 if completed else 0.5
        if completed:
            self.ended[last] += 1.0


def table(evidence: Survival, starts: Floats, contexts: Floats, prior_final: float, prior_weight: float) -> Floats:
    """S_b at ``EDGES``.

    ``starts`` and ``contexts`` (tokens, one per living session) are the censored ones; ``prior_weight`` pseudo-sessions
    end at ``prior_final`` tokens. Shape (BINS + 1,), non-increasing from 1.
    """
    bins = np.arange(BINS)
    at_risk = evidence.at_risk.copy()
    if len(starts):
        first = np.clip(np.searchsorted(EDGES, starts, side="right") - 1, 0, BINS - 1)
        now = np.clip(np.searchsorted(EDGES, contexts, side="right") - 1, 0, BINS - 1)
        passed = (bins[None, :] >= first[:, None]) & (bins[None, :] < now[:, None])
        at_risk += passed.sum(axis=0) + 0.5 * np.bincount(now, minlength=BINS)
    ended = evidence.ended.copy()
    last = bin_of(prior_final)
    at_risk[: last + 1] += prior_weight
    ended[last] += prior_weight
    hazard = np.divide(ended, at_risk, out=np.zeros(BINS), where=at_risk > 0)
    return np.concatenate(([1.0], np.cumprod(1.0 - np.clip(hazard, 0.0, 1.0))))


def at(values: Floats, tokens: Floats) -> Floats:
    """S at ``tokens`` (any shape), read off a ``table`` by interpolation over the logarithm of the context."""
    read: Floats = np.interp(np.log2(np.maximum(tokens, EDGES[0])), _LOG_EDGES, values)
    return read
