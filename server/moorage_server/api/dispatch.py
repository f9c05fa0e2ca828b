"""Dispatch: many calls over one stream, carried out in few round trips to the store.

What is at hand of a pool when its last round is through goes in the next one: one script call for up to 64 turns, one
for as many ends, one for progress reports, all in one round trip. An Admit, or a Place whose home is lost, takes
several steps and may wait: it goes its own way, and holds nobody up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moorage.v1 import scheduler_pb2 as pb
from moorage_server import limits
from moorage_server.api import answers, calls, validation
from moorage_server.api.errors import call_error, hidden
from moorage_server.api.item_calls import Frames, Item, ItemCalls
from moorage_server.api.item_order import ItemOrder
from moorage_server.errors import CallCancelled, InvalidField, MoorageFailure, ServerDraining
from moorage_server.runtime.arrivals import Arrival
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.desk import Desk
from moorage_server.runtime.views import shows
from moorage_server.store.records import Placed, Turn

#: Calls of one stream that are carried out, or whose answers are not sent yet: beyond that nothing more is read.
MOST_CALLS = 2_000
#: Calls of one stream that wait for their turn: beyond that a call is answered at once that it is held.
MOST_WAITS = 10_000
#: Answers in one frame: of the longest ids, they stay below the smallest limit that a caller's gRPC has (4 MiB).
_RESULTS = 500
#: Items per script call: a script blocks the store while it runs.
_BATCH = 64

_VALIDATE: dict[str, Any] = {"admit": validation.admit, "place": validation.place, "release": validation.release}


@dataclass(slots=True)
class _Frame:
    """Answers that are not sent yet, and the arrivals to be taken back if they never are."""

    response: pb.DispatchResponse = field(default_factory=pb.DispatchResponse)
    placed: list[tuple[Desk, Arrival]] = field(default_factory=list)


class DispatchStream:
    """One stream: reads, keeps order per session, answers."""

    def __init__(self, control: ControlPlane, context: Any, item_calls: ItemCalls) -> None:
        self._control = control
        self._context = context
        self._calls = item_calls
        self._order = ItemOrder(self._start)
        self._items: dict[int, Item] = {}
        self._waiting = 0
        #: Per pool, what the next round takes. Where there is a list there is a task at work.
        self._next: dict[str, list[Item]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: deque[_Frame] = deque()
        self._sending: _Frame | None = None
        self._look = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = self._draining = self._cut_off = False

    def drain(self) -> None:
        """Reads no more: what was read is answered, then the stream ends."""
        self._draining = True
        self._look.set()

    async def run(self, frames: Frames) -> None:
        """Returns at the caller's half-close, once all is answered. Raises what else ends the stream.

        Cancelled, it cancels all calls that are under way.
        """
        reader = asyncio.create_task(self._read(frames))
        reader.add_done_callback(self._reader_ended)
        try:
            while True:
                await self._look.wait()
                self._look.clear()
                await self._send()
                if reader.done() and not self._ended:
                    # What came can not be understood, or its sender may not go on.
                    reader.result()
                if not self._items and not self._out and (self._ended or self._draining):
                    break
            if not self._ended:
                raise ServerDraining
        finally:
            reader.cancel()
            self._cut()

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            # Whoever waits for it looks at its failure; where nobody does, the stream is over anyway.
            reader.exception()
        self._look.set()

    async def _read(self, frames: Frames) -> None:
        async for frame in frames:
            if self._draining:
                # Nothing of it was begun: the caller sends it elsewhere.
                return
            self._take(frame)
            while len(self._items) - self._waiting + self._unsent() >= MOST_CALLS:
                self._room.clear()
                await self._room.wait()
        self._ended = True

    def _unsent(self) -> int:
        return sum(len(frame.response.results) for frame in self._out)

    def _take(self, frame: pb.DispatchRequest) -> None:
        count = len(frame.items) + len(frame.cancelled)
        if count > limits.DISPATCH_ITEMS:
            raise InvalidField("items", f"{count} items", f"at most {limits.DISPATCH_ITEMS} items and cancelled ids")
        for raw in frame.items:
            if raw.id in self._items:
                raise InvalidField("items.id", raw.id, "unlike those of calls that are not answered yet")
            kind = raw.WhichOneof("call") or ""
            request: Any = getattr(raw, kind) if kind else raw
            if kind in ("admit", "place") and request.HasField("max_wait"):
                request = _on_its_own(request)
            item = self._items[raw.id] = Item(raw.id, kind, request)
            try:
                self._check(item)
            except MoorageFailure as refusal:
                self._fail(item, refusal)
        for number in frame.cancelled:
            self._cancel(number)

    def _check(self, item: Item) -> None:
        self._calls.begin(item)
        if item.kind == "progress":
            validation.progress_report(item.request)
            bad = validation.progress(item.request.session)
            if bad is not None:
                ack = self._result(item).progress
                ack.session_id, ack.reason = item.request.session.session_id[:256], bad.message
                self._answered(item, ack)
                return
        elif item.kind:
            _VALIDATE[item.kind](item.request)
        else:
            raise InvalidField("call", "", "one of admit, place, release, progress")
        self._order.add(item)

    # Carrying out

    def _start(self, item: Item) -> None:
        item.running = True
        pool = item.session[0]
        if item.kind == "admit":
            self._alone(item, self._admit(pool, item))
        elif pool in self._next:
            self._next[pool].append(item)
        else:
            self._next[pool] = [item]
            self._spawn(self._rounds(pool))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _alone(self, item: Item, work: Coroutine[Any, Any, None]) -> None:
        item.task = self._spawn(work)
        item.task.add_done_callback(partial(self._went_alone, item))

    def _went_alone(self, item: Item, task: asyncio.Task[None]) -> None:
        # One that was cancelled knows where, and so the item: as a circle they would wait for the garbage collector.
        item.task = None
        if item.answered or self._cut_off:
            return
        error = CallCancelled() if task.cancelled() else task.exception()
        assert error is not None
        self._fail(item, error)

    async def _rounds(self, pool: str) -> None:
        while items := self._next[pool]:
            self._next[pool] = []
            desk = self._control.desk(pool)
            work = []
            for kind, step in (("progress", self._report), ("place", self._place), ("release", self._release)):
                chosen = [item for item in items if item.kind == kind]
                parts = [chosen[at : at + _BATCH] for at in range(0, len(chosen), _BATCH)]
                work += [self._carefully(part, step(desk, part)) for part in parts]
            # What is asked at the same time shares a round trip.
            await asyncio.gather(*work)
        del self._next[pool]

    async def _carefully(self, items: Sequence[Item], work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            for item in items:
                if not item.answered and item.task is None:
                    self._fail(item, error)

    async def _report(self, desk: Desk, items: Sequence[Item]) -> None:
        reports = [answers.progress_of(item.request.session) for item in items]
        renewed = await self._control.store.progress(desk.pool, reports)
        for item, report, result in zip(items, reports, renewed, strict=True):
            ack = self._result(item).progress
            ack.session_id = report.session_id
            answers.fill_ack(ack, result, report.token)
            self._answered(item, ack)

    async def _place(self, desk: Desk, items: Sequence[Item]) -> None:
        turns = [answers.turn_of(item.request) for item in items]
        results = await desk.places(turns)
        view = await desk.view()
        for item, turn, result in zip(items, turns, results, strict=True):
            if isinstance(result, MoorageFailure):
                self._fail(item, result)
            elif isinstance(result, Placed) and shows(view, result):
                desk.note(view, result, item.request.prefix_hashes)
                response = self._result(item).place
                answers.fill_placed(response, view, result)
                self._answered(item, response)
            else:
                self._alone(item, self._settle(desk, item, turn, result))

    async def _release(self, desk: Desk, items: Sequence[Item]) -> None:
        results = await desk.releases([answers.ending_of(item.request) for item in items])
        for item, result in zip(items, results, strict=True):
            if isinstance(result, MoorageFailure):
                self._fail(item, result)
            else:
                response = self._result(item).release
                answers.fill_released(response, result)
                self._answered(item, response)

    async def _settle(self, desk: Desk, item: Item, turn: Turn, result: Any) -> None:
        with self._calls.within(item):
            hashes, waits = item.request.prefix_hashes, partial(self._waits, item)
            response = await calls.placed(desk, await desk.settle(turn, result, self._wait_s(item), hashes, waits))
        self._result(item).place.CopyFrom(response)
        self._answered(item, response)

    async def _admit(self, pool: str, item: Item) -> None:
        desk = self._control.desk(pool)
        with self._calls.within(item):
            waits = partial(self._waits, item)
            response, arrival = await calls.admit(desk, item.request, self._wait_s(item), waits)
        if self._cut_off:
            desk.abandon(arrival)
            return
        self._result(item).admit.CopyFrom(response)
        if response.decision == pb.DECISION_PLACE:
            self._out[-1].placed.append((desk, arrival))
        self._answered(item, response)

    def _wait_s(self, item: Item) -> float:
        return answers.wait_s(item.request, self._context) if self._waiting < MOST_WAITS else 0.0

    def _waits(self, item: Item) -> None:
        if not (item.waiting or self._cut_off):
            item.wait()
            self._waiting += 1
            self._room.set()
            self._order.moved(item)

    def _cancel(self, number: int) -> None:
        item = self._items.get(number)
        if item is None:
            return
        if item.task is not None:
            item.task.cancel()
        elif not item.running:
            self._fail(item, CallCancelled())

    # Answering

    def _result(self, item: Item) -> Any:
        if not self._out or len(self._out[-1].response.results) >= _RESULTS:
            self._out.append(_Frame())
        if item.result is None:
            item.result = self._out[-1].response.results.add(id=item.id)
        # One that was begun and could not be finished becomes an error.
        return item.result

    def _answered(self, item: Item, response: Any, failure: MoorageFailure | None = None) -> None:
        if self._cut_off:
            return
        item.answered = True
        del self._items[item.id]
        self._waiting -= item.waiting
        self._calls.end(item, response, failure)
        self._order.done(item)
        self._look.set()

    def _fail(self, item: Item, error: BaseException) -> None:
        failure = error if isinstance(error, MoorageFailure) else hidden(error, item.kind, item.request)
        self._result(item).error.CopyFrom(call_error(failure))
        self._answered(item, None, failure)

    async def _send(self) -> None:
        while self._out:
            self._sending = self._out.popleft()
            await self._context.write(self._sending.response)
            self._sending = None
            self._room.set()

    def _cut(self) -> None:
        """Nobody hears answers any more: what is under way is cancelled, what was let in is taken back."""
        self._cut_off = True
        for task in self._tasks:
            task.cancel()
        for frame in (*self._out, *filter(None, (self._sending,))):
            for desk, arrival in frame.placed:
                desk.abandon(arrival)
        for item in self._items.values():
            self._calls.end(item, None, CallCancelled())
        # The collector comes seldom, and the order knows the stream: thousands of requests must not wait for it.
        self._items.clear()
        self._order.clear()


def _on_its_own(request: Any) -> Any:
    """A copy: a frame lives as long as any part of it, and what waits must not keep its neighbours for minutes."""
    copied = type(request)()
    copied.CopyFrom(request)
    return copied
