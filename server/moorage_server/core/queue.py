"""Who goes first (policy.md section 4, note 10).

Inside a class: rank of first arrival, so that a retry cannot overtake. Between classes: sessions that lost their home,
then classes below their quota, then the largest deficit against the trainer's mixture. The deficit is kept as
start-time fair queueing: a class's virtual time grows by 1/rho per admission, the smallest goes first, and a class that
was idle may catch up by a bounded credit. A class whose head does not fit may be passed, but only so often: what is
passed for ever starves.
"""

from __future__ import annotations

from collections.abc import Mapping

from moorage_server.core.view import Pool, Queue

#: One admission of a class with the whole mixture to itself, in virtual time.
UNIT = 1_000_000
#: Admissions that a class may catch up after it had no demand.
CREDIT = 4
#: Weight of a class that the mixture does not name, against the named ones.
_UNNAMED_SHARE = 0.05
#: A class is past its quota when it holds this many times it, and one session more.
_QUOTA_ROOM = 1.25
#: Shares below this count as this: virtual times must stay exact in the ledger.
_LEAST_SHARE = 1e-6


def step(pool: Pool, name: str) -> int:
    """Virtual time of one admission of the class: UNIT / rho_b; without a mixture all classes weigh the same."""
    mixture = pool.config.target_mixture()
    share = mixture.get(name, _UNNAMED_SHARE) if mixture else 1.0
    return int(UNIT / max(share, _LEAST_SHARE))


def _below_quota(pool: Pool, name: str) -> bool:
    """Whether the class has fewer sessions than its quotas M_wb of all instances hold of its footprint kbar_b.

    Not rounded: whole sessions per instance would cost a class of few sessions a good part of its share. And with some
    room, one session and a part: quotas move with the estimates, and a class at its own must not lose its turn to that.
    """
    published, c = pool.published.get(name), pool.classes.get(name)
    if published is None or c is None or published.quota_blocks <= 0:
        return True
    return (c.active - 1) * published.reference_blocks < _QUOTA_ROOM * published.quota_blocks


def start(pool: Pool, name: str) -> int:
    """Virtual time at which the class's next admission is due."""
    c = pool.classes.get(name)
    virtual_time = 0 if c is None else c.virtual_time
    if c is not None and c.held:
        # What a waiting class could not get, because its head did not fit, it is still owed.
        return virtual_time
    return max(virtual_time, pool.global_virtual_time - CREDIT * step(pool, name))


def passed_enough(pool: Pool, name: str) -> bool:
    """Whether a class whose head does not fit is behind the others by as many sessions as it may be."""
    behind = pool.global_virtual_time - start(pool, name)
    return behind >= pool.config.max_passes * step(pool, name)


def order(pool: Pool, queues: Mapping[str, Queue]) -> list[str]:
    """Classes with held sessions, the one to serve first in front."""

    def key(name: str) -> tuple[int, int, int, int]:
        head = queues[name].heads[0]
        fair = start(pool, name) if pool.config.target_mixture() else 0
        return (0 if head.ask.homeless else 1, 0 if _below_quota(pool, name) else 1, fair, head.since_ms)

    return sorted((name for name, queue in queues.items() if queue.heads), key=key)
