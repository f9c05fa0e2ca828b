"""The one interceptor of the server: failures become statuses, calls are counted, decisions are logged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from time import perf_counter
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from moorage_server.api.decision_log import DecisionLog
from moorage_server.api.errors import abort_with, hidden
from moorage_server.api.guard import Guard, check, guarded
from moorage_server.api.item_calls import DECIDING, Frames, ItemCalls, Tracer, count_decision
from moorage_server.api.rpc_stats import MethodStats, RpcStats
from moorage_server.errors import InvalidField, MoorageFailure, NotSupported
from moorage_server.meters import Meters, waited_s

# In quotes: these are generic to type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

#: Health passes untouched, and so does reflection where there is no guard.
_OURS = "/moorage.v1."
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of moorage.v1.

    A MoorageFailure ends the call with its status. Any other exception is logged once, under a correlation id, and the
    caller learns that id and nothing else. A ``guard`` has its say before a request is even decoded; ``tracer`` gives
    every unary method a span.
    """

    def __init__(
        self,
        stats: RpcStats,
        decisions: DecisionLog,
        guard: Guard | None = None,
        meters: Meters | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._stats = stats
        self._decisions = decisions
        self._guard = guard
        self._meters = meters or Meters()
        self._tracer = tracer
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Answers the wrapped handler of the method; wrapping happens once per method."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(_OURS):
            return guarded(handler, method, self._guard) if handler and self._guard else handler
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self._wrap(method, handler))
        return known[1]

    def _wrap(self, method: str, handler: Handler) -> Handler:
        # Requests are decoded by the call itself: what a stranger sends is not worth the work.
        encoder = handler.response_serializer
        if handler.unary_unary is not None:
            unary = self._unary(method, handler)
            if self._tracer is not None:
                unary = self._tracer.traced(method, unary)
            return grpc.unary_unary_rpc_method_handler(unary, None, encoder)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler), None, encoder)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._frames(method, handler), None, encoder)
        return handler

    def _unary(self, method: str, handler: Handler) -> Any:
        stats, guard, tracer = self._stats.of(method), self._guard, self._tracer
        deciding = method in DECIDING
        behaviour: Any = handler.unary_unary

        async def call(data: bytes, context: Context) -> Any:
            caller = None
            async with _Call(method, stats, context) as this:
                if guard is not None:
                    caller = guard.enter(method, context)
                request = this.request = _decoded(handler, data)
                if caller is not None:
                    check(caller, method, request)
                if tracer is not None:
                    tracer.seen(request)
                response = await behaviour(request, context)
            if deciding:
                count_decision(self._meters, method, request, response)
            self._decisions.observe(
                method, request, response, this.milliseconds, None if caller is None else caller.name
            )
            return response

        return call

    def _stream(self, method: str, handler: Handler) -> Any:
        stats, guard = self._stats.of(method), self._guard
        behaviour: Any = handler.unary_stream

        async def call(data: bytes, context: Context) -> AsyncIterator[Any]:
            async with _Call(method, stats, context) as this:
                caller = guard.enter(method, context) if guard is not None else None
                request = this.request = _decoded(handler, data)
                if caller is not None:
                    check(caller, method, request)
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        if guard is not None:
                            # A stream may outlive its credential.
                            guard.recheck(method, context)
                        yield response

        return call

    def _frames(self, method: str, handler: Handler) -> Any:
        """A stream of calls: each is let in, counted, logged and traced by itself."""
        stats, guard = self._stats.of(method), self._guard
        behaviour: Any = handler.stream_stream

        async def call(data: AsyncIterator[bytes], context: Context) -> None:
            async with _Call(method, stats, context):
                caller = guard.enter(method, context) if guard is not None else None
                calls = ItemCalls(self._stats, self._decisions, self._meters, guard, caller, self._tracer, context)

                async def frames() -> AsyncIterator[Any]:
                    async for frame in data:
                        if guard is not None:
                            # A stream may outlive its credential, or what that grants.
                            calls.caller = guard.recheck(method, context)
                        yield _decoded(handler, frame)

                await behaviour(Frames(frames(), calls), context)

        return call


def _decoded(handler: Handler, data: bytes) -> Any:
    """The request in ``data``. gRPC's own answer to bytes that are none would be UNKNOWN, and a traceback."""
    decode = handler.request_deserializer
    try:
        return data if decode is None else decode(data)
    except DecodeError:
        raise InvalidField("request", "<bytes>", "a protobuf message of its type, its text UTF-8") from None


class _Call:
    """One call under way: turns its failure into a status, and counts it when it ends."""

    __slots__ = ("_context", "_method", "_started", "_stats", "milliseconds", "request")

    def __init__(self, method: str, stats: MethodStats, context: Context) -> None:
        self._method = method
        self._stats = stats
        self.request: Any = None
        self._context = context
        self._started = perf_counter()
        self.milliseconds = 0.0

    async def __aenter__(self) -> _Call:
        self._stats.under_way += 1
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if isinstance(error, MoorageFailure):
                await abort_with(self._context, error)
            elif isinstance(error, NotImplementedError) and self._code(None) is grpc.StatusCode.UNIMPLEMENTED:
                # What the generated base class does for a method that nobody wrote.
                await abort_with(self._context, NotSupported(self._method.rpartition("/")[2]))
            elif isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
                await abort_with(self._context, hidden(error, self._method.rpartition("/")[2], self.request))
        finally:
            seconds = perf_counter() - self._started
            self.milliseconds = seconds * 1000
            self._stats.under_way -= 1
            self._stats.observe(self._code(error), max(0.0, seconds - waited_s.get()))

    def _code(self, error: BaseException | None) -> grpc.StatusCode:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return grpc.StatusCode.CANCELLED
        code = self._context.code()
        return _STATUS_CODES[code] if isinstance(code, int) else code or grpc.StatusCode.OK
