"""Who asks to enter a pool at this server: decided here, and served as soon as its turn comes while it waits here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from moorage_server.core import admission, estimates, forecast, queue
from moorage_server.core import config as cfg
from moorage_server.core.admission import Verdict
from moorage_server.core.config import PoolConfig
from moorage_server.core.view import Ask, Pool
from moorage_server.errors import MoorageFailure, StoreUnavailable, WrongState
from moorage_server.meters import Meters, Wait
from moorage_server.runtime import arrivals
from moorage_server.runtime.arrivals import Arrival
from moorage_server.runtime.prefixes import Prefixes, tell
from moorage_server.runtime.views import DIRTY_VIEW_S, Views
from moorage_server.store.base import Store
from moorage_server.store.records import Admission, HomeWaits, OnHold, Placed, Refused, Resumed

#: Told that a call begins to wait.
OnWait = Callable[[], None]

log = structlog.get_logger("moorage.desk")

#: How often waiting callers look again although nothing woke them.
_LOOK_S = 0.5
#: A caller that waits here keeps its turn for this long without being heard of; it is heard of every third of it.
_PRESENT_MS, _KEEP_S = 6_000, 2.0
#: Least and most time between two tries of a poller; added per session that waits before it.
_RETRY_MS, MOST_RETRY_MS, _RETRY_STEP_MS = 250, 5_000, 25
#: A poller may be this late before others pass it.
_LATE_MS = 500
#: A place in the queue lasts this long after the last try, or three times the time until the next one.
_PATIENCE_MS = 30_000
#: How waits end, for those who count them.
OUTCOMES = {Placed: "place", OnHold: "hold", Refused: "reject", HomeWaits: "hold"}


@dataclass(slots=True)
class _Waiter:
    arrival: Arrival
    held: OnHold
    answer: asyncio.Future[Placed | OnHold | Refused]


class Admissions(Views):
    """Admits sessions to one pool. One event loop; not thread-safe."""

    def __init__(self, store: Store, pool: str, default: PoolConfig, meters: Meters | None = None) -> None:
        super().__init__(store, pool, default, meters)
        self._prefixes = Prefixes(store, pool)
        self._waiters: dict[str, _Waiter] = {}
        self._look = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Calls that wait here for their turn."""
        return len(self._waiters)

    async def close(self) -> None:
        """Answers those who wait with where they stand, and finishes what is under way. Nobody waits here any more."""
        self._closed = True
        for waiter in self._waiters.values():
            if not waiter.answer.done():
                waiter.answer.set_result(waiter.held)
        self._waiters.clear()
        # Looking ends by itself: an admission under way must be carried to its end, and taken back.
        self._look.set()
        if self._keeping is not None:
            self._keeping.cancel()
        await asyncio.gather(*filter(None, (self._looking, self._keeping)), return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """The pool changed for those who wait."""
        self._dirty = self._freed = True
        self._look.set()

    async def admit(
        self, arrival: Arrival, max_wait_s: float = 0.0, on_wait: OnWait | None = None
    ) -> tuple[Placed | OnHold | Refused, Verdict]:
        """Decides for one session; waits up to ``max_wait_s`` for its turn. A cancelled call leaves nothing behind.

        ``on_wait`` is called when the wait begins: from then on the session stands in the queue.
        """
        # What a slow store takes is part of the wait: the caller's deadline is.
        until = asyncio.get_running_loop().time() + max_wait_s
        view = await self.view()
        if arrival.hashes:
            await self._prefixes.look_up(view, arrival)
            view = await self.view()
        verdict = self._decide(view, arrival.ask)
        age = asyncio.get_running_loop().time() - self._read_at
        if not verdict.candidates and (self._freed or age > DIRTY_VIEW_S):
            # Nobody is held for what is over already.
            view = await self._read_again()
            verdict = self._decide(view, arrival.ask)
        result = await self._commit(view, arrival, verdict, waiting=max_wait_s > 0)
        if isinstance(result, OnHold) and verdict.candidates:
            # The ledger refused what was decided on outdated numbers.
            view = await self._read_again()
            verdict = self._decide(view, arrival.ask)
            result = await self._commit(view, arrival, verdict, waiting=max_wait_s > 0)
        left = until - asyncio.get_running_loop().time()
        if not isinstance(result, OnHold) or left <= 0:
            return result, verdict
        if on_wait is not None:
            on_wait()
        with Wait(self.meters, self.pool) as wait:
            waited = await self._wait(arrival, result, left)
            wait.outcome = OUTCOMES[type(waited)]
        return waited, verdict

    def _decide(self, view: Pool, ask: Ask) -> Verdict:
        ask = arrivals.as_held(view, ask)
        return admission.observe(view, ask) if view.config.mode == cfg.OBSERVE else admission.decide(view, ask)

    async def _commit(
        self, view: Pool, arrival: Arrival, verdict: Verdict, *, waiting: bool
    ) -> Placed | OnHold | Refused:
        """Carries a verdict to the ledger, which checks it again. Runs to its end even if the caller goes away."""
        task = asyncio.create_task(self._commit_now(view, arrival, verdict, waiting=waiting))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._spawn(self._withdraw(arrival, task))
            raise

    async def _commit_now(
        self, view: Pool, arrival: Arrival, verdict: Verdict, *, waiting: bool
    ) -> Placed | OnHold | Refused:
        result = await self._book(view, arrival, verdict, waiting=waiting)
        if isinstance(result, Resumed):
            # What it left on its former home may serve it again.
            arrival.former = result
            tell(view, arrival)
            verdict = self._decide(view, arrival.ask)
            result = await self._book(view, arrival, verdict, waiting=waiting)
            assert not isinstance(result, Resumed)
        if isinstance(result, Placed) and result.fresh:
            taken = next((c for c in verdict.candidates if c.instance == result.instance), None)
            if taken is not None and view is self._view:
                admission.charge(view, verdict, taken)
            if arrival.hashes:
                self._spawn(self._prefixes.note(view, result, arrival.hashes, arrived=True))
        elif isinstance(result, OnHold):
            self._dirty = True
        return result

    async def _book(
        self, view: Pool, arrival: Arrival, verdict: Verdict, *, waiting: bool
    ) -> Placed | OnHold | Refused | Resumed:
        name = verdict.ask.workload_class
        ahead = sum(q.length for q in view.queues.values())
        retry_ms = min(MOST_RETRY_MS, _RETRY_MS + _RETRY_STEP_MS * ahead)
        retry_ms = int(retry_ms * random.uniform(0.9, 1.1))
        step = queue.step(view, name)
        growth = estimates.growth_of(view, name)
        return await self.store.admit(
            self.pool,
            arrival.request,
            Admission(
                ask=arrival.ask,
                declared_class=arrival.declared_class,
                group_size=arrival.group_size,
                tokens=forecast.tokens_to_book(arrival.ask, growth),
                lease_ttl_ms=arrival.lease_ttl_ms,
                reason=verdict.reason,
                detail=arrival.explained(verdict.detail),
                retry_ms=retry_ms,
                patience_ms=max(_PATIENCE_MS, 3 * retry_ms),
                present_ms=_PRESENT_MS if waiting else retry_ms + _LATE_MS,
                observe=view.config.mode == cfg.OBSERVE,
                step=step,
                credit=queue.CREDIT * step,
                rejected=verdict.rejected,
                label=arrival.label,
                inferred=arrival.inferred,
                by_inference=arrival.by_inference,
                contradicted=arrival.contradicted,
                room=arrival.room,
                fallback=arrival.fallback,
                candidates=verdict.candidates,
                ticket=arrival.ticket,
                waiting=waiting,
                told=arrival.former is not None,
            ),
        )

    def abandon(self, arrival: Arrival) -> None:
        """The caller went before it had its answer."""
        self._spawn(self._withdraw(arrival))

    async def _withdraw(self, arrival: Arrival, first: asyncio.Future[Any] | None = None) -> None:
        """The caller is gone: what its call alone brought about is taken back, once ``first`` is through."""
        with contextlib.suppress(MoorageFailure):
            if first is not None:
                await first
            if await self.store.withdraw(self.pool, arrival.request, arrival.ask.session_id, arrival.ticket):
                self.changed()

    async def _wait(self, arrival: Arrival, held: OnHold, max_wait_s: float) -> Placed | OnHold | Refused:
        sid = arrival.ask.session_id
        if self._closed:
            return held
        waiter = _Waiter(arrival, held, asyncio.get_running_loop().create_future())
        other = self._waiters.get(sid)
        if other is not None and not other.answer.done():
            # Two calls wait for one session: the newer one takes over, the older one is told where it stands.
            other.answer.set_result(held)
        self._waiters[sid] = waiter
        self._start_looking()
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes with the answer.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max_wait_s):
                    return await asyncio.shield(waiter.answer)
            if waiter.answer.done():
                return waiter.answer.result()
            self._forget(sid, waiter)
            view = await self.view()
            return await self._commit(view, arrival, self._decide(view, arrival.ask), waiting=False)
        except asyncio.CancelledError:
            self._forget(sid, waiter)
            self._spawn(self._withdraw(arrival))
            raise
        finally:
            self._forget(sid, waiter)

    def _forget(self, sid: str, waiter: _Waiter) -> None:
        if self._waiters.get(sid) is waiter:
            del self._waiters[sid]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_looking(self) -> None:
        """Both loops end by themselves when nobody waits."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_loop())
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep_loop())

    async def _look_loop(self) -> None:
        """Serves those who wait here whenever the pool changed: no caller looks for itself, so none stampede."""
        while self._waiters:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._look.wait()
            self._look.clear()
            try:
                while await self._serve_waiters():
                    pass
            except StoreUnavailable:
                self._fail_waiters()
            except Exception:
                log.exception("look_failed", pool=self.pool)

    async def _serve_waiters(self) -> bool:
        """Admits those whose turn it is. True if it should look again at once, on fresh numbers."""
        # What woke us may be younger than the view at hand.
        view = await (self._read_again() if self._dirty else self.view())
        await self._prefixes.look_up_heads(view, self._arrival_here)
        for verdict in self._verdicts(view):
            waiter = self._waiters.get(verdict.ask.session_id)
            if waiter is None or not (verdict.candidates or verdict.rejected) or waiter.answer.done():
                continue
            result = await self._commit_now(view, waiter.arrival, verdict, waiting=True)
            # In the meantime the caller may have gone, or a newer call may have taken over.
            waiter_now = self._waiters.get(verdict.ask.session_id)
            if waiter_now is None or waiter_now.answer.done():
                self._spawn(self._withdraw(waiter.arrival))
            elif not isinstance(result, OnHold):
                waiter_now.answer.set_result(result)
            if isinstance(result, OnHold):
                return False
            if view is not self._view:
                return True
        return False

    def _verdicts(self, view: Pool) -> Iterable[Verdict]:
        """For those whose turn it is; in OBSERVE for all who wait here, since nobody is held any more."""
        asks = [arrivals.as_held(view, waiter.arrival.ask) for waiter in self._waiters.values()]
        if view.config.mode == cfg.OBSERVE:
            return [admission.observe(view, ask) for ask in asks]
        # Who became too stale to be useful need not wait for its turn to hear it.
        stale = [verdict for ask in asks if (verdict := admission.outdated(view, ask)) is not None]
        return itertools.chain(stale, admission.plan(view))

    def _arrival_here(self, session_id: str) -> Arrival | None:
        waiter = self._waiters.get(session_id)
        return None if waiter is None else waiter.arrival

    def _fail_waiters(self) -> None:
        for waiter in self._waiters.values():
            if not waiter.answer.done():
                waiter.answer.set_exception(StoreUnavailable())
        self._waiters.clear()

    async def _keep_loop(self) -> None:
        """Says for those who wait here that they are still there."""
        while self._waiters:
            await asyncio.sleep(_KEEP_S)
            waiters = list(self._waiters.items())
            with contextlib.suppress(StoreUnavailable):
                states = await self.store.keep(self.pool, [sid for sid, _ in waiters], _PRESENT_MS, _PATIENCE_MS)
                for (_, waiter), state in zip(waiters, states, strict=True):
                    if state != "held":
                        await self._settle(waiter, alive=state == "live")

    async def _settle(self, waiter: _Waiter, *, alive: bool) -> None:
        """Answers a caller whose session left the queue by other hands than ours."""
        if alive:
            view = await self.view()
            result = await self._commit_now(view, waiter.arrival, self._decide(view, waiter.arrival.ask), waiting=True)
            if not waiter.answer.done():
                waiter.answer.set_result(result)
        elif not waiter.answer.done():
            waiter.answer.set_exception(left_queue(waiter.arrival.ask.session_id))


def left_queue(session_id: str) -> WrongState:
    return WrongState(f"session {session_id!r} was released while it waited", {"session_id": session_id})
