"""How many blocks the living sessions will hold (policy.md section 4, notes 2 and 6; section 7).

With x_s the session's context, g_b its class's growth in tokens per second of residency and S_b the survival function
of final contexts, at horizon tau: k_s = (x_s + g_b tau) / B less the prefix it shares,
p_s = S_b(x_s + g_b tau) / S_b(x_s); mean m = sum p_s k_s, variance v = sum p_s (1 - p_s) k_s^2. A newcomer is admitted
while m + z sqrt(v) stays within the budget at every horizon, the newcomer included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moorage_server.core import survival
from moorage_server.core.view import Ask, Published

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Seconds ahead. Admissions are commitments for the whole residency, but the far future is another epoch's decision.
HORIZONS: Floats = np.array([0.0, 4.0, 8.0, 16.0, 30.0])
#: The horizon (8 s) up to which nobody is taken to end where only the ledger can be trusted. It hears of every end at
#: once, so what comes later is decided by who will have ended.
PROVEN = 2
#: Length of a need vector: the horizons, then what is needed if nobody ends (what the ledger alone can prove).
WIDTH = len(HORIZONS) + 1
#: Share of the budget that LRU slack may take at most.
_MOST_SLACK = 0.35
#: Where S_b is below this, nobody was seen to get so far: how long such a session stays is unknown.
_UNSEEN = 1e-4


@dataclass(frozen=True, slots=True)
class Living:
    """The living sessions of a pool as columns, one row each."""

    instance: Ints
    workload_class: Ints
    #: Context now, in tokens (last report, grown by its age).
    tokens: Floats
    #: Blocks of the prefix that is booked elsewhere.
    shared: Floats
    #: Largest context that the session can reach; infinite where nobody said.
    ceiling: Floats
    #: Final context that the session expects; NaN where it did not say.
    declared: Floats


@dataclass(frozen=True, slots=True)
class Growth:
    """What the forecast knows of one class."""

    tokens_per_s: float
    #: Weight of evidence behind growth and survival, 0 (only a prior) to 1.
    evidence: float
    #: Final context of the prior, tokens: what a session is charged until there is evidence.
    prior_tokens: float
    survival: Floats


@lru_cache(maxsize=512)
def growth(published: Published) -> Growth:
    """From the published estimates of a class."""
    return Growth(published.growth, published.evidence, published.prior_tokens, np.asarray(published.survival))


def _curves(model: Growth, tokens: Floats, ceiling: Floats, declared: Floats) -> tuple[Floats, Floats]:
    """Context in tokens and survival chance, both of shape (sessions, horizons)."""
    grown = tokens[:, None] + model.tokens_per_s * HORIZONS[None, :]
    ahead = np.minimum(grown, np.maximum(ceiling, tokens)[:, None])
    alive_now = survival.at(model.survival, tokens)[:, None]
    # Who would have grown past its ceiling by then does not wait there: it is over.
    chance = np.minimum(1.0, survival.at(model.survival, grown) / np.maximum(alive_now, _UNSEEN))
    # Unknown is never zero: a session larger than all that were seen is taken to stay.
    chance = np.where(alive_now < _UNSEEN, 1.0, chance)
    # A young cohort looks small and must not be read as small: without evidence a session is charged what it declared
    # itself, else its class's prior.
    prior = np.where(np.isnan(declared), model.prior_tokens, declared)
    charged = np.maximum(tokens, prior)[:, None]
    charged = np.minimum(charged, np.maximum(ceiling, tokens)[:, None])
    return model.evidence * ahead + (1.0 - model.evidence) * charged, chance


def moments(
    living: Living, classes: Mapping[int, Growth], block_size: Floats, instances: int
) -> tuple[Floats, Floats, Floats]:
    """Mean and variance of the blocks held per instance and horizon, and the blocks held at ``PROVEN`` if nobody ends.

    ``block_size`` in tokens, one per instance. Shapes (instances, horizons), the same, and (instances,).
    """
    mean = np.zeros((instances, len(HORIZONS)))
    variance = np.zeros_like(mean)
    proven = np.zeros(instances)
    for index, model in classes.items():
        rows = np.flatnonzero(living.workload_class == index)
        if not len(rows):
            continue
        home = living.instance[rows]
        tokens, chance = _curves(model, living.tokens[rows], living.ceiling[rows], living.declared[rows])
        blocks = np.maximum(1.0, np.ceil(tokens / block_size[home][:, None]) - living.shared[rows][:, None])
        np.add.at(mean, home, chance * blocks)
        np.add.at(variance, home, chance * (1.0 - chance) * blocks**2)
        np.add.at(proven, home, blocks[:, PROVEN])
    return mean, variance, proven


def need(mean: Floats, variance: Floats, proven: Floats, extra: Floats, margin: float) -> Ints:
    """Blocks that must be free of others, per instance: shape (instances, WIDTH).

    ``extra``: blocks held by nobody's own part (shared prefixes, and what the engine holds beyond the ledger).
    ``margin`` is z, in standard deviations.
    """
    columns = np.concatenate((mean + margin * np.sqrt(variance), proven[:, None]), axis=1) + extra[:, None]
    return np.ceil(columns).astype(np.int64)


def newcomer(ask: Ask, model: Growth, block_size: int, shared: int, max_context: int | None) -> tuple[int, ...]:
    """Blocks that a newcomer adds at each horizon, and if it does not end: length WIDTH.

    ``shared`` blocks of its prompt are booked already. Its variance is left to the next refresh; its mean is rounded
    up.
    """
    limit = min((float(c) for c in (ask.max_context_tokens, max_context) if c is not None), default=np.inf)
    tokens = float(tokens_to_book(ask, model))
    if ask.prompt_tokens is None:
        tokens = min(tokens, limit)
    final = ask.expected_tokens
    declared = np.array([np.nan if final is None else float(final)])
    ahead, chance = _curves(model, np.array([tokens]), np.array([limit]), declared)
    blocks = np.maximum(1.0, np.ceil(ahead / block_size) - shared)
    return (*(int(b) for b in np.ceil(chance[0] * blocks[0])), int(blocks[0, PROVEN]))


def tokens_to_book(ask: Ask, model: Growth) -> int:
    """Context that a newcomer is booked with: its prompt; while unknown the class's prior, at most its own ceiling."""
    if ask.prompt_tokens is not None:
        return max(1, ask.prompt_tokens)
    prior = int(model.prior_tokens)
    return max(1, prior if ask.max_context_tokens is None else min(prior, ask.max_context_tokens))


def budget(capacity: int, allocation_rate: float, gap_s: float, brake: float, over: float = 0.0) -> int:
    """Blocks that may be needed at any horizon: (C_w - a_w gap) x brake x (1 + over).

    An unreferenced block is evicted in LRU order, so what idle sessions hold survives only while the free list is
    longer than what is allocated (``allocation_rate`` blocks per second) during their gaps (``gap_s``). ``over`` is how
    much more than there is may be asked for where the engine's own queue does no harm (see ``pace``).
    """
    slack = min(allocation_rate * gap_s, _MOST_SLACK * capacity)
    return max(1, int((capacity - slack) * brake * (1.0 + over)))
