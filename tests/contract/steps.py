"""Steps of the ledger tests: short ways to ask the store for one thing, with everything else at a plain default."""

from __future__ import annotations

import uuid
from typing import Any

from moorage_server.core.admission import Candidate
from moorage_server.core.view import Ask
from moorage_server.store.keys import instance_key
from moorage_server.store.records import (
    Admission,
    OnHold,
    Placed,
    Progress,
    Released,
    Renewed,
    Request,
    Snapshot,
    WeightUpdate,
)
from moorage_server.store.redis_store import RedisStore
from tests.conftest import Backend
from tests.ledger_audit import Books, audit, read

#: A moment to stop the clock at.
NOON = 1_800_000_000_000
#: Silence after which an instance is gone, and after which it is forgotten.
GONE_MS, FORGET_MS = 30_000, 600_000
#: How long leases run on while engines stand still.
EXCUSED_MS = 600_000
UNLIMITED = 2**52

POOL = "p"
I0 = instance_key("i", 0)
I1 = instance_key("j", 0)


def request(body: str = "body", request_id: str | None = None) -> Request:
    """A request of its own, or one that repeats ``request_id``."""
    return Request(str(uuid.uuid4()) if request_id is None else request_id, body)


class Steps:
    """What callers, engines and controllers do to one pool, through one store."""

    def __init__(self, backend: Backend, store: RedisStore, pool: str = POOL) -> None:
        self.backend, self.store, self.pool = backend, store, pool
        self._sequence = 0

    async def snapshot(self, instance: str = I0, inc: str = "1", state: str = "SERVING", **changes: Any) -> str:
        """One snapshot; sequences grow by themselves."""
        self._sequence += 1
        values: dict[str, Any] = {"sequence": self._sequence, "block_size": 16, "raw": b"", **changes}
        return await self.store.snapshot(self.pool, Snapshot(instance, inc, state=state, **values))

    async def admit(
        self,
        sid: str,
        *on: str,
        rid: Request | None = None,
        tokens: int = 160,
        group: str = "",
        shared: int = 0,
        workload_class: str = "a",
        inc: str = "1",
        cap: int = UNLIMITED,
        asks: tuple[int, ...] = (),
        limits: tuple[int, ...] = (),
        cached: int = 0,
        ask: Ask | None = None,
        **changes: Any,
    ) -> Any:
        """Admits a session with the given instances as candidates, or holds it where there are none."""
        candidates = tuple(Candidate(i, inc, cap, shared, 0, cached, asks, limits) for i in on)
        values = {"reason": "" if on else "KV_BUDGET", "present_ms": 1_000, "told": True, **changes}
        asked = ask or Ask(sid, workload_class, group, prompt_tokens=tokens)
        admission = Admission(ask=asked, tokens=tokens, candidates=candidates, **values)
        return await self.store.admit(self.pool, rid or Request(), admission)

    async def placed(self, sid: str, *on: str, **rest: Any) -> Placed:
        """A session that must get in."""
        found = await self.admit(sid, *(on or (I0,)), **rest)
        assert isinstance(found, Placed), found
        return found

    async def held(self, sid: str, *on: str, **rest: Any) -> OnHold:
        """A session that must wait."""
        found = await self.admit(sid, *on, **rest)
        assert isinstance(found, OnHold), found
        return found

    async def place(self, sid: str, token: str, rid: Request | None = None, prompt: int | None = None) -> Any:
        """The next turn of a session."""
        return await self.store.place(self.pool, rid or Request(), sid, token, None, prompt, GONE_MS)

    async def moved(self, sid: str, token: str, *on: str, **rest: Any) -> Placed:
        """The next turn of a session that lost its home and gets a new one."""
        lost = await self.place(sid, token)
        return await self.placed(sid, *on, ask=lost.ask, **rest)

    async def release(
        self, sid: str, token: str = "", outcome: str = "COMPLETED", rid: Request | None = None, **rest: Any
    ) -> Released:
        """The end of a session."""
        context = rest.pop("context", None)
        return await self.store.release(self.pool, rid or Request(), sid, token, outcome, context, **rest)

    async def progress(self, sid: str, token: str, **rest: Any) -> Renewed:
        """One progress report."""
        (renewed,) = await self.store.progress(self.pool, [Progress(sid, token, **rest)])
        return renewed

    async def tick(self, owner: str = "me", lease_ms: int = 60_000) -> Any:
        """Holds the epoch, with half a minute of grace after five seconds of silence."""
        return await self.store.tick(self.pool, owner, lease_ms, 30_000, 5_000)

    async def pass_time(self, ms: int) -> None:
        """Lets time pass while somebody keeps the epoch, so that silence means something."""
        while ms > 0:
            await self.tick()
            await self.backend.clock.advance(min(ms, 4_000))
            ms -= 4_000
        await self.tick()

    async def expire(self, per_second: int = 1_000, most: int = 100) -> int:
        """Ends what ran out."""
        return await self.store.expire(self.pool, per_second, most, EXCUSED_MS)

    async def weights(self, begin: bool, version: str = "", instance: str = I0, **rest: Any) -> bool:
        """The start or the end of a weight update."""
        return await self.store.weights(self.pool, instance, WeightUpdate(begin, version, **rest))

    async def turn(self, sid: str, token: str, number: int, context: int, cached: int) -> Renewed:
        """A finished turn."""
        return await self.progress(sid, token, turn=number, context_tokens=context, cached_tokens=cached)

    async def gone(self, instance: str = I0) -> str:
        """Declares a silent instance gone."""
        return await self.store.gone(self.pool, instance, GONE_MS, FORGET_MS)

    async def books(self) -> Books:
        """What the ledger holds, after checking that it balances."""
        await self.balanced()
        return await read(self.backend.client, self.backend.prefix, self.pool)

    async def balanced(self) -> None:
        """Fails with every discrepancy."""
        assert await audit(self.backend.client, self.backend.prefix, self.pool) == []
