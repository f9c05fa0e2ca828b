"""Sessions at a steady rate, to see what fails while servers come and go."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import Counter
from typing import Any

import grpc

from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc

#: Callers that each have a session at any time, a third of them waiting, and decisions per second of all together.
CALLERS, RATE = 72, 300.0
DEADLINE_S = 15.0


class Load:
    """Sessions that come, take turns, and go, at a steady rate, over one channel to all servers.

    Every call must be answered: ``failures`` says which were not.
    """

    def __init__(self, channel: grpc.aio.Channel, callers: int = CALLERS, rate: float = RATE) -> None:
        self._callers, self._rate = callers, rate
        self._name = uuid.uuid4().hex[:8]
        self._scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._numbers = itertools.count()
        self._due = time.monotonic()
        self.ending = False
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self) -> None:
        """Until told to end; then sessions end in order."""
        await asyncio.gather(*(self._caller() for _ in range(self._callers)))

    async def _caller(self) -> None:
        while not self.ending:
            try:
                await self._session(f"{self._name}-{next(self._numbers)}")
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")

    async def _session(self, session_id: str) -> None:
        admitted = await self._admit(session_id)
        for turn in range(1, 5):
            token = admitted.lease.token
            placed = await self._call("Place", pb.PlaceRequest, session_id=session_id, lease_token=token, turn=turn)
            assert placed.decision == pb.DECISION_PLACE, placed
            assert placed.placement.instance_id == admitted.placement.instance_id
        released = await self._call(
            "Release", pb.ReleaseRequest, session_id=session_id, lease_token=token, outcome=pb.OUTCOME_COMPLETED
        )
        assert released.released, session_id

    async def _admit(self, session_id: str) -> pb.AdmitResponse:
        """Asks until it is let in, as the client does: a server that ends answers HOLD to those who wait there."""
        while True:
            request = pb.AdmitRequest(session_id=session_id, workload_class="rlvr", prompt_tokens=64)
            request.max_context_tokens = 128
            request.max_wait.FromSeconds(5)
            answer: pb.AdmitResponse = await self._call("Admit", request)
            if answer.decision == pb.DECISION_PLACE:
                return answer
            await asyncio.sleep(answer.hold.retry_after.ToTimedelta().total_seconds())

    async def _call(self, rpc: str, request: Any, **fields: Any) -> Any:
        await self._turn()
        message = request(**fields) if fields else request
        message.request_id = str(uuid.uuid4())
        answer = await getattr(self._scheduler, rpc)(message, timeout=DEADLINE_S)
        self.answers[rpc] += 1
        return answer

    async def _turn(self) -> None:
        """Returns when the next call is due: what falls behind is not made up for."""
        now = time.monotonic()
        self._due = max(self._due + 1 / self._rate, now)
        await asyncio.sleep(self._due - now)
