"""Which session all others wait for: where most are QUEUED_BEHIND, its reason is theirs. Pure.

What is noted with a held session is as old as its last try, so those that may go first are to be looked at anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moorage.cli.holds import reason

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import Session

#: Classes looked at, at most.
_CLASSES = 8
_BEHIND = "QUEUED_BEHIND"


def candidates(held: Sequence[Session]) -> list[Session]:
    """The first of each class; none where most of `held` wait for something else than their turn."""
    counted = Counter(reason(session.hold) for session in held if session.HasField("hold"))
    if not counted or counted.most_common(1)[0][0] != _BEHIND:
        return []
    oldest: dict[str, Session] = {}
    for session in sorted(held, key=_line):
        oldest.setdefault(session.workload_class, session)
    return list(oldest.values())[:_CLASSES]


def _line(session: Session) -> tuple[float, int]:
    """Place in the line of its class, where it is known; else how long it waits."""
    hold = session.hold
    return hold.position or math.inf, hold.held_since.ToNanoseconds()


def choose(looked_at: Iterable[Session]) -> Session | None:
    """Of the candidates as they are now: the one that does not queue; else any that is held: it says behind whom."""
    found = None
    for session in looked_at:
        if session.HasField("hold") and reason(session.hold) != _BEHIND:
            return session
        found = found or (session if session.HasField("hold") else None)
    return found
