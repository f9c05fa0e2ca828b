"""Random traffic of many callers through two servers on one store, with all that goes wrong: cancelled calls, retries,
abandoned sessions, engines that restart, pause and drain, a server that dies. In the end nothing may be left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any, cast

import grpc
import pytest

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.runtime import admissions
from moorage_server.store import keys
from tests.conftest import Backend
from tests.contract.plane import POOL, Plane, capped, eventually, new_id, seconds

CALLERS, SESSIONS, CAP = 10, 3, 2
ENGINES = ("i", "j")
#: A call whose server ended under it.
BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Traffic:
    """The planes, the dice, and what callers saw."""

    def __init__(self, backend: Backend, planes: list[Plane], seed: int) -> None:
        self.backend, self.planes, self.dice = backend, planes, random.Random(seed)
        self.incarnations = dict.fromkeys(ENGINES, 1)
        self.served = 0

    @property
    def plane(self) -> Plane:
        """Any server."""
        return self.dice.choice(self.planes)

    async def engines(self) -> None:
        """Two engines that report ten times a second, and sometimes restart, pause or drain."""
        while True:
            for name in ENGINES:
                state = pb.INSTANCE_STATE_SERVING
                if self.dice.random() < 0.04:
                    self.incarnations[name] += 1
                elif self.dice.random() < 0.06:
                    state = self.dice.choice([pb.INSTANCE_STATE_PAUSED, pb.INSTANCE_STATE_DRAINING])
                report = self.plane.report(name, incarnation=str(self.incarnations[name]), state=state)
                await self.outcome(report, *BROKEN)
            await asyncio.sleep(0.1)

    async def watch_caps(self) -> None:
        """No instance ever has more sessions than its cap."""
        root = keys.pool_prefix(self.backend.prefix, POOL)
        while True:
            for name in ENGINES:
                sessions = await cast(Awaitable[Any], self.backend.client.hget(f"{root}i:0|{name}", "ses"))
                assert int(sessions or 0) <= CAP
            await asyncio.sleep(0.1)

    async def caller(self, name: str) -> None:
        """Some sessions, one after the other."""
        for n in range(SESSIONS):
            sid = f"{name}-{n}"
            token = await self.enter(sid)
            if token is not None:
                await self.live(sid, token)

    async def enter(self, sid: str) -> str | None:
        """The token of a session that got in; None where the caller gave up."""
        rid = new_id()
        fields: dict[str, Any] = {"request_id": rid, "lease_ttl": seconds(1), "group_id": self.dice.choice(["", "g"])}
        while True:
            call = self.plane.admit(sid, wait=self.dice.choice([None, 0.5, 5.0]), **fields)
            answer = asyncio.ensure_future(call)
            if self.dice.random() < 0.25:
                await asyncio.sleep(self.dice.random() * 0.05)
                call.cancel()
                await asyncio.gather(answer, return_exceptions=True)
                if self.dice.random() < 0.3:
                    return None
                continue
            # FAILED_PRECONDITION: an earlier, cancelled try was taken back while this one waited.
            found = await self.outcome(answer, *BROKEN, grpc.StatusCode.FAILED_PRECONDITION)
            if isinstance(found, grpc.StatusCode):
                continue
            if found.decision == pb.DECISION_PLACE:
                return await self.same_for_everybody(sid, found.lease.token)
            assert found.decision == pb.DECISION_HOLD
            await asyncio.sleep(0.1)

    async def same_for_everybody(self, sid: str, token: str) -> str:
        """One session, one living lease, whoever asks. Returns its token: another one where the first ran out."""
        if self.dice.random() < 0.2:
            calls = [self.outcome(plane.admit(sid), *BROKEN) for plane in self.planes]
            answers = [a for a in await asyncio.gather(*calls) if a not in BROKEN]
            lives = [a for a in answers if a.decision == pb.DECISION_PLACE]
            tokens = {str(a.lease.token) for a in lives} or {token}
            assert len(tokens) == 1
            return tokens.pop()
        return token

    async def live(self, sid: str, token: str) -> None:
        """A few turns, then the end; or the caller vanishes, and the lease ends the session."""
        for turn in range(self.dice.randrange(4)):
            rid = new_id()
            while True:
                call = self.plane.place(sid, token, turn=turn, prompt_tokens=160 + 16 * turn, request_id=rid)
                # NOT_FOUND: the lease ran out while the session had no home.
                answer = await self.outcome(call, *BROKEN, grpc.StatusCode.NOT_FOUND)
                if answer == grpc.StatusCode.NOT_FOUND:
                    return
                if answer not in BROKEN and answer.decision == pb.DECISION_PLACE:
                    token = answer.lease.token
                    break
                await asyncio.sleep(0.1)
            report = self.plane.progress(sid, token, turn=turn, context_tokens=200 + 16 * turn, cached_tokens=0)
            await self.outcome(report, *BROKEN)
            await asyncio.sleep(self.dice.random() * 0.02)
        if self.dice.random() < 0.1:
            return
        rid = new_id()
        ends = [await self.outcome(self.plane.release(sid, token, request_id=rid), *BROKEN) for _ in range(2)]
        assert any(end not in BROKEN for end in ends)
        self.served += 1

    async def outcome(self, call: Any, *expected: grpc.StatusCode) -> Any:
        """The answer of a call, or its status where it failed in one of the expected ways."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() not in expected:
                raise
            return error.code()


@pytest.mark.parametrize("seed", [1, 2])
async def test_traffic_leaves_nothing_behind(
    planes: Any, backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who gave up between two tries keeps a place in the queue; here not for half a minute.
    monkeypatch.setattr(admissions, "_PATIENCE_MS", 2_000)
    running = await planes(2, capped(CAP))
    traffic = Traffic(backend, list(running), seed)
    async with asyncio.timeout(90):
        around = [asyncio.create_task(traffic.engines()), asyncio.create_task(traffic.watch_caps())]
        callers = asyncio.gather(*(traffic.caller(f"c{n}") for n in range(CALLERS)))
        await asyncio.sleep(1.0)
        lost = traffic.planes.pop()
        await lost.crash()
        await callers
        assert traffic.served > CALLERS

        async def nobody_is_left() -> bool:
            return not (await running[0].books()).sessions

        await eventually(nobody_is_left, within=30)
        for task in around:
            task.cancel()
        ended = await asyncio.gather(*around, return_exceptions=True)
    assert all(isinstance(e, asyncio.CancelledError) for e in ended), ended
    books = await running[0].books()
    assert books.counter("adm", "a") == books.counter("rel", "a") >= traffic.served
    assert all(row.get("blocks", "0") == "0" for row in books.instances.values())
    assert (books.counter("act", "a"), books.counter("held", "a"), books.counter("blk", "a")) == (0, 0, 0)
    assert (books.queues, books.leases, books.held) == ({}, {}, {})
