"""What a session shows and records, the same for threads and asyncio: none of it waits."""

from __future__ import annotations

from moorage.messages import PhaseLike, to_phase
from moorage.renewal import AsyncRenewer, Renewer
from moorage.settings import OutageLog
from moorage.state import SessionOptions, SessionState, Stage
from moorage.v1.scheduler_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_COMPLETED,
    OUTCOME_FAILED,
    PHASE_RUNNING,
    PHASE_TOOL_WAIT,
    Hold,
    Outcome,
    Placement,
    Residency,
    Usage,
)


class SessionHandle:
    """Properties and reports of a session; see `Session` and `AsyncSession`.

    Example:
        >>> with client.session("sess-1") as s:  # doctest: +SKIP
        ...     s.report(cached_tokens=112, output_tokens=20, context_tokens=152)
    """

    def __init__(self, options: SessionOptions, renewer: Renewer | AsyncRenewer, outages: OutageLog) -> None:
        self._state = SessionState(options)
        self._renewer = renewer
        self._outages = outages

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self._state.options.session_id

    @property
    def pool(self) -> str:
        """The session's pool."""
        return self._state.options.pool

    @property
    def workload_class(self) -> str:
        """The class in force: as declared until the server answers, then as it declared, mapped or inferred it."""
        return self._state.workload_class

    @property
    def placement(self) -> Placement:
        """The present home. Raises RuntimeError before the session is open."""
        if self._state.placement is None:
            raise RuntimeError("the session is not open")
        return self._state.placement

    @property
    def endpoint(self) -> str:
        """Address of the present home. Raises RuntimeError before the session is open."""
        return self.placement.endpoint

    @property
    def hold(self) -> Hold | None:
        """The last hold while waiting; in OBSERVE mode what ENFORCE would have said; else None."""
        return self._state.hold

    @property
    def managed(self) -> bool:
        """False where the session goes on without the control plane (`on_unavailable="admit"`)."""
        return self._state.stage is not Stage.UNMANAGED

    @property
    def lost(self) -> bool:
        """The lease is over although the session is not: the next place() raises LeaseLost, or enters again."""
        return self._state.stage is Stage.LOST

    @property
    def lease_ttl(self) -> float:
        """Seconds from a renewal of the lease to its end."""
        return self._state.lease_ttl

    @property
    def turn(self) -> int | None:
        """Number of the current turn, from 0; None before the first."""
        return self._state.turn_number

    @property
    def usage(self) -> Usage:
        """Tokens of all turns so far, as reported; a field is absent where nothing was."""
        return self._state.usage()

    @property
    def residency(self) -> Residency | None:
        """What the session cost, once released: duration, block-seconds, peak blocks. None where the server forgot."""
        answer = self._state.release_answer
        return answer.residency if answer is not None and answer.HasField("residency") else None

    def report(
        self,
        *,
        phase: PhaseLike | None = None,
        prompt_tokens: int | None = None,
        context_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Records what the current turn used. It travels with the next heartbeat; of one turn the latest values win.

        Engines tell cached_tokens when a request ends, so a report that has them ends the turn (TOOL_WAIT) unless
        `phase` says RUNNING. The cached_tokens of every finished turn go out once, under its own number.

        Args:
            phase: RUNNING while the engine works, TOOL_WAIT between turns.
            prompt_tokens: tokens of this turn's whole prompt; place() usually told already.
            context_tokens: prompt plus output of this turn; derived where both are known.
            cached_tokens: of this turn's prompt, tokens that came from the prefix cache.
            output_tokens: tokens generated in this turn.
        """
        soon = self._state.record(
            phase=None if phase is None else to_phase(phase),
            prompt_tokens=prompt_tokens,
            context_tokens=context_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
        )
        if soon:
            self._renewer.report(self._state)

    def progress(self, *, context_tokens: int | None = None, output_tokens: int | None = None) -> None:
        """Records how far the running turn got, in tokens of this turn; cheap enough to call for every chunk."""
        self.report(phase=PHASE_RUNNING, context_tokens=context_tokens, output_tokens=output_tokens)

    def tool_wait(self) -> None:
        """The turn is over and the session waits for a tool; its KV stays resident."""
        self.report(phase=PHASE_TOOL_WAIT)

    def resume(self, turn: int) -> None:
        """Says before a place() that the session had turns elsewhere: its next one has this number, from 0, at least.

        The hits of a turn count only if its number is above those reported before.
        """
        self._state.resume(turn)

    def _follow(self) -> None:
        """Renews the session while it lives, and says once that it is unmanaged."""
        if self._state.stage is Stage.LIVING:
            self._renewer.add(self._state)
            if self._state.has_reports:
                self._renewer.report(self._state)
        else:
            self._renewer.discard(self._state)
        outage, self._state.outage = self._state.outage, None
        if outage is not None:
            self._outages.met(outage)


def outcome_of(error: type[BaseException] | None) -> Outcome.ValueType:
    """COMPLETED without an error, FAILED with one, ABORTED where the caller was cancelled or interrupted."""
    if error is None:
        return OUTCOME_COMPLETED
    return OUTCOME_FAILED if issubclass(error, Exception) else OUTCOME_ABORTED
