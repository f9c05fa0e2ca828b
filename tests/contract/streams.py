"""One Dispatch stream as tests see it: frames by hand, or behind the face of the stub, so that tests of unary calls
hold for streams too."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from moorage.v1 import scheduler_pb2 as pb

CODES = {code.value[0]: code for code in grpc.StatusCode}


class Stream:
    """One stream; ``answers`` holds what came, in order."""

    def __init__(self, stub: Any, metadata: Any = (), *, gathers: bool = False) -> None:
        self.call: Any = stub.Dispatch(metadata=metadata)
        #: What is sent at the same time goes in one frame.
        self._gathers = gathers
        self.answers: list[pb.DispatchResult] = []
        self._numbers = itertools.count(1)
        self._came = asyncio.Event()
        # gRPC takes one write at a time, and ends the call of a writer that is cancelled.
        self._frames: asyncio.Queue[pb.DispatchRequest | None] = asyncio.Queue()
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())
        #: What the stream ended with, once it did.
        self.code: grpc.StatusCode | None = None

    async def _read(self) -> None:
        try:
            async for frame in self.call:
                assert frame.results
                self.answers += frame.results
                self._came.set()
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.code = await self.call.code()
            self._came.set()
            self._writing.cancel()

    async def _write(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (frame := await self._frames.get()) is not None:
                if self._gathers:
                    while not self._frames.empty():
                        frame.MergeFrom(self._frames.get_nowait() or pb.DispatchRequest())
                await self.call.write(frame)
            await self.call.done_writing()

    def send(self, *requests: Any, cancelled: tuple[int, ...] = ()) -> list[int]:
        """One frame; the ids of its items."""
        numbers = [next(self._numbers) for _ in requests]
        items = [item(n, request) for n, request in zip(numbers, requests, strict=True)]
        self._frames.put_nowait(pb.DispatchRequest(items=items, cancelled=cancelled))
        return numbers

    async def answer(self, number: int, within: float = 10.0) -> pb.DispatchResult:
        """The one answer to an item. AioRpcError with the stream's code where it ended without one."""
        async with asyncio.timeout(within):
            while True:
                found = [result for result in self.answers if result.id == number]
                if found:
                    (result,) = found
                    return result
                if self.code is not None:
                    raise _failed(pb.CallError(code=self.code.value[0], message=f"ended without an answer to {number}"))
                self._came.clear()
                await self._came.wait()

    async def ask(self, request: Any) -> pb.DispatchResult:
        """The answer to an item in a frame of its own."""
        (number,) = self.send(request)
        return await self.answer(number)

    async def ended(self, within: float = 10.0) -> grpc.StatusCode:
        """What the stream ends with."""
        async with asyncio.timeout(within):
            await asyncio.shield(self._reading)
        assert self.code is not None
        return self.code

    async def close(self) -> grpc.StatusCode:
        """Half-closes, and waits for the end."""
        self._frames.put_nowait(None)
        return await self.ended()

    async def cut(self) -> None:
        """Goes away without a word."""
        self.call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


def item(number: int, request: Any) -> pb.DispatchItem:
    """A request as an item of a stream."""
    kind = {
        pb.AdmitRequest: "admit",
        pb.PlaceRequest: "place",
        pb.ReleaseRequest: "release",
        pb.ProgressReport: "progress",
    }[type(request)]
    return pb.DispatchItem(id=number, **{kind: request})


class StreamStub:
    """A SchedulerServiceStub whose calls go over one stream; progress of a Heartbeat too, its other items do not."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.Dispatch = stub.Dispatch
        self._stream: Stream | None = None

    def Admit(self, request: Any, timeout: float | None = None) -> StreamCall:
        return StreamCall(self, "admit", request, timeout)

    def Place(self, request: Any, timeout: float | None = None) -> StreamCall:
        return StreamCall(self, "place", request, timeout)

    def Release(self, request: Any, timeout: float | None = None) -> StreamCall:
        return StreamCall(self, "release", request, timeout)

    async def Heartbeat(self, request: pb.HeartbeatRequest, timeout: float | None = None) -> pb.HeartbeatResponse:
        reports = list(request.sessions)
        if request.instances or request.prefixes or not reports:
            answer: pb.HeartbeatResponse = await self._stub.Heartbeat(request, timeout=timeout)
            return answer
        calls = [StreamCall(self, "progress", pb.ProgressReport(pool=request.pool, session=r), None) for r in reports]
        return pb.HeartbeatResponse(sessions=[await call for call in calls])

    def stream(self) -> Stream:
        """The stream at hand, a new one where the last has ended."""
        if self._stream is None or self._stream.code is not None:
            self._stream = Stream(self._stub, gathers=True)
        return self._stream


class StreamCall:
    """One call, as a unary one looks to its caller."""

    def __init__(self, stub: StreamStub, kind: str, request: Any, timeout: float | None) -> None:
        self._kind, self._request, self._timeout = kind, request, timeout
        self._task = asyncio.create_task(self._run(stub))

    def __await__(self) -> Generator[Any, None, Any]:
        return self._task.__await__()

    def cancel(self) -> bool:
        return self._task.cancel()

    def cancelled(self) -> bool:
        return self._task.cancelled()

    async def code(self) -> grpc.StatusCode:
        try:
            await self._task
        except grpc.aio.AioRpcError as error:
            return error.code()
        except asyncio.CancelledError:
            return grpc.StatusCode.CANCELLED
        return grpc.StatusCode.OK

    async def _run(self, stub: StreamStub) -> Any:
        stream = stub.stream()
        (number,) = stream.send(self._request)
        try:
            result = await stream.answer(number, 60.0 if self._timeout is None else self._timeout)
        except asyncio.CancelledError:
            stream.send(cancelled=(number,))
            raise
        except TimeoutError:
            stream.send(cancelled=(number,))
            raise _failed(pb.CallError(code=grpc.StatusCode.DEADLINE_EXCEEDED.value[0])) from None
        if result.HasField("error"):
            raise _failed(result.error)
        return getattr(result, self._kind)


def _failed(error: pb.CallError) -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", error.SerializeToString()))
    return grpc.aio.AioRpcError(CODES[error.code], grpc.aio.Metadata(), trailers, error.message)
