"""A steady load on a pool: workers that enter, take a few turns, and leave, and that repair what a store forgot."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TypeVar

from moorage import AsyncClient, FailedPrecondition, LeaseLost, NotFound, Unavailable
from moorage.v1 import scheduler_pb2 as pb

TURNS = 3
#: Between two turns, and before a call that failed is made again, seconds.
_TURN_S, _RETRY_S = 0.05, 0.05
#: Longest wait of one Admit in the queue, seconds.
_WAIT_S = 2.0

T = TypeVar("T")


class Load:
    """`workers` of one pool, each with one session at a time; the first one asks for each of its own twice at once.

    The first `stay` of them leave their last session living.
    """

    def __init__(self, client: AsyncClient, pool: str, workers: int, stay: int) -> None:
        self._client, self._pool, self._workers, self._stay = client, pool, workers, stay
        self._stopping = False
        #: Times (time.monotonic) of the placements.
        self.placed_at: list[float] = []
        #: Tokens of the sessions that were admitted and not released.
        self.living: dict[str, str] = {}
        #: When the two calls for one session came back with different tokens.
        self.torn_at: list[float] = []
        #: Errors by class, and sessions that had to enter again.
        self.errors: Counter[str] = Counter()
        self.readmitted = 0
        self.done = 0

    def __str__(self) -> str:
        return (
            f"{self.done} sessions done, {self.readmitted} entered again, {len(self.torn_at)} pairs torn, "
            f"errors {dict(self.errors)}"
        )

    async def run(self) -> None:
        """Until `stop`."""
        await asyncio.gather(*(self._work(number) for number in range(self._workers)))

    def stop(self) -> None:
        """Each worker ends with the session it has."""
        self._stopping = True

    def longest_gap(self, since: float, until: float) -> float:
        """Longest time without a placement, seconds."""
        times = [since, *(at for at in self.placed_at if since < at < until), until]
        return max(later - earlier for earlier, later in pairwise(times))

    async def _work(self, worker: int) -> None:
        number = 0
        while True:
            session = f"{worker}-{number}"
            await (self._enter_twice(session) if worker == 0 else self._enter(session))
            for turn in range(TURNS):
                await self.turn(session, turn)
                await asyncio.sleep(_TURN_S)
            if self._stopping and worker < self._stay:
                return
            await self._leave(session)
            if self._stopping:
                return
            number += 1

    async def _enter(self, session: str) -> None:
        self.living[session] = await self._admitted(session)

    async def _enter_twice(self, session: str) -> None:
        first, second = await asyncio.gather(self._admitted(session), self._admitted(session))
        if first != second:
            self.torn_at.append(time.monotonic())
        # Where they differ, one of them was lost: the store has the last word.
        self.living[session] = first if first == second else await self._admitted(session)

    async def _admitted(self, session: str) -> str:
        while True:
            answer = await self._insist(
                lambda: self._client.admit(
                    session, pool=self._pool, max_wait=_WAIT_S, prompt_tokens=64, max_context_tokens=128
                )
            )
            if answer.decision == pb.DECISION_PLACE:
                self.placed_at.append(time.monotonic())
                return answer.lease.token
            assert answer.decision == pb.DECISION_HOLD

    async def turn(self, session: str, turn: int) -> None:
        """One Place; a session that is not known any more, or under another token, enters again."""
        while True:
            token = self.living[session]
            try:
                answer = await self._insist(
                    lambda token=token: self._client.place(  # type: ignore[misc]
                        session, pool=self._pool, lease_token=token, turn=turn, max_wait=_WAIT_S
                    )
                )
            except (LeaseLost, NotFound, FailedPrecondition):
                # The last one: held once more, as its admission was lost.
                self.readmitted += 1
                self.living[session] = await self._admitted(session)
                continue
            if answer.decision == pb.DECISION_PLACE:
                self.living[session] = answer.lease.token
                self.placed_at.append(time.monotonic())
                return

    async def _leave(self, session: str) -> None:
        token = self.living.pop(session)
        try:
            await self._insist(
                lambda: self._client.release(session, pool=self._pool, lease_token=token, outcome="COMPLETED")
            )
        except (LeaseLost, NotFound):
            # Lost with the writes that a failover lost: what is left of it ends with its lease.
            self.errors["lost"] += 1
        self.done += 1

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """The first answer that is not UNAVAILABLE."""
        while True:
            try:
                return await call()
            except Unavailable as error:
                self.errors[type(error).__name__] += 1
                await asyncio.sleep(error.retry_after or _RETRY_S)
