"""What the interceptor does for a unary call, for each call of a stream: lets it in, counts it, logs it, traces it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import grpc

from moorage_server.api.callers import Caller
from moorage_server.api.decision_log import DecisionLog
from moorage_server.api.errors import code_of
from moorage_server.api.guard import Guard, check
from moorage_server.api.rpc_stats import RpcStats
from moorage_server.api.validation import pool_of
from moorage_server.errors import MoorageFailure
from moorage_server.meters import Meters

_SCHEDULER = "/moorage.v1.SchedulerService/"
#: The methods that the kinds of items are calls of.
METHODS = {
    "admit": _SCHEDULER + "Admit",
    "place": _SCHEDULER + "Place",
    "release": _SCHEDULER + "Release",
    "progress": _SCHEDULER + "Heartbeat",
}
#: Methods that answer with a decision.
DECIDING = frozenset({METHODS["admit"], METHODS["place"]})
_DISPATCH = _SCHEDULER + "Dispatch"


class Tracer(Protocol):
    """What makes spans of calls."""

    def traced(self, method: str, call: Any) -> Any:
        """``call`` of a unary method, in a span."""
        ...

    def seen(self, request: Any) -> None:
        """The request of the call under way is decoded."""
        ...

    def began(self, method: str, request: Any, metadata: Any) -> Any:
        """A span of its own for one call of a stream."""
        ...

    def within(self, span: Any) -> AbstractContextManager[Any]:
        """Makes what happens inside part of the span."""
        ...

    def ended(self, span: Any, response: Any, code: grpc.StatusCode) -> None:
        """The call is answered; ``response`` None where it failed."""
        ...


class Item:
    """One call of a stream. ``kind`` '' is that of an item without a call."""

    __slots__ = (
        "answered", "id", "kind", "method", "request", "result", "running", "session", "span", "started", "task",
        "waits_since",
    )  # fmt: skip

    def __init__(self, number: int, kind: str, request: Any) -> None:
        self.id = number
        self.kind = kind
        self.method = METHODS.get(kind, _DISPATCH)
        self.request = request
        #: Pool and session that it is about.
        self.session = ("", "")
        if kind:
            self.session = (pool_of(request), (request.session if kind == "progress" else request).session_id)
        self.started = perf_counter()
        self.span: Any = None
        self.running = False
        self.answered = False
        #: Where its answer is put together.
        self.result: Any = None
        #: When it began to wait for its turn, on the clock of ``started``.
        self.waits_since: float | None = None
        #: Where it is carried out alone, and may be cancelled.
        self.task: Any = None

    @property
    def waiting(self) -> bool:
        """Whether it waits for its turn, or did until it was answered."""
        return self.waits_since is not None

    def wait(self) -> None:
        """It begins to wait for its turn."""
        self.waits_since = perf_counter()


class ItemCalls:
    """The calls of one stream."""

    def __init__(
        self,
        stats: RpcStats,
        decisions: DecisionLog,
        meters: Meters,
        guard: Guard | None,
        caller: Caller | None,
        tracer: Tracer | None,
        context: Any,
    ) -> None:
        self._stats = {method: stats.of(method) for method in (*METHODS.values(), _DISPATCH)}
        self._decisions = decisions
        self._meters = meters
        self._guard = guard
        #: As of the last frame.
        self.caller = caller
        self._tracer = tracer
        self._context = context
        self._metadata = context.invocation_metadata() if tracer is not None else ()

    def begin(self, item: Item) -> None:
        """A call comes in. Raises RateLimited, or Forbidden where the caller may not make it."""
        self._stats[item.method].under_way += 1
        if self._tracer is not None:
            item.span = self._tracer.began(item.method, item.request, self._metadata)
        if self._guard is not None and self.caller is not None:
            self._guard.count(self.caller, item.method, self._context)
            # The roles are those of the stream; Heartbeat's are asked by its fields, which a report has not.
            check(self.caller, _DISPATCH if item.kind == "progress" else item.method, item.request)

    def within(self, item: Item) -> AbstractContextManager[Any]:
        """Makes what happens inside part of the call's trace."""
        return nullcontext() if self._tracer is None else self._tracer.within(item.span)

    def end(self, item: Item, response: Any, failure: MoorageFailure | None) -> None:
        """A call is answered, with one or the other."""
        seconds = (perf_counter() if item.waits_since is None else item.waits_since) - item.started
        code = grpc.StatusCode.OK if failure is None else code_of(failure)
        stats = self._stats[item.method]
        stats.under_way -= 1
        stats.observe(code, seconds)
        if self._tracer is not None:
            self._tracer.ended(item.span, response, code)
        if response is None:
            return
        if item.method in DECIDING:
            count_decision(self._meters, item.method, item.request, response)
        caller = None if self.caller is None else self.caller.name
        self._decisions.observe(item.method, item.request, response, 1000 * seconds, caller)


class Frames:
    """The frames of a stream, and what is to be done for each call in them."""

    def __init__(self, frames: AsyncIterator[Any], calls: ItemCalls) -> None:
        self.calls = calls
        self._frames = frames

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._frames


def count_decision(meters: Meters, method: str, request: Any, response: Any) -> None:
    """Counts an answer of Admit or Place."""
    reason = response.hold.reason if response.HasField("hold") else 0
    pool = meters.pools.of(pool_of(request))
    meters.decisions[pool, method.rpartition("/")[2], response.decision, reason] += 1
