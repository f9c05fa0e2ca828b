"""Living sessions on Redis: their turns, their progress and their ends, many per script call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from moorage_server.core.view import Ask
from moorage_server.errors import (
    InvalidField,
    LeaseStale,
    MoorageFailure,
    PoolUnknown,
    RequestIdReused,
    SessionUnknown,
    WrongState,
)
from moorage_server.store import records, wire
from moorage_server.store.parse import optional_int, text
from moorage_server.store.wire import blank

#: How long a paused session is remembered.
PAUSED_MS = 3_600_000
#: Items per script call: a script blocks the whole store while it runs.
_BATCH, _PROGRESS_BATCH = 64, 100

T = TypeVar("T")


class RedisSessions(ABC):
    """The part of :class:`moorage_server.store.base.Store` that living sessions call again and again."""

    @abstractmethod
    async def _run(self, name: str, pool: str, *args: Any) -> Any:
        """Runs a script on a pool."""

    async def place(
        self,
        pool: str,
        request: records.Request,
        session_id: str,
        token: str,
        turn: int | None,
        prompt: int | None,
        gone_ms: int,
    ) -> records.Placed | records.Homeless | records.HomeWaits:
        (answer,) = await self.places(pool, [records.Turn(request, session_id, token, turn, prompt)], gone_ms)
        if isinstance(answer, MoorageFailure):
            raise answer
        return answer

    async def places(
        self, pool: str, turns: Sequence[records.Turn], gone_ms: int
    ) -> list[records.Placed | records.Homeless | records.HomeWaits | MoorageFailure]:
        answers: list[records.Placed | records.Homeless | records.HomeWaits | MoorageFailure] = []
        for batch in _parts(turns, _BATCH):
            args: list[Any] = [gone_ms, len(batch)]
            for request, sid, token, turn, prompt in batch:
                args += (request.request_id, request.body, sid, token, blank(turn), blank(prompt))
            replies = await self._run("place", pool, *args)
            answers += [_place(pool, turn, reply) for turn, reply in zip(batch, replies, strict=True)]
        return answers

    async def release(
        self,
        pool: str,
        request: records.Request,
        session_id: str,
        token: str,
        outcome: str,
        context: int | None,
        *,
        evict_reason: str | None = None,
    ) -> records.Released:
        ending = records.Ending(request, session_id, token, outcome, context)
        (answer,) = await self.releases(pool, [ending], evict_reason)
        if isinstance(answer, MoorageFailure):
            raise answer
        return answer

    async def releases(
        self, pool: str, endings: Sequence[records.Ending], evict_reason: str | None = None
    ) -> list[records.Released | MoorageFailure]:
        answers: list[records.Released | MoorageFailure] = []
        for batch in _parts(endings, _BATCH):
            args: list[Any] = [PAUSED_MS, int(evict_reason is not None), evict_reason or "", len(batch)]
            for request, sid, token, outcome, context in batch:
                args += (request.request_id, request.body, sid, token, outcome, blank(context))
            replies = await self._run("release", pool, *args)
            answers += [_release(pool, ending, reply) for ending, reply in zip(batch, replies, strict=True)]
        return answers

    async def withdraw(self, pool: str, request: records.Request, session_id: str, ticket: str) -> bool:
        return bool(await self._run("withdraw", pool, request.request_id, session_id, ticket, PAUSED_MS))

    async def progress(self, pool: str, items: Sequence[records.Progress]) -> list[records.Renewed]:
        answers: list[records.Renewed] = []
        for batch in _parts(items, _PROGRESS_BATCH):
            args: list[Any] = [len(batch)]
            for i in batch:
                args += (i.session_id, i.token, i.phase, blank(i.turn), blank(i.context_tokens))
                args += (blank(i.cached_tokens), blank(i.output_tokens))
            reply = await self._run("progress", pool, *args)
            answers += [
                records.Renewed(text(reply[n]), int(reply[n + 1] or 0), int(reply[n + 2] or 0))
                for n in range(0, len(reply), 3)
            ]
        return answers


def _place(
    pool: str, turn: records.Turn, reply: Any
) -> records.Placed | records.Homeless | records.HomeWaits | MoorageFailure:
    kind, sid = text(reply[0]), turn.session_id
    if kind == "PLACED":
        return wire.placed(reply, fresh=False)
    if kind == "WAIT":
        return records.HomeWaits(text(reply[1]), text(reply[2]))
    if kind == "HOMELESS":
        _, why, ask, name, tokens, group, version = reply
        policy_version = optional_int(version)
        asked = Ask.decode(sid, text(name), text(ask), group_id=text(group), policy_version=policy_version)
        return records.Homeless(text(why), asked.moved(int(tokens)))
    if kind == "UNKNOWN":
        return SessionUnknown(pool, sid) if int(reply[1]) else PoolUnknown(pool)
    if kind == "HELDSTATE":
        return WrongState(f"session {sid!r} is held: it has no home yet", {"session_id": sid})
    return LeaseStale(pool, sid) if kind == "STALE" else RequestIdReused(turn.request.request_id)


def _release(pool: str, ending: records.Ending, reply: Any) -> records.Released | MoorageFailure:
    kind = text(reply[0])
    if kind in ("RELEASED", "OVER"):
        return records.Released(kind == "OVER", int(reply[1]), int(reply[2]), int(reply[3]))
    if kind == "NOTHING":
        return records.Released(True) if int(reply[1]) else PoolUnknown(pool)
    if kind == "NOTOKEN":
        return InvalidField("lease_token", "", "given: the session is placed, not held")
    return LeaseStale(pool, ending.session_id) if kind == "STALE" else RequestIdReused(ending.request.request_id)


def _parts(items: Sequence[T], most: int) -> list[Sequence[T]]:
    return [items[at : at + most] for at in range(0, len(items), most)]
