"""One pool as one server process serves it: who enters (see `admissions`), where turns go, and how sessions end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moorage_server.core import admission
from moorage_server.core.view import PAUSED, Pool
from moorage_server.errors import MoorageFailure
from moorage_server.meters import Wait
from moorage_server.runtime.admissions import MOST_RETRY_MS, OUTCOMES, Admissions, OnWait, left_queue
from moorage_server.runtime.arrivals import Arrival
from moorage_server.store.records import (
    Ending,
    Homeless,
    HomeWaits,
    OnHold,
    Placed,
    Refused,
    Released,
    Request,
    Turn,
)

#: How often a session looks whether its paused home serves again.
_HOME_LOOK_S = 0.25


class Desk(Admissions):
    """Serves one pool. One event loop; not thread-safe."""

    async def place(
        self,
        request: Request,
        session_id: str,
        token: str,
        turn: int | None,
        prompt: int | None,
        max_wait_s: float,
        hashes: Sequence[int] = (),
    ) -> Placed | OnHold:
        """Where the session's next request goes; moves it if its home is lost."""
        until = asyncio.get_running_loop().time() + max_wait_s
        asked = Turn(request, session_id, token, turn, prompt)
        (result,) = await self.places([asked])
        if isinstance(result, MoorageFailure):
            raise result
        return await self.settle(asked, result, until - asyncio.get_running_loop().time(), hashes)

    async def places(self, turns: Sequence[Turn]) -> list[Placed | Homeless | HomeWaits | MoorageFailure]:
        """Where the next requests of many sessions go, in one round trip; what is not Placed is to be settled."""
        view = await self.view()
        return await self.store.places(self.pool, turns, int(view.config.gone_after_s * 1000))

    async def settle(
        self,
        turn: Turn,
        result: Placed | Homeless | HomeWaits,
        max_wait_s: float,
        hashes: Sequence[int] = (),
        on_wait: OnWait | None = None,
    ) -> Placed | OnHold:
        """What becomes of a turn: waits for a home that is paused, moves a session whose home is lost."""
        view = await self.view()
        gone_ms = int(view.config.gone_after_s * 1000)
        until = asyncio.get_running_loop().time() + max_wait_s

        def left() -> float:
            return max(0.0, until - asyncio.get_running_loop().time())

        if isinstance(result, HomeWaits) and max_wait_s > 0:
            if on_wait is not None:
                on_wait()
            with Wait(self.meters, self.pool) as wait:
                while isinstance(result, HomeWaits) and left() > 0 and not self._closed:
                    await asyncio.sleep(min(_HOME_LOOK_S, left()))
                    result = await self.store.place(self.pool, *turn, gone_ms)
                wait.outcome = OUTCOMES.get(type(result), "moved")
        if isinstance(result, Placed):
            self.note(view, result, hashes)
            return result
        if isinstance(result, HomeWaits):
            reason = admission.WEIGHT_UPDATE if result.state == PAUSED else admission.IS_DRAINING
            detail = f"home is {result.state.lower()}"
            retry_ms, name = int(_HOME_LOOK_S * 1000), result.workload_class
            return OnHold(reason, retry_ms, 0, 0, view.now_ms, detail, name)
        moved, _ = await self.admit(Arrival(result.ask, turn.request, hashes=hashes), left(), on_wait)
        if isinstance(moved, Refused):
            since_ms, name = moved.since_ms, moved.workload_class
            return OnHold(moved.reason, MOST_RETRY_MS, 0, 0, since_ms, moved.detail, name)
        return moved

    def note(self, view: Pool, placed: Placed, hashes: Sequence[int]) -> None:
        """Remembers which prompt a turn sent to its home; in the background."""
        if hashes:
            self._spawn(self._prefixes.note(view, placed, hashes, arrived=False))

    async def release(
        self,
        request: Request,
        session_id: str,
        token: str,
        outcome: str,
        context: int | None,
        *,
        evict_reason: str | None = None,
    ) -> Released:
        """Ends a session; a caller that waits for it here is told to go."""
        result = await self.store.release(
            self.pool, request, session_id, token, outcome, context, evict_reason=evict_reason
        )
        self._released(session_id, result)
        return result

    async def releases(self, endings: Sequence[Ending]) -> list[Released | MoorageFailure]:
        """Ends many sessions in one round trip."""
        results = await self.store.releases(self.pool, endings)
        for ending, result in zip(endings, results, strict=True):
            if isinstance(result, Released):
                self._released(ending.session_id, result)
        return results

    def _released(self, session_id: str, result: Released) -> None:
        self.changed()
        waiter = self._waiters.get(session_id)
        if not result.over and waiter is not None and not waiter.answer.done():
            waiter.answer.set_exception(left_queue(session_id))
