"""Who may start, and where its requests go: plain baselines, behind the interface that moorage also fits."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from bench.workload import SessionPlan


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a session got."""

    turn: int
    prompt_tokens: int
    output_tokens: int
    """Tokens generated in the turn so far."""
    turn_done: bool = False
    cached_tokens: int | None = None
    """With `turn_done`: prompt tokens that came from the cache; None where the engine does not say."""

    @property
    def context_tokens(self) -> int:
        """Context so far: the turn's prompt and what came after it."""
        return self.prompt_tokens + self.output_tokens


class RoutedSession(Protocol):
    """One session in a router's hands. Entering it waits for admission, leaving it gives up what it holds."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        """Return the address of the engine that the turn's request goes to."""
        ...

    def report(self, progress: Progress) -> None:
        """Take note of progress; must not block."""
        ...


class Router(Protocol):
    """Admits and places sessions."""

    def session(self, plan: SessionPlan) -> RoutedSession:
        """Return the session for a plan, to be entered."""
        ...


class Loads:
    """A count per engine, with the least loaded one at hand; ties go round."""

    def __init__(self, engines: Sequence[str]) -> None:
        self.counts = dict.fromkeys(engines, 0)
        self._last_taken = dict.fromkeys(engines, 0)
        self._taken = 0

    def take_least(self) -> str:
        """Count one more on the least loaded engine and return it."""
        engine = min(self.counts, key=lambda name: (self.counts[name], self._last_taken[name]))
        self.take(engine)
        return engine

    def take(self, engine: str) -> None:
        """Count one more on an engine."""
        self._taken += 1
        self._last_taken[engine] = self._taken
        self.counts[engine] += 1

    def give_back(self, engine: str) -> None:
        """Count one less."""
        self.counts[engine] -= 1


class LeastLoadedRouter:
    """Every request goes to the engine with the fewest requests in flight: no affinity, no admission."""

    def __init__(self, engines: Sequence[str]) -> None:
        self._loads = Loads(engines)

    def session(self, plan: SessionPlan) -> RoutedSession:
        """See `Router.session`."""
        return PerRequestSession(lambda prompt: self._loads.take_least(), self._loads.give_back)


class StickyRouter:
    """A session stays on the engine that had the fewest sessions when it came.

    `cap` bounds the sessions of one engine (the static cap): those above it wait, first come first served.
    """

    def __init__(self, engines: Sequence[str], cap: int | None = None) -> None:
        self._loads = Loads(engines)
        self._slots = None if cap is None else asyncio.Semaphore(cap * len(engines))

    def session(self, plan: SessionPlan) -> RoutedSession:
        """See `Router.session`."""
        return _StickySession(self._loads, self._slots)


class BoundedRouter:
    """Another router behind a bound on all sessions at once: those above it wait, first come first served."""

    def __init__(self, router: Router, limit: int | None) -> None:
        """`limit` None is no bound."""
        self._router = router
        self._slots = None if limit is None else asyncio.Semaphore(limit)

    def session(self, plan: SessionPlan) -> RoutedSession:
        """See `Router.session`."""
        session = self._router.session(plan)
        return session if self._slots is None else _BoundedSession(session, self._slots)


class _BoundedSession:
    def __init__(self, session: RoutedSession, slots: asyncio.Semaphore) -> None:
        self._session = session
        self._slots = slots

    async def __aenter__(self) -> Self:
        await self._slots.acquire()
        try:
            await self._session.__aenter__()
        except BaseException:
            self._slots.release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._session.__aexit__(kind, error, trace)
        finally:
            self._slots.release()

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        return await self._session.place(turn, prompt)

    def report(self, progress: Progress) -> None:
        self._session.report(progress)


class PerRequestSession:
    """A session of which the router knows nothing: `choose` takes an engine for each prompt, `end` gives it back."""

    def __init__(self, choose: Callable[[Sequence[int]], str], end: Callable[[str], None]) -> None:
        self._choose = choose
        self._end = end
        self._engine: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_request()

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        self._engine = self._choose(prompt)
        return self._engine

    def report(self, progress: Progress) -> None:
        if progress.turn_done:
            self._end_request()

    def _end_request(self) -> None:
        if self._engine is not None:
            self._end(self._engine)
            self._engine = None


class _StickySession:
    def __init__(self, loads: Loads, slots: asyncio.Semaphore | None) -> None:
        self._loads = loads
        self._slots = slots
        self._engine = ""

    async def __aenter__(self) -> Self:
        if self._slots is not None:
            await self._slots.acquire()
        self._engine = self._loads.take_least()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loads.give_back(self._engine)
        if self._slots is not None:
            self._slots.release()

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        return self._engine

    def report(self, progress: Progress) -> None:
        """Nothing listens: this router keeps no books."""
