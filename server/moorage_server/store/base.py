"""The store's interface: plain values in and out. Every mutation is one atomic transition, idempotent by request id.

All methods raise ``StoreUnavailable`` where the store does not answer, and ``RequestIdReused`` where a request id came
before with another body. Times are milliseconds on the store's clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moorage_server.core.admission import Candidate
from moorage_server.core.config import UNLABELLED, PoolConfig
from moorage_server.core.labels import NOTHING, Inferred
from moorage_server.core.view import Ask, Pool


@dataclass(frozen=True, slots=True)
class Request:
    """Identity of a mutating call: its id (may be empty) and a hash of its body."""

    request_id: str = ""
    body: str = ""


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
    #: At the end: the prefix cache was cleared.
    cleared: bool = False
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


class Store(Protocol):
    """What moorage needs of a store."""

    async def ping(self) -> None: ...

    async def close(self) -> None: ...

    async def pools(self) -> list[str]:
        """Pools that any server touched."""
        ...

    async def name(self, pool: str) -> None:
        """Makes a pool known."""
        ...

    async def retire(self, pool: str) -> bool:
        """Forgets a pool that nobody ever named and that holds no session; False where it is one."""
        ...

    async def view(self, pool: str, default: PoolConfig) -> Pool:
        """The pool, with the configuration kept in the store, else ``default``."""
        ...

    async def admit(self, pool: str, request: Request, admission: Admission) -> Placed | OnHold | Refused | Resumed: ...

    async def place(
        self,
        pool: str,
        request: Request,
        session_id: str,
        token: str,
        turn: int | None,
        prompt: int | None,
        gone_ms: int,
    ) -> Placed | Homeless | HomeWaits:
        """Raises SessionUnknown, PoolUnknown, LeaseStale, WrongState."""
        ...

    async def release(
        self,
        pool: str,
        request: Request,
        session_id: str,
        token: str,
        outcome: str,
        context: int | None,
        *,
        evict_reason: str | None = None,
    ) -> Released:
        """Raises PoolUnknown, LeaseStale, InvalidField (no token)."""
        ...

    async def withdraw(self, pool: str, request: Request, session_id: str, ticket: str) -> bool:
        """Takes back what the admit with ``ticket`` brought about, unless another call asked for the session since."""
        ...

    async def progress(self, pool: str, items: Sequence[Progress]) -> list[Renewed]: ...

    async def snapshot(self, pool: str, snapshot: Snapshot) -> str:
        """'OK', 'NEW', 'OLD_SEQUENCE' or 'OLD_INCARNATION'."""
        ...

    async def prefix_update(self, pool: str, change: PrefixChange, most: int) -> str:
        """'OK', 'REPEAT', 'NO_INSTANCE', 'OTHER_INCARNATION', 'OLD_INCARNATION', 'NEW_STREAM' or 'GAP'.

        Of the hashes known afterwards the oldest above ``most`` are dropped.
        """
        ...

    async def prefix_note(
        self, pool: str, instance: str, incarnation: str, hashes: bytes, most: int, first: int = 0
    ) -> bool:
        """Notes hashes sent to an instance, from block ``first`` on; False where its engine tells itself."""
        ...

    async def prefix_lookup(self, pool: str, instances: Sequence[str], hashes: bytes) -> list[int]:
        """How many of the hashes, from the first on without a gap, each instance holds."""
        ...

    async def keep(self, pool: str, session_ids: Sequence[str], present_ms: int, patience_ms: int) -> list[str]:
        """Keeps the places of callers that wait; returns the state of each session: 'held', else its wait is over."""
        ...

    async def mark(self, pool: str, instance: str, mark: str) -> tuple[bool, int]:
        """Sets 'cordon' or 'drain', or 'open's; whether the instance is known, and its sessions."""
        ...

    async def weights(self, pool: str, instance: str, update: WeightUpdate) -> bool:
        """Marks the start or the end of a weight update of one instance; whether that changed anything."""
        ...

    async def configure(self, pool: str, request: Request, config: str, version: int | None) -> bool:
        """Stores a configuration made from ``version``; False where another change came first."""
        ...

    async def tick(self, pool: str, owner: str, lease_ms: int, grace_ms: int, quiet_ms: int) -> Tick:
        """Takes or keeps the epoch; nobody doing so for ``quiet_ms`` is an outage, and ``grace_ms`` follow it."""
        ...

    async def resign(self, pool: str, owner: str) -> None: ...

    async def changes(self, pool: str, owner: str, since: int, limit: int) -> Changes | None:
        """None where the caller does not hold the epoch any more."""
        ...

    async def state(self, pool: str) -> str:
        """The controller's state as last published; empty if none."""
        ...

    async def publish(
        self,
        pool: str,
        owner: str,
        policy: str | None,
        state: str | None,
        epoch: bool,
        updates: Sequence[InstanceUpdate],
    ) -> bool:
        """False where the caller does not hold the epoch any more."""
        ...

    async def expire(self, pool: str, per_second: int, most: int, excused_ms: int) -> int:
        """Ends what ran out; leases run on for ``excused_ms`` while their home loads weights, is paused, or sleeps."""
        ...

    async def relabel(self, pool: str, owner: str, items: Sequence[Relabel], contradicted: int) -> list[bool] | None:
        """Which of the sessions changed their class; None where the caller does not hold the epoch any more.

        ``contradicted``: further sessions whose behaviour contradicts their label, and that are over.
        """
        ...

    async def gone(self, pool: str, instance: str, gone_ms: int, forget_ms: int) -> str:
        """'ALIVE', 'GONE' or 'FORGOTTEN'."""
        ...

    async def session(self, pool: str, session_id: str) -> tuple[int, SessionRecord | None]:
        """The store's time, and the session."""
        ...

    async def sessions(self, pool: str, after: str, limit: int) -> tuple[int, str, list[SessionRecord]]:
        """The store's time, where the next page begins ('' = no more), and the page."""
        ...

    async def history(self, pool: str, session_id: str) -> list[tuple[int, str, str, str]]:
        """Time, kind, reason, instance key; oldest first."""
        ...

    async def events(self, pool: str, after: str, limit: int) -> list[Event]:
        """Events after a token ('0' = from the oldest kept, '$' = none: the last one, for its token)."""
        ...

    def listen(self, on_wake: Callable[[str, str], None]) -> AsyncIterator[None]:
        """Calls ``on_wake(pool, why)`` whenever the pool changed for those who wait; yields once it listens."""
        ...
