"""A session for threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from moorage import flows
from moorage.errors import MoorageError
from moorage.handle import SessionHandle
from moorage.messages import OutcomeLike, to_outcome
from moorage.renewal import Renewer
from moorage.settings import OutageLog
from moorage.state import SessionOptions, SessionState, Stage, Turn
from moorage.v1.scheduler_pb2 import OUTCOME_PAUSED, Outcome, ReleaseResponse

T = TypeVar("T")

Perform = Callable[[flows.Call], Any]


class Session(SessionHandle):
    """A rollout session: admitted on entry, its lease renewed while it lives, released on every way out.

    Leaving the block releases as COMPLETED, with an exception as FAILED, and when interrupted (KeyboardInterrupt,
    SystemExit, GeneratorExit) as `on_cancel` says. One thread at a time, though any may report.

    Example:
        >>> with client.session("sess-1", workload_class="agentic", prompt_tokens=1200) as s:  # doctest: +SKIP
        ...     while not done:
        ...         turn = s.place(prompt_tokens=len(prompt))
        ...         answer = generate(turn.endpoint, prompt)
        ...         s.report(cached_tokens=answer.cached, output_tokens=answer.output)
        ...         prompt += run_tool(answer)
    """

    def __init__(self, options: SessionOptions, perform: Perform, renewer: Renewer, outages: OutageLog) -> None:
        super().__init__(options, renewer, outages)
        self._perform = perform

    def __enter__(self) -> Self:
        if self._state.stage is not Stage.NEW:
            raise RuntimeError("a session is entered once")
        try:
            run(flows.enter(self._state), self._perform)
        except Exception:
            raise
        except BaseException:
            release(self._state, to_outcome(self._state.options.on_cancel), self._perform)
            raise
        self._follow()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release(self._outcome_of(kind))

    def place(
        self,
        *,
        prompt_tokens: int | None = None,
        prefix_hashes: Sequence[int] = (),
        max_wait: float | None = None,
        wait_timeout: float | None = None,
    ) -> Turn:
        """Begins the next turn: where its request goes. Answers at once while the session's home lives.

        The first turn takes the admission's placement without a call, if it tells nothing that the admission did not.

        Args:
            prompt_tokens: tokens of this turn's whole prompt.
            prefix_hashes: one hash per full block of the prompt, see `moorage.prefix_hashes`.
            max_wait: seconds that one call may wait for a new home; None takes the session's.
            wait_timeout: seconds to wait for a new home in all; None takes the session's.

        Raises:
            LeaseLost: the lease is over, unless the session was opened with `readmit=True`.
            Held: no new home within `wait_timeout`; the lease lives on, place() may be called again.
            Unavailable: the control plane is away, unless the client has `on_unavailable="admit"`.
        """
        try:
            return run(
                flows.next_turn(self._state, prompt_tokens, prefix_hashes, max_wait, wait_timeout), self._perform
            )
        finally:
            self._follow()

    def pause(self) -> ReleaseResponse | None:
        """Releases the session as PAUSED: its KV is free, its seniority kept for the next session of the same id.

        Returns the server's answer; None where it gave none and the session ends with its lease.
        """
        return self.release(OUTCOME_PAUSED)

    def release(self, outcome: OutcomeLike = "COMPLETED") -> ReleaseResponse | None:
        """Releases the session before the block ends; afterwards the end of the block does nothing.

        Returns the server's answer; None where it gave none and the session ends with its lease.
        """
        self._renewer.discard(self._state)
        release(self._state, to_outcome(outcome), self._perform)
        return self._state.release_answer


def run(flow: flows.Flow[T], perform: Perform) -> T:
    """Drives a flow with blocking calls; interrupted, it closes the flow."""
    try:
        step = next(flow)
        while True:
            try:
                answer = _do(step, perform)
            except MoorageError as error:
                step = flow.throw(error)
            else:
                step = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()


def _do(step: flows.Call | flows.Sleep, perform: Perform) -> Any:
    if isinstance(step, flows.Sleep):
        time.sleep(step.seconds)
        return None
    return perform(step)


def release(state: SessionState, outcome: Outcome.ValueType, perform: Perform) -> None:
    """Ends the session; an interruption is raised when that is done, a second one at once."""
    try:
        run(flows.leave(state, outcome), perform)
    except KeyboardInterrupt:
        run(flows.leave(state, outcome), perform)
        raise
