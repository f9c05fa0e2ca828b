"""The client's stream: what travels together, what is asked again, what a caller that leaves takes with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2

from moorage import (
    AsyncClient,
    AsyncDispatch,
    DeadlineExceeded,
    InvalidArgument,
    LeaseLost,
    MoorageError,
    SessionProgress,
    Unauthenticated,
    Unavailable,
    credentials,
)
from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc
from tests.unit.client.fake_scheduler import cancel, until


class FakeStreams(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers each item with its session's id as token. ``script`` says otherwise, frame by frame."""

    def __init__(self) -> None:
        self.frames: list[pb.DispatchRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.opened = self.ended = 0
        #: Called with each frame and the call; answers the results, or None for the usual ones.
        self.script: Callable[[pb.DispatchRequest, Any], Any] | None = None

    async def Dispatch(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.DispatchResponse]:
        self.opened += 1
        self.metadata.append(dict(context.invocation_metadata()))
        async for frame in request_iterator:
            self.frames.append(frame)
            results = None if self.script is None else await self.script(frame, context)
            if results is None:
                results = [self.answer(item) for item in frame.items]
            yield pb.DispatchResponse(results=results)
        self.ended += 1

    def answer(self, item: pb.DispatchItem) -> pb.DispatchResult:
        kind = item.WhichOneof("call")
        request = getattr(item, kind)
        if kind == "progress":
            return pb.DispatchResult(
                id=item.id, progress=pb.SessionAck(session_id=request.session.session_id, known=True)
            )
        if kind == "release":
            return pb.DispatchResult(id=item.id, release=pb.ReleaseResponse(released=True))
        answer = pb.AdmitResponse if kind == "admit" else pb.PlaceResponse
        return pb.DispatchResult(id=item.id, **{kind: answer(lease=pb.Lease(token=request.session_id))})

    @property
    def items(self) -> list[pb.DispatchItem]:
        return [item for frame in self.frames for item in frame.items]


def failed(number: int, code: grpc.StatusCode, reason: str, *details: Any) -> pb.DispatchResult:
    error = pb.CallError(code=code.value[0], message="no")
    for detail in (error_details_pb2.ErrorInfo(reason=reason, domain="moorage.v1"), *details):
        packed = AnyMessage()
        packed.Pack(detail)
        error.details.append(packed)
    return pb.DispatchResult(id=number, error=error)


@pytest.fixture
async def streams() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
async def address(streams: FakeStreams) -> AsyncIterator[str]:
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(streams, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def stream(address: str) -> AsyncIterator[AsyncDispatch]:
    async with AsyncClient(address, pool="p", timeout=5.0) as client, client.dispatch() as made:
        yield made


async def test_what_is_asked_together_travels_together(streams: FakeStreams, stream: AsyncDispatch) -> None:
    admits = await asyncio.gather(*(stream.admit(f"s{n}", prompt_tokens=n) for n in range(20)))
    assert [answer.lease.token for answer in admits] == [f"s{n}" for n in range(20)]
    assert [len(frame.items) for frame in streams.frames] == [20]
    assert len({item.admit.request_id for item in streams.items}) == 20
    assert {item.admit.pool for item in streams.items} == {"p"}
    assert streams.opened == 1


async def test_each_call_is_the_unary_calls_request(streams: FakeStreams, stream: AsyncDispatch) -> None:
    await stream.admit("s", max_wait=1.5, pool="q", request_id="r", workload_class="c", lease_ttl=2)
    await stream.place("s", lease_token="t", turn=0, prompt_tokens=7, prefix_hashes=[1], max_wait=2)
    await stream.report(SessionProgress(session_id="s", lease_token="t", turn=3))
    assert (await stream.release("s", lease_token="t", outcome="ABORTED")).released
    admit, place, report, release = streams.items
    assert (admit.admit.pool, admit.admit.request_id, admit.admit.workload_class) == ("q", "r", "c")
    assert admit.admit.max_wait.ToTimedelta().total_seconds() == 1.5
    assert (place.place.lease_token, place.place.HasField("turn"), list(place.place.prefix_hashes)) == ("t", True, [1])
    assert (report.progress.pool, report.progress.session.turn) == ("p", 3)
    assert release.release.outcome == pb.OUTCOME_ABORTED


async def test_a_frame_has_room_for_so_many_calls(streams: FakeStreams, stream: AsyncDispatch) -> None:
    hashes = list(range(16_384))
    await asyncio.gather(*(stream.place(f"s{n}", lease_token="t") for n in range(1_200)))
    assert max(len(frame.items) for frame in streams.frames) == 500
    streams.frames.clear()
    await asyncio.gather(*(stream.place(f"s{n}", lease_token="t", prefix_hashes=hashes) for n in range(40)))
    assert max(frame.ByteSize() for frame in streams.frames) < 2_200_000
    assert len(streams.items) == 40


async def test_an_error_is_the_unary_calls_error(streams: FakeStreams, stream: AsyncDispatch) -> None:
    bad = error_details_pb2.BadRequest(
        field_violations=[error_details_pb2.BadRequest.FieldViolation(field="turn", description="no")]
    )

    async def script(frame: pb.DispatchRequest, context: Any) -> Any:
        (item,) = frame.items
        if item.place.session_id == "stale":
            return [failed(item.id, grpc.StatusCode.ABORTED, "LEASE_STALE")]
        return [failed(item.id, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", bad)]

    streams.script = script
    with pytest.raises(LeaseLost):
        await stream.place("stale", lease_token="t")
    with pytest.raises(InvalidArgument) as caught:
        await stream.place("s", lease_token="t")
    assert (caught.value.reason, caught.value.code) == ("INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT)
    assert [violation.field for violation in caught.value.field_violations] == ["turn"]
    assert len(streams.items) == 2, "neither is tried again"


async def test_what_is_unavailable_is_asked_again_under_the_same_id(
    streams: FakeStreams, stream: AsyncDispatch
) -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(10)

    async def script(frame: pb.DispatchRequest, context: Any) -> Any:
        if len(streams.frames) < 3:
            return [failed(item.id, grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", retry) for item in frame.items]
        return None

    streams.script = script
    assert (await stream.admit("s")).lease.token == "s"
    assert len(streams.items) == 3
    assert len({item.admit.request_id for item in streams.items}) == 1
    streams.frames.clear()
    streams.script = lambda frame, context: script_of_outage(frame, retry)
    with pytest.raises(Unavailable) as caught:
        await stream.admit("t")
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert len(streams.items) == 5


async def script_of_outage(frame: pb.DispatchRequest, retry: Any) -> Any:
    return [failed(item.id, grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", retry) for item in frame.items]


async def test_a_broken_stream_is_opened_anew_and_nothing_is_lost(streams: FakeStreams, stream: AsyncDispatch) -> None:
    async def script(frame: pb.DispatchRequest, context: Any) -> Any:
        if streams.opened == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going")
        return None

    streams.script = script
    answers = await asyncio.gather(*(stream.place(f"s{n}", lease_token="t") for n in range(5)))
    assert [answer.lease.token for answer in answers] == [f"s{n}" for n in range(5)]
    assert streams.opened == 2
    ids = [item.place.request_id for item in streams.items]
    assert sorted(ids[:5]) == sorted(ids[5:])


async def test_a_refused_stream_fails_its_calls_at_once(streams: FakeStreams, stream: AsyncDispatch) -> None:
    async def script(frame: pb.DispatchRequest, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who")

    streams.script = script
    calls = (stream.admit("s"), stream.place("t", lease_token="t"))
    refused = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in refused] == [Unauthenticated] * 2
    assert streams.opened == 1


async def test_a_token_may_be_replaced_while_a_stream_lives(
    streams: FakeStreams, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "LOOK_EVERY", 0.0)
    good, file = "Bearer old", tmp_path / "token"

    async def script(frame: pb.DispatchRequest, context: Any) -> Any:
        if dict(context.invocation_metadata())["authorization"] != good:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who")
        return None

    streams.script = script
    file.write_text("old")
    async with AsyncClient(address, token_file=str(file)) as client, client.dispatch() as stream:
        await stream.admit("s")
        good = "Bearer newer"
        file.write_text("newer")
        assert (await stream.place("s", lease_token="t")).lease.token == "s"
        assert streams.opened == 2
        good = "Bearer another"
        with pytest.raises(Unauthenticated):
            await stream.place("s", lease_token="t")
        assert streams.opened == 3, "one that never was good is not tried again"


async def test_who_leaves_cancels_its_call_alone(streams: FakeStreams, stream: AsyncDispatch) -> None:
    async def script(frame: pb.DispatchRequest, context: Any) -> Any:
        return [streams.answer(item) for item in frame.items if item.WhichOneof("call") == "place"]

    streams.script = script
    waiting = asyncio.create_task(stream.admit("s", max_wait=60))
    await until(lambda: streams.items)
    await cancel(waiting)
    with pytest.raises(DeadlineExceeded):
        await stream.admit("t", timeout=0.05)
    assert (await stream.place("u", lease_token="t")).lease.token == "u"
    await until(lambda: [n for frame in streams.frames for n in frame.cancelled] == [1, 2])
    assert streams.opened == 1


async def test_a_stream_ends_in_order_and_is_closed_then(streams: FakeStreams, address: str) -> None:
    opened = asyncio.Event()

    async def script(frame: pb.DispatchRequest, context: Any) -> Any:
        await opened.wait()

    streams.script = script
    async with AsyncClient(address) as client:
        async with client.dispatch() as stream:
            asked = asyncio.create_task(stream.admit("s"))
            await until(lambda: streams.frames)
            asyncio.get_running_loop().call_later(0.05, opened.set)
        assert (await asked).lease.token == "s"
        await until(lambda: streams.ended == 1)
        with pytest.raises(MoorageError, match="closed"):
            await stream.admit("s")
        async with client.dispatch():
            assert streams.opened == 1, "a stream without calls is none"


async def test_a_stream_travels_with_the_token(streams: FakeStreams, address: str) -> None:
    async with AsyncClient(address, token="secret") as client, client.dispatch() as stream:
        await stream.admit("s")
    assert streams.metadata[0]["authorization"] == "Bearer secret"


async def test_nobody_is_there(nowhere: str) -> None:
    async with AsyncClient(nowhere, timeout=0.5) as client, client.dispatch() as stream:
        with pytest.raises(Unavailable):
            await stream.admit("s")
