"""All the ways a stream may end, and what becomes of the calls on it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest

from moorage.v1 import scheduler_pb2 as pb
from moorage_server import limits
from moorage_server.api import dispatch
from moorage_server.api.item_calls import Item
from tests.contract.plane import POOL, Plane, capped, eventually, new_id
from tests.contract.stream_calls import admit, held, info, is_gone, is_held, lives, place, release
from tests.contract.streams import Stream, item

Code = grpc.StatusCode


@pytest.fixture
async def plane(planes: Any) -> Plane:
    """A server with one instance that has room for two sessions."""
    (made,) = await planes(config=capped(2))
    await made.report()
    return made


async def test_a_half_close_waits_for_what_is_under_way(plane: Plane) -> None:
    stream = Stream(plane.stub)
    tokens = [await plane.placed(sid) for sid in ("one", "two")]
    (waiting,) = stream.send(admit("three", wait=30))
    await eventually(lambda: is_held(plane, "three"))
    closing = asyncio.create_task(stream.close())
    await asyncio.sleep(0.1)
    assert not closing.done()
    await plane.release("one", tokens[0])
    assert await closing is Code.OK
    assert (await stream.answer(waiting)).admit.decision == pb.DECISION_PLACE


async def test_a_stream_that_is_cut_leaves_nothing_behind(plane: Plane) -> None:
    stream = Stream(plane.stub)
    tokens = [await plane.placed(sid) for sid in ("one", "two")]
    stream.send(*(admit(f"w{n}", wait=30, request_id=new_id()) for n in range(5)))
    await eventually(lambda: held(plane, 5))
    await stream.cut()
    await eventually(lambda: held(plane, 0))
    await plane.release("one", tokens[0])
    await plane.placed("three")
    assert plane.control.desk(POOL).waiting == 0


async def test_what_a_cut_stream_held_needs_no_garbage_collector(plane: Plane) -> None:
    """A server's collector comes once in millions of objects: callers that come and go would fill the memory."""
    stream = Stream(plane.stub)
    for sid in ("one", "two"):
        await plane.placed(sid)
    (given_up, *_) = stream.send(*(admit(f"w{n}", wait=30) for n in range(20)))
    await eventually(lambda: held(plane, 20))
    gc.collect()
    gc.disable()
    try:
        stream.send(cancelled=(given_up,))
        assert (await stream.answer(given_up)).error.code == Code.CANCELLED.value[0]
        await stream.cut()
        await eventually(lambda: held(plane, 0))
        await eventually(no_items, 2.0)
    finally:
        gc.enable()


async def no_items() -> bool:
    return not any(isinstance(thing, Item) for thing in gc.get_objects())


async def test_an_admission_whose_answer_was_never_sent_is_taken_back(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def stuck(self: dispatch.DispatchStream) -> None:
        if self._out:
            await never.wait()

    monkeypatch.setattr(dispatch.DispatchStream, "_send", stuck)
    stream = Stream(plane.stub)
    stream.send(admit("s"))
    await eventually(lambda: lives(plane, "s"))
    await stream.cut()
    await eventually(lambda: is_gone(plane, "s"))


async def test_a_refused_frame_ends_the_stream_and_its_calls(plane: Plane) -> None:
    for sid in ("one", "two"):
        await plane.placed(sid)
    too_many = pb.DispatchRequest(items=[item(n, release(f"s{n}")) for n in range(limits.DISPATCH_ITEMS + 1)])
    twice = pb.DispatchRequest(items=[item(1, place("one", "t"))])
    for frame, field in ((too_many, "items"), (twice, "items.id")):
        stream = Stream(plane.stub)
        (waiting,) = stream.send(admit("three", wait=30))
        await eventually(lambda: is_held(plane, "three"))
        await stream.call.write(frame)
        assert await stream.ended() is Code.INVALID_ARGUMENT
        details = dict(await stream.call.trailing_metadata())["grpc-status-details-bin"]
        assert info(pb.CallError.FromString(details)).metadata["field"] == field
        assert [result for result in stream.answers if result.id == waiting] == []
        await eventually(lambda: is_gone(plane, "three"))


async def test_bytes_that_are_no_frame_end_the_stream(plane: Plane) -> None:
    call = plane._channel.stream_stream("/moorage.v1.SchedulerService/Dispatch")()
    await call.write(b"\xff\xff")
    assert await call.code() is Code.INVALID_ARGUMENT


async def test_a_drain_answers_what_is_under_way_and_says_go_on(plane: Plane) -> None:
    for sid in ("one", "two"):
        await plane.placed(sid)
    stream, idle = Stream(plane.stub), Stream(plane.stub)
    await idle.ask(place("nobody", "t"))
    (waiting,) = stream.send(admit("three", wait=30))
    await eventually(lambda: is_held(plane, "three"))
    plane.servicer.drain()
    assert await idle.ended() is Code.UNAVAILABLE
    details = dict(await idle.call.trailing_metadata())
    assert info(pb.CallError.FromString(details["grpc-status-details-bin"])).reason == "SERVER_DRAINING"
    assert details["grpc-retry-pushback-ms"] == "50"
    # It waits for its turn until the desks close.
    stream.send(place("one", "t"))
    await asyncio.sleep(0.1)
    assert stream.code is None
    await plane.control.desk(POOL).close()
    assert (await stream.answer(waiting)).admit.decision == pb.DECISION_HOLD
    assert await stream.ended() is Code.UNAVAILABLE
    assert [result.id for result in stream.answers] == [waiting]
    late = Stream(plane.stub)
    assert await late.ended() is Code.UNAVAILABLE
