"""Sends script calls that are made at the same time as one pipeline.

Under load most of what a call costs in Python is the round trip: a connection taken and given back, a write, a read.
So calls that come while a round trip is under way go together in the next one. Each script still runs by itself: a
pipeline is no transaction. A caller that is cancelled does not disturb the others, nor the connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

#: Calls per pipeline: the store serves nobody else in between.
_MOST = 64


class Batcher:
    """Runs scripts by their digest on one client."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._waiting: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    def evalsha(self, sha: str, key: str, *args: Any) -> asyncio.Future[Any]:
        """The script's answer, or its error."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(((sha, 1, key, *args), answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return answer

    async def load(self, source: str, key: str) -> None:
        """Loads a script; the key says where, on a store of several nodes."""
        await self._client.script_load(source)

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            try:
                answers = await self._round_trip([call for call, _ in batch])
            except ResponseError as error:
                answers = [error] * len(batch)
            except Exception as error:
                # The store is away: who waits for the next round trip need not find that out by another timeout.
                batch, self._waiting = batch + self._waiting, []
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _round_trip(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        if len(calls) == 1:
            return [await self._client.evalsha(*calls[0])]
        async with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(*call)
            return await pipe.execute(raise_on_error=False)
