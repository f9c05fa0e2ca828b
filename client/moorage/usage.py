"""What a session used, turn by turn: the tokens to report while it lives and to total when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from moorage.v1.scheduler_pb2 import Usage


@dataclass(slots=True, eq=False)
class TurnUsage:
    """Tokens of one turn; None where nobody told.

    Attributes:
        number: of the turn, from 0.
        earlier_output_tokens: tokens generated in the turns before.
        prompt_tokens: whole prompt of the turn.
        cached_tokens: of these, tokens that came from the prefix cache.
        output_tokens: tokens generated in the turn.
        context: prompt plus output, as the caller counts them.
        over: the turn is finished.
        reported: its cached_tokens are on their way to the server, or there.
    """

    number: int
    earlier_output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    context: int | None = None
    over: bool = False
    reported: bool = False

    @property
    def context_tokens(self) -> int | None:
        """Context at the end of the turn: as told, else prompt plus output."""
        if self.context is None and self.prompt_tokens is not None and self.output_tokens is not None:
            return self.prompt_tokens + self.output_tokens
        return self.context

    @property
    def output_so_far(self) -> int | None:
        """Tokens that the session generated up to and in this turn."""
        return add(self.earlier_output_tokens, self.output_tokens)

    def update(
        self,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        """Takes the values that are given; the latest win."""
        self.prompt_tokens = self.prompt_tokens if prompt_tokens is None else prompt_tokens
        self.cached_tokens = self.cached_tokens if cached_tokens is None else cached_tokens
        self.output_tokens = self.output_tokens if output_tokens is None else output_tokens
        self.context = self.context if context_tokens is None else context_tokens


class UsageLog:
    """The turns of one session. Not safe for threads: its owner locks.

    The cached_tokens of a turn leave in a report of their own, once, when the turn is over: they are the signal by
    which the control plane sees whether a continuation found its prefix, and a sum over turns would hide that.

    Example:
        >>> log = UsageLog()
        >>> log.begin(prompt_tokens=100).update(output_tokens=20)
        >>> log.begin(prompt_tokens=130).update(cached_tokens=112, output_tokens=5)
        >>> log.total()
        prompt_tokens: 230
        cached_tokens: 112
        output_tokens: 25
        context_tokens: 135
        <BLANKLINE>
    """

    def __init__(self) -> None:
        self.current: TurnUsage | None = None
        self.least_number = 0
        self._earlier_prompt_tokens: int | None = None
        self._earlier_cached_tokens: int | None = None
        self._unreported: list[TurnUsage] = []

    @property
    def next_number(self) -> int:
        """Number of the turn that `begin` would start."""
        return max(self.current.number + 1, self.least_number) if self.current else self.least_number

    @property
    def has_unreported(self) -> bool:
        """Finished turns wait to be reported."""
        return bool(self._unreported)

    def begin(self, prompt_tokens: int | None = None) -> TurnUsage:
        """Ends the current turn and starts the next."""
        self.finish()
        turn = TurnUsage(self.next_number, prompt_tokens=prompt_tokens)
        if (last := self.current) is not None:
            turn.earlier_output_tokens = last.output_so_far
            self._earlier_prompt_tokens = add(self._earlier_prompt_tokens, last.prompt_tokens)
            self._earlier_cached_tokens = add(self._earlier_cached_tokens, last.cached_tokens)
        self.current = turn
        return turn

    def finish(self) -> None:
        """Ends the current turn: its cached_tokens, if known, wait to be reported."""
        turn = self.current
        if turn is None:
            return
        turn.over = True
        if turn.cached_tokens is not None and not turn.reported:
            turn.reported = True
            self._unreported.append(turn)

    def take(self, limit: int) -> list[TurnUsage]:
        """Finished turns to report, oldest first; they do not come again unless put back."""
        turns, self._unreported = self._unreported[:limit], self._unreported[limit:]
        return turns

    def put_back(self, turn: TurnUsage) -> None:
        """The report of `turn` did not arrive."""
        self._unreported.append(turn)
        self._unreported.sort(key=lambda other: other.number)

    def total(self) -> Usage:
        """Tokens of all turns, and the last context."""
        turn = self.current
        if turn is None:
            return Usage()
        return Usage(
            prompt_tokens=add(self._earlier_prompt_tokens, turn.prompt_tokens),
            cached_tokens=add(self._earlier_cached_tokens, turn.cached_tokens),
            output_tokens=turn.output_so_far,
            context_tokens=turn.context_tokens,
        )


def add(left: int | None, right: int | None) -> int | None:
    """The sum of what is known."""
    if left is None or right is None:
        return right if left is None else left
    return left + right
