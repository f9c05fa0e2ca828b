"""A small control plane in memory, served over real gRPC, that keeps the contract and can be told to misbehave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc

T = TypeVar("T")


def seconds(value: float) -> Duration:
    """A Duration."""
    return Duration(nanos=int(value * 1e9)) if value < 1 else Duration(seconds=int(value))


def fail(context: Any, code: grpc.StatusCode, reason: str = "", *details: Message, pushback: str = "") -> None:
    """Aborts with google.rpc.Status, the way the server does."""
    status = status_pb2.Status(code=code.value[0], message=f"failed as {reason or code.name}")
    info = error_details_pb2.ErrorInfo(reason=reason, domain="moorage.v1", metadata={"session_id": "s"})
    for detail in ([info] if reason else []) + list(details):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    trailers = [("grpc-status-details-bin", status.SerializeToString())]
    if pushback:
        trailers.append(("grpc-retry-pushback-ms", pushback))
    context.set_trailing_metadata(trailers)
    context.abort(code, status.message)


@dataclass
class Living:
    """An admitted session."""

    token: str
    endpoint: str = "http://engine-0"
    progress: list[pb.SessionProgress] = field(default_factory=list)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Admits up to `capacity` sessions and holds the rest. Every request is kept, by method."""

    def __init__(self) -> None:
        self.capacity = 1_000_000
        self.lease_ttl = 30.0
        self.retry_after = 0.01
        self.rejection: pb.Hold | None = None
        self.next_interval: float | None = None
        self.living: dict[str, Living] = {}
        self.held: set[str] = set()
        self.answers: dict[str, Any] = {}
        self.moves: dict[str, str] = {}
        self.homeless: set[str] = set()
        self.before: dict[str, list[Callable[[Any, Any], Any]]] = defaultdict(list)
        self.after: dict[str, list[Callable[[Any, Any], Any]]] = defaultdict(list)
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.metadata: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self._issued: Counter[str] = Counter()

    # --- what tests say and ask

    def fail_next(self, method: str, times: int, code: grpc.StatusCode, reason: str = "", *details: Message) -> None:
        """The next calls of `method` fail before they do anything."""
        self.before[method] += [lambda request, context: fail(context, code, reason, *details)] * times

    def fail_always(self, code: grpc.StatusCode) -> None:
        """Every call of every method fails."""
        for method in ("Admit", "Place", "Release", "Heartbeat"):
            self.fail_next(method, 10_000, code)

    def lose_next_answer(self, method: str, times: int = 1) -> None:
        """The next calls of `method` take effect, but the caller sees UNAVAILABLE."""
        self.after[method] += [lambda request, context: fail(context, grpc.StatusCode.UNAVAILABLE)] * times

    @contextmanager
    def gate(self, method: str, *, after: bool = False, times: int = 1) -> Iterator[threading.Event]:
        """The next calls of `method` wait here, before or after they take effect; the event says that one came."""
        arrived, opened = threading.Event(), threading.Event()

        def wait(request: Any, context: Any) -> None:
            arrived.set()
            opened.wait(10)

        hooks = (self.after if after else self.before)[method]
        hooks += [wait] * times
        try:
            yield arrived
        finally:
            opened.set()

    def move(self, session_id: str, endpoint: str) -> None:
        """The session's next Place gives it a new home and a new token."""
        self.moves[session_id] = endpoint

    def evict(self, session_id: str) -> None:
        """Ends the session from outside."""
        with self.changed:
            self.living.pop(session_id)
            self.changed.notify_all()

    def grow(self, capacity: int) -> None:
        """More sessions fit."""
        with self.changed:
            self.capacity = capacity
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], Any], timeout: float = 5.0) -> None:
        """Until the condition holds; fails after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, "the condition never held"
            time.sleep(0.002)

    def outcomes(self, session_id: str) -> list[str]:
        """Outcomes of the releases of a session, in order."""
        return [pb.Outcome.Name(r.outcome)[8:] for r in self.calls["Release"] if r.session_id == session_id]

    def progress(self, session_id: str) -> list[pb.SessionProgress]:
        """Progress reported of a session, in order."""
        return [s for r in list(self.calls["Heartbeat"]) for s in r.sessions if s.session_id == session_id]

    # --- the service

    def Admit(self, request: pb.AdmitRequest, context: Any) -> pb.AdmitResponse:
        self._enter("Admit", request, context)
        end = time.monotonic() + request.max_wait.ToTimedelta().total_seconds()
        context.add_callback(self._wake)
        if self.rejection is not None:
            return pb.AdmitResponse(decision=pb.DECISION_REJECT, hold=self.rejection)
        with self.changed:
            answer: pb.AdmitResponse | None = self.answers.get(request.request_id)
            while answer is None and request.session_id not in self.living and len(self.living) >= self.capacity:
                self.held.add(request.session_id)
                if not context.is_active():
                    self.held.discard(request.session_id)
                    return pb.AdmitResponse()
                if (left := end - time.monotonic()) <= 0:
                    answer = pb.AdmitResponse(decision=pb.DECISION_HOLD, hold=self._hold())
                    break
                self.changed.wait(left)
            if answer is None:
                answer = self._admitted(request)
        return self._leave("Admit", request, context, answer)

    def Place(self, request: pb.PlaceRequest, context: Any) -> pb.PlaceResponse:
        self._enter("Place", request, context)
        with self.changed:
            answer: pb.PlaceResponse | None = self.answers.get(request.request_id)
            if answer is None:
                living = self._check(request, context)
                if self.rejection is not None:
                    return pb.PlaceResponse(decision=pb.DECISION_REJECT, hold=self.rejection)
                if request.session_id in self.homeless:
                    answer = pb.PlaceResponse(decision=pb.DECISION_HOLD, hold=self._hold())
                else:
                    answer = self.answers[request.request_id] = self._placed(request.session_id, living)
        return self._leave("Place", request, context, answer)

    def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self._enter("Release", request, context)
        with self.changed:
            answer: pb.ReleaseResponse | None = self.answers.get(request.request_id)
            if answer is None:
                released = request.session_id in self.held or request.session_id in self.living
                if request.session_id in self.living:
                    self._check(request, context)
                    del self.living[request.session_id]
                self.held.discard(request.session_id)
                answer = pb.ReleaseResponse(released=released, residency=pb.Residency(block_seconds=12.5))
                self.answers[request.request_id] = answer
                self.changed.notify_all()
        return self._leave("Release", request, context, answer)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        self._enter("Heartbeat", request, context)
        answer = pb.HeartbeatResponse()
        if self.next_interval is not None:
            answer.next_interval.CopyFrom(seconds(self.next_interval))
        with self.changed:
            for item in request.sessions:
                living = self.living.get(item.session_id)
                valid = item.context_tokens <= 2**40
                known = valid and living is not None and living.token == item.lease_token
                reason = "" if known else "LEASE_STALE" if valid else "context_tokens is above 2^40"
                answer.sessions.add(session_id=item.session_id, known=known, reason=reason)
                if known:
                    answer.sessions[-1].lease.ttl.CopyFrom(seconds(self.lease_ttl))
        return self._leave("Heartbeat", request, context, answer)

    # --- parts

    def _enter(self, method: str, request: Any, context: Any) -> None:
        self.calls[method].append(request)
        self.metadata += context.invocation_metadata()
        if self.before[method]:
            self.before[method].pop(0)(request, context)

    def _leave(self, method: str, request: Any, context: Any, answer: T) -> T:
        if self.after[method]:
            self.after[method].pop(0)(request, context)
        return answer

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _hold(self) -> pb.Hold:
        return pb.Hold(
            reason=pb.HOLD_REASON_KV_BUDGET, retry_after=seconds(self.retry_after), position=1, detail="no room"
        )

    def _admitted(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        self.held.discard(request.session_id)
        living = self.living.get(request.session_id) or Living(self._token(request.session_id))
        self.living[request.session_id] = living
        answer = pb.AdmitResponse(
            decision=pb.DECISION_PLACE,
            placement=pb.Placement(instance_id=living.endpoint[7:], endpoint=living.endpoint),
            lease=pb.Lease(token=living.token, ttl=seconds(self.lease_ttl)),
            workload_class=request.workload_class or "inferred",
        )
        self.answers[request.request_id] = answer
        return answer

    def _placed(self, session_id: str, living: Living) -> pb.PlaceResponse:
        endpoint = self.moves.pop(session_id, None)
        if endpoint is not None:
            living.endpoint, living.token = endpoint, self._token(session_id)
        return pb.PlaceResponse(
            decision=pb.DECISION_PLACE,
            placement=pb.Placement(instance_id=living.endpoint[7:], endpoint=living.endpoint),
            lease=pb.Lease(token=living.token, ttl=seconds(self.lease_ttl)),
            moved=endpoint is not None,
        )

    def _check(self, request: Any, context: Any) -> Living:
        living = self.living.get(request.session_id)
        if living is None:
            fail(context, grpc.StatusCode.NOT_FOUND, "SESSION_UNKNOWN")
        elif not request.lease_token:
            fail(context, grpc.StatusCode.INVALID_ARGUMENT, "LEASE_TOKEN_REQUIRED")
        elif living.token != request.lease_token:
            fail(context, grpc.StatusCode.ABORTED, "LEASE_STALE")
        assert living is not None
        return living

    def _token(self, session_id: str) -> str:
        self._issued[session_id] += 1
        return f"{session_id}-token-{self._issued[session_id]}"


async def until(condition: Callable[[], Any], timeout: float = 5.0) -> None:
    """Until the condition holds, with the event loop free; fails after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 (it comes true on the server's threads)
            await asyncio.sleep(0.002)


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits for it; fails unless it ends cancelled."""
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    assert done
    assert task.cancelled()


@contextmanager
def serve(fake: FakeScheduler, *, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """Serves it on a free port of the loopback; yields HOST:PORT."""
    pool = futures.ThreadPoolExecutor(max_workers=32)
    server = grpc.server(pool, options=(("grpc.so_reuseport", 0),))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    anywhere = "127.0.0.1:0"
    port = server.add_secure_port(anywhere, credentials) if credentials else server.add_insecure_port(anywhere)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
        fake.grow(1_000_000)
        pool.shutdown()
