"""A bound: admission that knows every session's plan and so can fill the KV memory without ever running over.

It knows the lengths, turns and tool gaps of all sessions that came, and how far the living ones are. Sessions enter
first come first served, stay on the engine whose predicted peak is lowest with them, and enter only where the predicted
blocks of all that live there never exceed what the engine has, at any time ahead. So hardly anything is computed twice:
about the most that admission can get from this memory if it never lets it run over, and reorders nothing. Not a proof:
it never holds a session back that fits to make room for a later one, and it counts blocks that siblings share once for
each of them. And running over can pay where what is preempted is cheap to compute again: with long single answers alone
(the mix "rlvr only") a static cap that overfills makes some more samples than this.

Time is counted in decode steps: every running request generates one token per step, so a turn takes as many steps as
it has output tokens, and one before, in which its request waits for the step under way to end; prefill takes no other
time. Tool gaps are seconds, and become steps at the engine's pace, which is learnt from what running requests report:
seconds that passed over tokens generated, the past decayed.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bench.routers import Progress, RoutedSession
from bench.workload import SessionPlan

Floats = NDArray[np.float64]

#: Seconds per step before anything was reported, and the tokens this counts for.
FIRST_STEP_S, FIRST_TOKENS = 0.015, 50.0
#: Reported tokens of an engine after which what was reported before counts half.
HALF_LIFE_TOKENS = 2_000.0
#: Seconds between two tries of the first in line while nobody leaves: the later it starts, the less it adds to the
#: peaks of the others.
RETRY_S = 0.25


class Pace:
    """Seconds per decode step of one engine."""

    def __init__(self) -> None:
        self._seconds = FIRST_STEP_S * FIRST_TOKENS
        self._tokens = FIRST_TOKENS

    @property
    def step_s(self) -> float:
        """Seconds per step as of now; above 0."""
        return self._seconds / self._tokens

    def learn(self, seconds: float, tokens: int) -> None:
        """One request generated `tokens` within `seconds`."""
        kept = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._seconds = kept * self._seconds + seconds
        self._tokens = kept * self._tokens + tokens


class Course:
    """A plan as stages: of each turn, what is before its output (stage 2 x turn), and its output (the stage after)."""

    def __init__(self, plan: SessionPlan) -> None:
        outputs, gaps, added = (
            np.array(values, dtype=np.float64)
            for values in zip(*((t.output_tokens, t.tool_gap_s, t.new_tokens) for t in plan.turns), strict=True)
        )
        nothing, waits = np.zeros_like(outputs), np.ones_like(outputs)
        # A session that is about to enter counts as running.
        waits[0] = 0.0
        self.steps = np.stack([waits, outputs], axis=1).ravel()
        """Decode steps of each stage."""
        self.gaps_s = np.stack([gaps, nothing], axis=1).ravel()
        """Seconds of tools in each stage, besides its steps."""
        grown = np.cumsum(added + outputs) - outputs
        # Until a turn begins there is the context of the turn before; then comes what the tool added.
        self.context = len(plan.prompt) + np.stack([grown - added, grown], axis=1).ravel()
        """Tokens of context at the begin of each stage."""

    def path(self, stage: int, done: int, elapsed_s: float, step_s: float) -> "Path":
        """Return what is ahead of a session that had generated `done` tokens of a stage `elapsed_s` seconds ago.

        It is taken to have gone on since at `step_s` seconds per step, up to the end of the stage.
        """
        lengths = self.steps + self.gaps_s / step_s
        ends = np.cumsum(lengths)
        into = min(done + elapsed_s / step_s, float(lengths[stage]))
        now = float(ends[stage] - lengths[stage]) + into
        return Path(ends - lengths - now, self.context, float(ends[-1]) - now)


@dataclass(frozen=True, slots=True)
class Path:
    """The context of one session over time, in steps from now. It never falls until the session ends."""

    starts: Floats
    """When each stage begins: not after 0 for the one that runs and those before it."""
    context: Floats
    """Tokens of context when each stage begins."""
    end: float

    def blocks(self, times: Floats, block_size: int) -> Floats:
        """Return the blocks held at some times, none of them before now; 0 after the end."""
        stage = np.searchsorted(self.starts, times, side="right") - 1
        # Odd stages are those that generate: one token per step.
        tokens = self.context[stage] + (stage & 1) * (times - self.starts[stage])
        # A sum of fractions may be a hair above the whole tokens that it stands for.
        return np.where(times <= self.end, np.ceil((tokens - 1e-6) / block_size), 0.0)


class Forecast:
    """The blocks of all sessions of an engine. Their sum only falls when one ends, so each peak is at an end."""

    def __init__(self, paths: Iterable[Path], block_size: int) -> None:
        self._paths = tuple(paths)
        self._block_size = block_size
        self._ends = np.array([path.end for path in self._paths])
        self._needs = self._sum(self._ends)

    @property
    def peak(self) -> float:
        """Most blocks that are needed at any time from now on."""
        return float(self._needs.max(initial=0.0))

    def added(self, path: Path) -> Self:
        """Return the forecast with one more session: what is known of the others is not summed again."""
        more = type(self)((), self._block_size)
        more._paths = (*self._paths, path)
        more._ends = np.append(self._ends, path.end)
        at_end = more._sum(more._ends[-1:])
        more._needs = np.append(self._needs + path.blocks(self._ends, self._block_size), at_end)
        return more

    def _sum(self, times: Floats) -> Floats:
        return sum((path.blocks(times, self._block_size) for path in self._paths), np.zeros_like(times))


class ClairvoyantRouter:
    """Admits what fits for good, first come first served; see the module. A session stays where it was admitted."""

    def __init__(self, engines: Sequence[str], blocks: int, block_size: int) -> None:
        """`blocks` is what each engine has, with the null block that nobody can use, of `block_size` tokens each."""
        self._usable = blocks - 1
        self._block_size = block_size
        self._paces = {engine: Pace() for engine in engines}
        self._living: dict[str, dict[_Session, None]] = {engine: {} for engine in engines}
        self._waiting: deque[_Session] = deque()
        self._tried = 0.0

    def session(self, plan: SessionPlan) -> RoutedSession:
        """See `Router.session`."""
        return _Session(self, plan)

    @property
    def living(self) -> dict[str, int]:
        """Sessions that were admitted and have not left, by engine."""
        return {engine: len(sessions) for engine, sessions in self._living.items()}

    @property
    def waiting(self) -> int:
        """Sessions that wait to be admitted."""
        return len(self._waiting)

    def pace(self, engine: str) -> Pace:
        """Return the pace of an engine."""
        return self._paces[engine]

    def join(self, session: "_Session") -> None:
        """Queue a session, and admit it if it is the first in line and fits."""
        self._waiting.append(session)
        if len(self._waiting) == 1:
            self._admit()

    def leave(self, session: "_Session") -> None:
        """Forget a session, wherever it is, and admit who fits now."""
        for sessions in self._living.values():
            sessions.pop(session, None)
        if session in self._waiting:
            self._waiting.remove(session)
        self._admit()

    def look_again(self) -> None:
        """Admit who fits now, unless that was tried just before."""
        if self._waiting and _now() - self._tried >= RETRY_S:
            self._admit()

    def _admit(self) -> None:
        """Admit those who wait, in order, until one fits nowhere."""
        if not self._waiting:
            return
        self._tried = _now()
        forecasts = {engine: self._forecast(engine) for engine in self._living}
        while self._waiting:
            session = self._waiting[0]
            options = {e: forecast.added(session.path(self._paces[e])) for e, forecast in forecasts.items()}
            # Alone a session enters whatever it needs: it would wait forever.
            fits = [e for e, forecast in options.items() if forecast.peak <= self._usable or not self._living[e]]
            if not fits:
                return
            engine = min(fits, key=lambda name: options[name].peak)
            forecasts[engine] = options[engine]
            self._living[engine][session] = None
            self._waiting.popleft().enter(engine)

    def _forecast(self, engine: str) -> Forecast:
        pace = self._paces[engine]
        return Forecast((session.path(pace) for session in self._living[engine]), self._block_size)


class _Session:
    def __init__(self, router: ClairvoyantRouter, plan: SessionPlan) -> None:
        self._router = router
        self._course = Course(plan)
        self._admitted = asyncio.Event()
        self._engine = ""
        self._stage = 0
        self._done = 0
        self._since = 0.0

    async def __aenter__(self) -> Self:
        self._since = _now()
        try:
            self._router.join(self)
            await self._admitted.wait()
        except BaseException:
            # It may have been admitted in the very moment that it gave up.
            self._router.leave(self)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._router.leave(self)

    def enter(self, engine: str) -> None:
        """The wait is over."""
        self._engine = engine
        self._admitted.set()

    def path(self, pace: Pace) -> Path:
        """Return what is ahead, from now on, at an engine's pace."""
        return self._course.path(self._stage, self._done, _now() - self._since, pace.step_s)

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        self._reach(2 * turn + 1, 0)
        return self._engine

    def report(self, progress: Progress) -> None:
        now, stage = _now(), 2 * progress.turn + 1
        self._router.pace(self._engine).learn(now - self._since, progress.output_tokens - self._done)
        last = stage + 1 == len(self._course.steps)
        if progress.turn_done and not last:
            self._reach(stage + 1, 0)
        else:
            self._reach(stage, progress.output_tokens)
        self._router.look_again()

    def _reach(self, stage: int, done: int) -> None:
        self._stage, self._done, self._since = stage, done, _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
