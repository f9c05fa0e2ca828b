"""What a session says to the control plane, and what it makes of the answers. No I/O.

A flow is a generator: it yields a `Call` or a `Sleep` and is sent the answer, or has a `MoorageError` thrown into it.
So the clients for threads and for asyncio run the same rules, and differ only in how they wait. A driver that is
interrupted closes the flow; what was left open is in the session's state, and `leave` settles it.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import grpc
from google.protobuf.message import Message

from moorage.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Held,
    InvalidArgument,
    LeaseLost,
    MoorageError,
    NotFound,
    Rejected,
    Unavailable,
    hold_reason,
)
from moorage.messages import heartbeat_request, to_seconds
from moorage.state import SessionState, Stage, Turn
from moorage.v1.scheduler_pb2 import (
    DECISION_HOLD,
    DECISION_PLACE,
    OUTCOME_ABORTED,
    OUTCOME_PAUSED,
    AdmitResponse,
    Hold,
    Outcome,
    PlaceRequest,
    PlaceResponse,
    ReleaseResponse,
)

logger = logging.getLogger("moorage")

T = TypeVar("T")

#: A call that was open for longer than the channel's own retries take has waited, in seconds.
WAITED = 6.0

#: Pause between two tries where the server names none, in seconds.
DEFAULT_RETRY_AFTER = 0.5

#: How long a call is repeated that the server sheds unread, in seconds: it is busy with a burst, not away.
SHED_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the SchedulerService; answer with its response."""

    method: Literal["Admit", "Place", "Release", "Heartbeat"]
    request: Message
    timeout: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait that many seconds; answer with None."""

    seconds: float


Flow = Generator[Call | Sleep, Any, T]


class Deadline:
    """A moment `seconds` from now; None means never."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())


def enter(state: SessionState, prompt_tokens: int | None = None) -> Flow[None]:
    """Admits the session, waiting through holds; leaves nothing behind when it fails, unless nobody can be told.

    Raises Held when the wait is over, Rejected, or Unavailable unless the session may go on unmanaged.
    """
    try:
        yield from _admit(state, prompt_tokens)
    except Held:
        if not state.options.keep_place:
            yield from withdraw(state)
        raise
    except Unavailable as error:
        if isinstance(error, DeadlineExceeded):
            yield from withdraw(state)
        if state.options.on_unavailable == "fail":
            raise
        # What the server may still hold ends with its lease: from here on it is not asked.
        state.not_known()
        state.unmanage(error)


def _admit(state: SessionState, prompt_tokens: int | None) -> Flow[None]:
    options = state.options
    deadline = Deadline(options.wait_timeout)
    while True:
        wait = min(options.max_wait, deadline.left)
        state.asking = state.admit_request(wait, prompt_tokens)
        # A place in the queue outlives a short outage, so the wait does too; a newcomer has nothing to lose.
        patience = min(options.outage_patience, deadline.left)
        call = Call("Admit", state.asking, wait + options.timeout)
        try:
            answer: AdmitResponse = yield from _patiently(call, patience, newcomer=not state.queued)
        except Unavailable:
            raise
        except MoorageError:
            state.not_known()
            raise
        if answer.decision == DECISION_PLACE:
            state.admitted(answer)
            return
        if answer.decision != DECISION_HOLD:
            state.not_known()
            raise Rejected(_says(state, "is rejected", answer.hold), hold=answer.hold)
        state.held(answer.hold)
        yield from _sit_out(state, answer.hold, deadline)


def next_turn(
    state: SessionState,
    prompt_tokens: int | None,
    prefix_hashes: Sequence[int],
    max_wait: float | None,
    wait_timeout: float | None,
) -> Flow[Turn]:
    """Where the next turn goes.

    Raises LeaseLost unless the session may enter again, Held when the wait for a new home is over, or Unavailable
    unless the session may go on at its present home.
    """
    if state.stage in (Stage.NEW, Stage.OVER):
        raise RuntimeError("place() needs an open session")
    if state.stage is Stage.UNMANAGED:
        return state.begin_turn(prompt_tokens, managed=False)
    if state.stage is Stage.LIVING and state.admission_serves(prompt_tokens, prefix_hashes):
        return state.begin_turn(prompt_tokens)
    state.finish_turn()
    try:
        if state.lost is not None:
            raise state.lost
        yield from _place(state, prompt_tokens, prefix_hashes, max_wait, wait_timeout)
    except (LeaseLost, NotFound, FailedPrecondition) as error:
        # FailedPrecondition: it is held. A failover may have lost the admission, and not the hold before it.
        lost = error if isinstance(error, LeaseLost) else LeaseLost(error.message, code=error.code, reason=error.reason)
        state.lose(lost)
        if not state.options.readmit:
            raise lost from error.__cause__
        yield from enter(state, prompt_tokens)
    except Unavailable as error:
        if state.options.on_unavailable == "fail":
            raise
        state.outage = error
        return state.begin_turn(prompt_tokens, managed=False)
    return state.begin_turn(prompt_tokens, managed=state.stage is Stage.LIVING)


def _place(
    state: SessionState,
    prompt_tokens: int | None,
    prefix_hashes: Sequence[int],
    max_wait: float | None,
    wait_timeout: float | None,
) -> Flow[None]:
    options = state.options
    deadline = Deadline(options.wait_timeout if wait_timeout is None else wait_timeout)
    if state.unresolved is not None:
        yield from _send_place(state, state.unresolved, to_seconds(state.unresolved.max_wait) + options.timeout)
    while True:
        wait = min(options.max_wait if max_wait is None else max_wait, deadline.left)
        request = state.place_request(prompt_tokens, prefix_hashes, wait)
        patience = min(options.outage_patience, deadline.left) if options.on_unavailable == "fail" else 0.0
        answer = yield from _send_place(state, request, wait + options.timeout, patience)
        if answer.decision == DECISION_PLACE:
            return
        if answer.decision != DECISION_HOLD:
            raise Rejected(_says(state, "is rejected", answer.hold), hold=answer.hold)
        state.hold = answer.hold
        yield from _sit_out(state, answer.hold, deadline)


