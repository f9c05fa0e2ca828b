"""Many calls over one stream, for routers: what is asked in the same turn of the event loop travels together."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import grpc
import grpc.aio

from moorage.errors import (
    DeadlineExceeded,
    MoorageError,
    Unauthenticated,
    Unavailable,
    from_call_error,
    from_rpc_error,
)
from moorage.messages import AdmitFields, OutcomeLike, admit_request, place_request, release_request
from moorage.v1.scheduler_pb2 import (
    AdmitResponse,
    DispatchRequest,
    DispatchResponse,
    DispatchResult,
    PlaceResponse,
    ProgressReport,
    ReleaseResponse,
    SessionAck,
    SessionProgress,
    Usage,
)

#: Most calls, and bytes of them, in one frame: the server takes 1,000 and 4 MiB.
_FRAME_CALLS, _FRAME_BYTES = 500, 2_000_000
#: How often a call is tried while the control plane is away, as unary calls are; first and longest pause, seconds.
_TRIES, _PAUSE_S, _MOST_PAUSE_S = 5, 0.2, 2.0

# In quotes: generic to type checkers only.
_GrpcStream: TypeAlias = "grpc.aio.StreamStreamCall[DispatchRequest, DispatchResponse]"


class AsyncDispatch:
    """Admit, Place, Release and progress reports over one stream; `AsyncClient.dispatch` makes it.

    Answers, errors and arguments are those of the client's unary calls, at a fraction of their cost: what many
    coroutines ask in the same turn of the loop goes in one message, and the server carries it out in one round trip.
    Calls of one session are carried out in the order they were made. A coroutine that is cancelled, or whose time is
    over, cancels its call alone.

    A stream that breaks is opened anew, with the token as it is then, and what was not answered is asked again under
    the same `request_id`, so that nothing happens twice. Leases are the caller's to keep: each Place and each report
    renews its session's.

    Example:
        >>> async with client.dispatch() as stream:  # doctest: +SKIP
        ...     admitted = await stream.admit("sess-1", workload_class="rlvr", prompt_tokens=156, max_wait=60)
        ...     token = admitted.lease.token
        ...     placed = await stream.place("sess-1", lease_token=token, turn=1, prompt_tokens=420)
        ...     await stream.release("sess-1", lease_token=token, outcome="COMPLETED")
    """

    def __init__(self, open_stream: Callable[[], _GrpcStream], pool: str, timeout: float) -> None:
        self._open = open_stream
        self._pool = pool
        self._timeout = timeout
        self._stream: _Stream | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Waits for the answers to what was asked, as long as a call may take, and ends the stream."""
        self._closed = True
        if self._stream is not None:
            await self._stream.close(self._timeout)

    async def admit(
        self,
        session_id: str,
        *,
        max_wait: float = 0.0,
        pool: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        **fields: Unpack[AdmitFields],
    ) -> AdmitResponse:
        """As `AsyncClient.admit`."""
        request = admit_request(pool or self._pool, session_id, fields, max_wait=max_wait, request_id=request_id)
        answer: AdmitResponse = await self.call("admit", request, max_wait + (timeout or self._timeout))
        return answer

    async def place(
        self,
        session_id: str,
        *,
        lease_token: str,
        turn: int | None = None,
        prompt_tokens: int | None = None,
        prefix_hashes: Sequence[int] = (),
        max_wait: float = 0.0,
        pool: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> PlaceResponse:
        """As `AsyncClient.place`."""
        request = place_request(
            pool or self._pool,
            session_id,
            lease_token=lease_token,
            turn=turn,
            prompt_tokens=prompt_tokens,
            prefix_hashes=prefix_hashes,
            max_wait=max_wait,
            request_id=request_id,
        )
        answer: PlaceResponse = await self.call("place", request, max_wait + (timeout or self._timeout))
        return answer

    async def release(
        self,
        session_id: str,
        *,
        outcome: OutcomeLike,
        lease_token: str = "",
        usage: Usage | None = None,
        pool: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> ReleaseResponse:
        """As `AsyncClient.release`."""
        request = release_request(
            pool or self._pool,
            session_id,
            outcome=outcome,
            lease_token=lease_token,
            usage=usage,
            request_id=request_id,
        )
        answer: ReleaseResponse = await self.call("release", request, timeout or self._timeout)
        return answer

    async def report(
        self, progress: SessionProgress, *, pool: str | None = None, timeout: float | None = None
    ) -> SessionAck:
        """Reports how far a session got, and renews its lease. As one of `AsyncClient.heartbeat`'s sessions."""
        request = ProgressReport(pool=pool or self._pool, session=progress)
        answer: SessionAck = await self.call("progress", request, timeout or self._timeout)
        return answer

    async def call(self, kind: str, request: Any, timeout: float) -> Any:
        """Makes one call, and tries again while UNAVAILABLE. `kind` names the request's field in DispatchItem.

        Raises MoorageError, as the unary calls do; DeadlineExceeded after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + timeout, _PAUSE_S
        for attempt in itertools.count(1):
            try:
                result = await self._ask(kind, request, until - loop.time())
                break
            except DeadlineExceeded:
                raise
            except Unavailable as error:
                wait = random.uniform(0.5, 1.0) * pause if error.retry_after is None else error.retry_after
                if attempt == _TRIES or loop.time() + wait >= until:
                    raise
            await asyncio.sleep(wait)
            pause = min(2 * pause, _MOST_PAUSE_S)
        return getattr(result, kind)

    async def _ask(self, kind: str, request: Any, timeout: float) -> DispatchResult:
        if self._closed:
            raise MoorageError("the stream is closed")
        if self._stream is None or self._stream.over:
            self._stream = _Stream(self._open())
        stream = self._stream
        number, answer = stream.ask(kind, request)
        try:
            async with asyncio.timeout(timeout):
                result = await answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer within {timeout:.1f} s", code=grpc.StatusCode.DEADLINE_EXCEEDED
            ) from None
        finally:
            stream.forget(number)
        if result.HasField("error"):
            raise from_call_error(result.error)
        return result


class _Stream:
    """One stream, what is to be sent on it, and who waits for answers."""

    def __init__(self, call: _GrpcStream) -> None:
        self._call = call
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[DispatchResult]] = {}
        self._frames: deque[DispatchRequest] = deque()
        self._bytes = 0
        self._more = asyncio.Event()
        self._closing = False
        #: Something was answered: its credential was good once.
        self._served = False
        #: No answers come any more.
        self.over = False
        self._reading = asyncio.create_task(self._read())
        self._writing = asyncio.create_task(self._write())

    def ask(self, kind: str, request: Any) -> tuple[int, asyncio.Future[DispatchResult]]:
        """Sends a call as soon as the loop turns; its number, and its answer to come."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        size = request.ByteSize()
        frame = self._frame(size)
        getattr(frame.items.add(id=number), kind).CopyFrom(request)
        self._bytes += size
        self._waiting[number] = answer
        return number, answer

    def forget(self, number: int) -> None:
        """Cancels a call, unless it is answered."""
        if self._waiting.pop(number, None) is not None and not self.over:
            self._frame(0).cancelled.append(number)

    async def close(self, timeout: float) -> None:
        """Ends the stream in order, within a time; what is not answered by then fails."""
        self._closing = True
        self._more.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._reading)
        for task in (self._writing, self._reading):
            task.cancel()
        await asyncio.gather(self._writing, self._reading, return_exceptions=True)

    def _frame(self, size: int) -> DispatchRequest:
        frame = self._frames[-1] if self._frames else None
        full = frame is not None and (
            len(frame.items) + len(frame.cancelled) >= _FRAME_CALLS or self._bytes + size > _FRAME_BYTES
        )
        if frame is None or full:
            frame, self._bytes = DispatchRequest(), 0
            self._frames.append(frame)
            self._more.set()
        return frame

    async def _write(self) -> None:
        # A stream that fails says why to its reader.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await self._more.wait()
                self._more.clear()
                while self._frames:
                    await self._call.write(self._frames.popleft())
                if self._closing:
                    await self._call.done_writing()
                    return

    async def _read(self) -> None:
        error = MoorageError("the stream is closed")
        try:
            async for frame in self._call:
                self._served = True
                for result in frame.results:
                    answer = self._waiting.pop(result.id, None)
                    if answer is not None and not answer.done():
                        answer.set_result(result)
            error = Unavailable("the server has ended the stream")
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
            if self._served and isinstance(error, Unauthenticated):
                # The token was replaced while the stream lived: the next stream takes the one that holds now.
                error = Unavailable(error.message, code=error.code, reason=error.reason, retry_after=0.0)
        finally:
            self.over = True
            self._writing.cancel()
            self._call.cancel()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)
                    # Whoever asked may be gone by now.
                    answer.exception()
            self._waiting.clear()
