"""What is asked of the store and what it answers: plain values. Times are milliseconds on the store's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moorage_server.core.admission import Candidate
from moorage_server.core.config import UNLABELLED
from moorage_server.core.labels import NOTHING, Inferred
from moorage_server.core.view import Ask


@dataclass(frozen=True, slots=True)
class Request:
    """Identity of a mutating call: its id (may be empty) and a hash of its body."""

    request_id: str = ""
    body: str = ""


class Turn(NamedTuple):
    """The next turn of a living session, to be placed; None is unknown."""

    request: Request
    session_id: str
    token: str
    turn: int | None
    prompt: int | None


class Ending(NamedTuple):
    """The end of a session; ``context`` (tokens) None is unknown, ``token`` may be empty where it is held."""

    request: Request
    session_id: str
    token: str
    outcome: str
    context: int | None


@dataclass(frozen=True, slots=True)
class Admission:
    """What is asked of the ledger for one session that wants in."""

    ask: Ask
    declared_class: str = ""
    group_size: int = 0
    tokens: int = 1
    lease_ttl_ms: int = 60_000
    reason: str = ""
    detail: str = ""
    retry_ms: int = 1_000
    patience_ms: int = 30_000
    present_ms: int = 1_250
    observe: bool = False
    #: Start-time fair queueing: step of the class's virtual time, and the most it may catch up.
    step: int = 0
    credit: int = 0
    rejected: bool = False
    #: '' | 'UNLABELLED' | 'UNKNOWN': what was wrong with the declared class.
    label: str = ""
    #: What behaviour says of the class, and what was made of that.
    inferred: Inferred = NOTHING
    by_inference: bool = False
    contradicted: bool = False
    #: Names that no configuration knows and that the pool still takes; None where the class is no such name. Whoever
    #: finds no room is of the class ``fallback``.
    room: int | None = None
    fallback: str = UNLABELLED
    candidates: tuple[Candidate, ...] = ()
    #: Names the call, so that it alone can be withdrawn.
    ticket: str = ""
    waiting: bool = False
    #: The decision knows where a session that was paused was at home.
    told: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """The session has a home. ``fresh`` is false where it lived already."""

    instance: str
    incarnation: str
    token: str
    ttl_ms: int
    expires_ms: int
    cached_tokens: int | None
    moved: bool
    fresh: bool
    #: The class in force.
    workload_class: str = ""


@dataclass(frozen=True, slots=True)
class OnHold:
    """The session waits."""

    reason: str
    retry_ms: int
    position: int
    ahead: int
    since_ms: int
    detail: str
    workload_class: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The session will never enter."""

    reason: str
    since_ms: int
    detail: str
    workload_class: str = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The session was paused, and left ``tokens`` of context on an instance that still has them: nothing is done yet.

    Decide with that, and ask again, ``told``.
    """

    instance: str
    incarnation: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Homeless:
    """A living session that must be placed anew; ``ask`` is what it asks for now."""

    why: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class HomeWaits:
    """The session's home is alive and does not serve: ``state`` says why."""

    state: str
    workload_class: str = ""


@dataclass(frozen=True, slots=True)
class Released:
    """``over`` is true where the session had ended before; cost is None where it is not remembered."""

    over: bool
    duration_ms: int | None = None
    block_ms: int | None = None
    peak_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """One progress report; None is unknown."""

    session_id: str
    token: str
    phase: str = ""
    turn: int | None = None
    context_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Renewed:
    """What became of a progress report: 'OK', 'UNKNOWN' or 'STALE'."""

    status: str
    ttl_ms: int = 0
    expires_ms: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot, as the ledger keeps it; ``raw`` is the serialised message."""

    instance: str
    incarnation: str
    sequence: int
    state: str
    block_size: int | None
    raw: bytes
    age_ms: int = 0
    weight_version: str = ""
    policy_version: int | None = None
    cache_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The start (``begin``) or the end of a weight update; ``version`` '' at the end means that the old ones stay."""

    begin: bool
    version: str = ""
    policy_version: int | None = None
    #: At the start: keep new sessions away meanwhile.
    hold: bool = False
    #: At the end: the prefix cache was cleared, and whether the trainer itself named the policy version.
    cleared: bool = False
    told: bool = False
    reason: str = "ended"


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """What an engine says of its prefix cache since the update before; hashes of 8 bytes each, end to end.

    A hash that is in both was removed and came back: it is stored.
    """

    instance: str
    incarnation: str
    stream: str
    sequence: int
    reset: bool = False
    behind: bool = False
    stored: bytes = b""
    removed: bytes = b""


@dataclass(frozen=True, slots=True)
class Change:
    """A session that changed: its fields now, or what is left of it, or neither where it was never admitted."""

    session_id: str
    now: Mapping[str, str] | None
    ended: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Changes:
    """One batch of changes, up to ``revision``."""

    revision: int
    more: bool
    rows: list[Change]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's fields as kept, with its standing in the queue."""

    session_id: str
    fields: Mapping[str, str]
    position: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a pool's stream."""

    token: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class InstanceUpdate:
    """What the controller publishes for one instance."""

    instance: str
    incarnation: str
    added: str
    need: tuple[int, ...]
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Relabel:
    """What behaviour says of a living or held session, and the class to put it under (empty: as it is)."""

    session_id: str
    was: str
    to: str
    inferred: Inferred
    contradicted: bool
    #: Virtual time of one admission of the old and of the new class, and the most that the new one may catch up.
    step_was: int = 0
    step_to: int = 0
    credit: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Whether the caller holds the pool's epoch, and the store's time."""

    holder: bool
    now_ms: int
    grace_until_ms: int