def _send_place(
    state: SessionState, request: PlaceRequest, timeout: float, patience: float = 0.0
) -> Flow[PlaceResponse]:
    """One Place. Until its answer is seen it is unresolved: it may have moved the session and rotated the token."""
    state.unresolved = request
    try:
        answer: PlaceResponse = yield from _patiently(Call("Place", request, timeout), patience)
    except Unavailable:
        raise
    except MoorageError:
        state.unresolved = None
        raise
    if answer.decision == DECISION_PLACE:
        state.placed(answer)
    state.unresolved = None
    return answer


def leave(state: SessionState, outcome: Outcome.ValueType) -> Flow[None]:
    """Ends the session, wherever it is. Never fails: what can not be delivered is logged, and ends with the lease."""
    if state.may_be_known:
        yield from withdraw(state, OUTCOME_PAUSED if outcome == OUTCOME_PAUSED else OUTCOME_ABORTED)
    if state.stage in (Stage.LIVING, Stage.LOST):
        yield from _release(state, outcome)
    state.stage = Stage.OVER


def _release(state: SessionState, outcome: Outcome.ValueType) -> Flow[None]:
    options = state.options
    if state.unresolved is not None:
        with suppress(MoorageError):
            yield from _send_place(state, state.unresolved, options.timeout)
    state.finish_turn()
    if state.has_reports and state.turn_number:
        yield from _report(state)
    request = state.release_request(outcome)
    patience = options.release_timeout if state.stage is Stage.LIVING else 0.0
    try:
        answer: ReleaseResponse = yield from _patiently(Call("Release", request, options.timeout), patience)
    except (LeaseLost, NotFound):
        return
    except MoorageError as error:
        logger.warning(
            "session %r could not be released as %s and ends with its lease: %s",
            options.session_id,
            Outcome.Name(request.outcome),
            error,
        )
        return
    state.release_answer = answer


def hand_over(state: SessionState) -> Flow[None]:
    """Tells what is left to tell of a session that goes on elsewhere, or ends with its lease. Never fails."""
    state.finish_turn()
    if state.has_reports and state.stage is Stage.LIVING:
        yield from _report(state)


def _report(state: SessionState) -> Flow[None]:
    """The last turn's hit signal, which the totals of the release would hide. Best effort."""
    sessions = [item.progress for item in state.collect()]
    with suppress(MoorageError):
        yield Call("Heartbeat", heartbeat_request(state.options.pool, sessions=sessions), state.options.timeout)


def withdraw(state: SessionState, outcome: Outcome.ValueType = OUTCOME_ABORTED) -> Flow[None]:
    """Takes back a place in the queue, or an admission whose answer was not seen; PAUSED keeps seniority. Never fails.

    A Release without a token ends a held session and does nothing to an unknown one. It is refused if the session
    lives: then the Admit was granted, and its repeat tells the token.
    """
    timeout = state.options.timeout
    try:
        try:
            yield Call("Release", state.withdrawal(outcome), timeout)
        except InvalidArgument:
            if state.asking is None:
                raise
            answer: AdmitResponse = yield Call("Admit", state.asking, timeout)
            yield Call("Release", state.withdrawal(outcome, answer.lease.token), timeout)
    except MoorageError as error:
        logger.warning("session %r could not be withdrawn, and expires: %s", state.options.session_id, error)
    state.not_known()


def _sit_out(state: SessionState, hold: Hold, deadline: Deadline) -> Flow[None]:
    """Waits as the hold asks; raises Held when the caller's time is over."""
    if deadline.left <= 0:
        raise Held(_says(state, "is held", hold), hold=hold)
    pause = to_seconds(hold.retry_after) if hold.HasField("retry_after") else DEFAULT_RETRY_AFTER
    # Never early; a little late, so that those held together do not all return together.
    yield Sleep(min(pause * random.uniform(1.0, 1.1), deadline.left))


def _patiently(call: Call, patience: float, *, newcomer: bool = False) -> Flow[Any]:
    """Repeats the same request while the control plane is away, for `patience` seconds after the first failure.

    A newcomer's first failure is the end, unless its call was open for so long that it must have waited in the queue.
    """
    deadline: Deadline | None = None
    pause = DEFAULT_RETRY_AFTER
    began = time.monotonic()
    while True:
        try:
            return (yield call)
        except Unavailable as error:
            if newcomer and deadline is None and time.monotonic() - began < WAITED:
                patience = 0.0
            shed = error.code is grpc.StatusCode.CANCELLED
            deadline = deadline or Deadline(max(patience, SHED_PATIENCE) if shed else patience)
            wait = random.uniform(0.5, 1.0) * pause if error.retry_after is None else error.retry_after
            if wait >= deadline.left:
                raise
        yield Sleep(wait)
        pause = min(2 * pause, 5.0)
        call = replace(call, timeout=min(call.timeout, max(deadline.left, DEFAULT_RETRY_AFTER)))


def _says(state: SessionState, what: str, hold: Hold) -> str:
    detail = f": {hold.detail}" if hold.detail else ""
    return f"session {state.options.session_id!r} {what} ({hold_reason(hold) or 'no reason given'}){detail}"
