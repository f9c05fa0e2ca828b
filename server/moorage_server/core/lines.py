"""What each class's line waits for now, on the numbers of a view: the reason of the first session that stays outside.

A caller that waits inside a call is not told its reason anew, so what was noted when it came says little. Pure.
"""

from __future__ import annotations

from moorage_server.core import admission
from moorage_server.core.view import Pool

#: Nobody in the line was there to be looked at: callers between two polls.
UNKNOWN = "UNKNOWN"
#: Sessions times instances looked at: a tenth of a second. Those farther back count as waiting behind the others.
_LOOKS = 16_384


def reasons(pool: Pool) -> dict[str, str]:
    """By class with held sessions: the reason of the first in its line that does not enter now.

    QUEUED_BEHIND where another class goes first and does not fit either; UNKNOWN where nobody of the line is there.
    """
    waiting = {name: queue for name, queue in pool.queues.items() if queue.heads}
    found = {name: UNKNOWN for name, counters in pool.classes.items() if counters.held}
    shut = admission.closed(pool)
    if shut is not None:
        return found | dict.fromkeys(waiting, shut[0])
    found |= dict.fromkeys(waiting, admission.QUEUED_BEHIND)
    decided: set[str] = set()
    for verdict in admission.plan(pool, most=max(1, _LOOKS // len(pool.instances))):
        name = verdict.ask.workload_class
        if not verdict.candidates and name not in decided:
            found[name] = admission.explained(pool, verdict).reason
            decided.add(name)
    return found
