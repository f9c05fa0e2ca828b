"""The store's interface: plain values in and out. Every mutation is one atomic transition, idempotent by request id.

All methods raise ``StoreUnavailable`` where the store does not answer, and ``RequestIdReused`` where a request id came
before with another body. Times are milliseconds on the store's clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from moorage_server.core.config import PoolConfig
from moorage_server.core.view import Pool
from moorage_server.errors import MoorageFailure
from moorage_server.store.records import (
    Admission,
    Changes,
    Ending,
    Event,
    Homeless,
    HomeWaits,
    InstanceUpdate,
    OnHold,
    Placed,
    PrefixChange,
    Progress,
    Refused,
    Relabel,
    Released,
    Renewed,
    Request,
    Resumed,
    SessionRecord,
    Snapshot,
    Tick,
    Turn,
    WeightUpdate,
)


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

    async def places(
        self, pool: str, turns: Sequence[Turn], gone_ms: int
    ) -> list[Placed | Homeless | HomeWaits | MoorageFailure]:
        """Many of :meth:`place`, in order, one by one; what one would raise stands in its place."""
        ...

    async def releases(self, pool: str, endings: Sequence[Ending]) -> list[Released | MoorageFailure]:
        """Many of :meth:`release`, in order, one by one; what one would raise stands in its place."""
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
        """Marks the start or the end of a weight update; whether that changed anything.

        Of one instance, or ('') of the pool, for instances that come while it lasts.
        """
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
