"""Who goes first (policy.md section 4, note 10).

Inside a class: rank of first arrival, so that a retry cannot overtake. Between classes: sessions that lost their home,
then classes below their quota, then the largest deficit against the trainer's mixture. The deficit is kept as start-time
fair queueing: a class's virtual time grows by 1/rho per admission, the smallest goes first, and a class that was idle may
catch up by a bounded credit. A class whose head does not fit may be passed, but only so often: what is passed for ever
starves.
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


def step(pool: Pool, name: str) -> int:
    """Virtual time of one admission of the class: UNIT / rho_b; where no mixture is given, all classes weigh the same."""
    mixture = pool.config.target_mixture()
    share = mixture.get(name, _UNNAMED_SHARE) if mixture else 1.0
    return int(UNIT / share)


def _below_quota(pool: Pool, name: str) -> bool:
    """Whether some open instance has fewer sessions of the class than its quota K_wb."""
    return any(
        name not in i.class_caps or i.by_class.get(name, 0) < i.class_caps[name]
        for i in pool.instances.values()
        if not i.gone
    )


def order(pool: Pool, queues: Mapping[str, Queue]) -> list[str]:
    """Classes with held sessions, the one to serve first in front."""
    floor = pool.global_virtual_time

    def key(name: str) -> tuple[int, int, int, int]:
        queue, c = queues[name], pool.classes.get(name)
        head = queue.heads[0]
        start = max(c.virtual_time if c else 0, floor - CREDIT * step(pool, name))
        fair = start if pool.config.target_mixture() else 0
        return (0 if head.ask.homeless else 1, 0 if _below_quota(pool, name) else 1, fair, head.since_ms)

    return sorted((name for name, queue in queues.items() if queue.heads), key=key)
