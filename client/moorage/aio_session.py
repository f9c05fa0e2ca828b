"""A session for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from moorage import flows
from moorage.errors import MoorageError
from moorage.handle import SessionHandle
from moorage.messages import OutcomeLike, to_outcome
from moorage.renewal import AsyncRenewer
from moorage.settings import OutageLog
from moorage.state import SessionOptions, SessionState, Stage, Turn
from moorage.v1.scheduler_pb2 import OUTCOME_PAUSED, Outcome, ReleaseResponse

T = TypeVar("T")

Perform = Callable[[flows.Call], Awaitable[Any]]


class AsyncSession(SessionHandle):
    """A rollout session: admitted on entry, its lease renewed while it lives, released on every way out.

    Leaving the block releases as COMPLETED, with an exception as FAILED, and when cancelled or interrupted
    (CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit) as `on_cancel` says. The release runs to its end
    although the task is cancelled, and cancellation goes on afterwards. One task at a time.

    Example:
        >>> async with client.session("sess-1", workload_class="agentic", prompt_tokens=1200) as s:  # doctest: +SKIP
        ...     while not done:
        ...         turn = await s.place(prompt_tokens=len(prompt))
        ...         answer = await generate(turn.endpoint, prompt)
        ...         s.report(cached_tokens=answer.cached, output_tokens=answer.output)
        ...         prompt += await run_tool(answer)
    """

    def __init__(self, options: SessionOptions, perform: Perform, renewer: AsyncRenewer, outages: OutageLog) -> None:
        super().__init__(options, renewer, outages)
        self._perform = perform

    async def __aenter__(self) -> Self:
        if self._state.stage is not Stage.NEW:
            raise RuntimeError("a session is entered once")
        try:
            await run(flows.enter(self._state), self._perform)
        except Exception:
            raise
        except BaseException:
            await release(self._state, to_outcome(self._state.options.on_cancel), self._perform)
            raise
        self._follow()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release(self._outcome_of(kind))

    async def place(
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
            return await run(
                flows.next_turn(self._state, prompt_tokens, prefix_hashes, max_wait, wait_timeout), self._perform
            )
        finally:
            self._follow()

    async def pause(self) -> ReleaseResponse | None:
        """Releases the session as PAUSED: its KV is free, its seniority kept for the next session of the same id.

        Returns the server's answer; None where it gave none and the session ends with its lease.
        """
        return await self.release(OUTCOME_PAUSED)

    async def hand_over(self) -> None:
        """Stops renewing the session without releasing it: who admits it next, here or elsewhere, finds it at its home.

        If nobody does, it ends with its lease. The next place() takes it up again.
        """
        self._renewer.discard(self._state)
        await run(flows.hand_over(self._state), self._perform)

    async def release(self, outcome: OutcomeLike = "COMPLETED") -> ReleaseResponse | None:
        """Releases the session before the block ends; afterwards the end of the block does nothing.

        Returns the server's answer; None where it gave none and the session ends with its lease.
        """
        self._renewer.discard(self._state)
        await release(self._state, to_outcome(outcome), self._perform)
        return self._state.release_answer


async def run(flow: flows.Flow[T], perform: Perform) -> T:
    """Drives a flow; cancelled, it closes the flow."""
    try:
        step = next(flow)
        while True:
            try:
                answer = await (asyncio.sleep(step.seconds) if isinstance(step, flows.Sleep) else perform(step))
            except MoorageError as error:
                step = flow.throw(error)
            else:
                step = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()


async def release(state: SessionState, outcome: Outcome.ValueType, perform: Perform) -> None:
    """Ends the session, although the caller is cancelled; that is raised when it is done."""
    await _to_the_end(lambda: run(flows.leave(state, outcome), perform))


async def _to_the_end(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs what `make` makes to its end; cancelled meanwhile, raises CancelledError afterwards.

    A loop that shuts down cancels every task, the inner one too: then it is made again.
    """
    cancelled: asyncio.CancelledError | None = None
    task = asyncio.create_task(make())
    while not task.done() or task.cancelled():
        if task.cancelled():
            task = asyncio.create_task(make())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
