"""Plays a workload against a router and its engines, and records what happened to every session."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import httpx

from bench.backends import Backend
from bench.routers import Progress, RoutedSession, Router
from bench.workload import SessionPlan, Workload

log = logging.getLogger(__name__)

Outcome = Literal["living", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class PlayConfig:
    """Bounds of a run. It ends with the last session, or after `duration_s`, which cancels those still living."""

    live: int = 96
    """Rollouts in the trainer's hands at once, waiting ones included."""
    sessions: int | None = None
    duration_s: float | None = None
    report_interval_s: float = 1.0
    """Time between two reports of a session's growth while a request streams."""
    failure_pause_s: float = 1.0
    """A failed session keeps its slot this long, so that a dead engine is not flooded."""
    turn_retries: int = 0
    """Tries of a turn, after the first, each placed anew, where the engine fails, as a patient worker does."""

    def __post_init__(self) -> None:
        if self.sessions is None and self.duration_s is None:
            raise ValueError("a run needs a number of sessions or a duration")


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One request. Times in seconds since the start of the run."""

    engine: str
    start: float
    end: float
    ttft_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


@dataclass(slots=True)
class SessionRecord:
    """One session. Times in seconds since the start of the run."""

    session_id: str
    workload_class: str
    start: float
    admitted: float | None = None
    end: float | None = None
    outcome: Outcome = "living"
    engine: str | None = None
    """Where its last request went."""
    turns: list[TurnRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Sessions at one moment: those with a home, by engine, and those that wait for one."""

    time: float
    by_engine: dict[str, int]
    held: int


@dataclass(frozen=True, slots=True)
class Published:
    """What the control plane said of one engine at one moment. Blocks, sessions; None is unknown."""

    time: float
    engine: str
    state: str
    budget: int | None
    need: int | None
    """Most blocks needed at any horizon of the forecast, its last, which counts what is proven, aside."""
    cap: int | None
    brake: float
    why: str
    """What the brake believes."""
    sessions: int
    used_blocks: int | None
    preemptions: int | None
    held: int
    """Sessions of the whole pool that wait."""


@dataclass(slots=True)
class RunRecord:
    """All that a run left behind."""

    target: dict[str, float]
    sessions: list[SessionRecord] = field(default_factory=list)
    occupancy: list[Occupancy] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    """Once per second and engine, where there was a control plane in virtual time."""
    moved: int = 0
    """Sessions that were given another engine than the one they were on."""
    last_start: float = 0.0
    """When the last session was started: until then the number of live rollouts was held."""
    end: float = 0.0


class Player:
    """Keeps `live` rollouts going until the run's bound is reached."""

    def __init__(self, workload: Workload, router: Router, engines: Mapping[str, Backend], config: PlayConfig) -> None:
        """`engines` maps the addresses that the router answers with to what serves them."""
        self.record = RunRecord(target=dict(workload.target))
        self._workload = workload
        self._router = router
        self._engines = engines
        self._config = config
        self._started_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> RunRecord:
        """Play, and return the record (also at hand, and growing, as `record` meanwhile)."""
        self._started_at = asyncio.get_running_loop().time()
        sampler = asyncio.create_task(self._sample_occupancy())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.duration_s):
                    await self._start_sessions()
                    while self._tasks:
                        await asyncio.wait(self._tasks)
        finally:
            self.record.end = self._now()
            for task in (sampler, *self._tasks):
                task.cancel()
            await asyncio.gather(sampler, *self._tasks, return_exceptions=True)
        return self.record

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._started_at

    async def _start_sessions(self) -> None:
        slots = asyncio.Semaphore(self._config.live)
        started = 0
        while self._config.sessions is None or started < self._config.sessions:
            await slots.acquire()
            started += 1
            task = asyncio.create_task(self._play(self._workload.next_session()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: slots.release())
            self.record.last_start = self._now()

    async def _play(self, plan: SessionPlan) -> None:
        record = SessionRecord(plan.session_id, plan.workload_class, self._now())
        self.record.sessions.append(record)
        try:
            async with self._router.session(plan) as session:
                record.admitted = self._now()
                await self._play_turns(plan, session, record)
            record.outcome = "completed"
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        except Exception as error:
            record.outcome = "failed"
            log.warning("session %s failed: %r", plan.session_id, error)
            await asyncio.sleep(self._config.failure_pause_s)
        finally:
            record.end = self._now()

    async def _play_turns(self, plan: SessionPlan, session: RoutedSession, record: SessionRecord) -> None:
        context = list(plan.prompt)
        for number, turn in enumerate(plan.turns):
            if number:
                await asyncio.sleep(self._workload.gap_s(turn))
            context += plan.tool_tokens(number)
            context += await self._turn_with_retries(plan, session, record, number, context)

    async def _turn_with_retries(
        self, plan: SessionPlan, session: RoutedSession, record: SessionRecord, number: int, context: list[int]
    ) -> list[int]:
        """Play one turn and return its tokens."""
        for left in range(self._config.turn_retries, -1, -1):
            try:
                return await self._play_turn(plan, session, record, number, context)
            except (httpx.HTTPError, RuntimeError) as error:
                if not left:
                    raise
                log.info("turn %d of session %s failed: %r", number, plan.session_id, error)
                await asyncio.sleep(self._config.failure_pause_s)
        raise AssertionError("the last try returns or raises")

    async def _play_turn(
        self, plan: SessionPlan, session: RoutedSession, record: SessionRecord, number: int, context: list[int]
    ) -> list[int]:
        turn = plan.turns[number]
        engine = await session.place(number, context)
        if engine not in self._engines:
            raise LookupError(f"the router placed turn {number} on {engine!r}, which is not one of the engines")
        record.engine = engine
        meter = _Meter(session, number, len(context), self._config.report_interval_s)
        start = self._now()
        completion = await self._engines[engine].complete(
            f"{plan.session_id}/{number}", context, turn.output_tokens, meter.on_tokens
        )
        prompt, cached = len(context), completion.cached_tokens
        record.turns.append(TurnRecord(engine, start, self._now(), meter.ttft_s, prompt, turn.output_tokens, cached))
        session.report(Progress(number, prompt, turn.output_tokens, True, cached))
        return completion.token_ids

    async def _sample_occupancy(self) -> None:
        while True:
            by_engine = Counter(dict.fromkeys(self._engines, 0))
            held = 0
            for session in self.record.sessions:
                if session.outcome == "living":
                    if session.engine is None:
                        held += 1
                    else:
                        by_engine[session.engine] += 1
            self.record.occupancy.append(Occupancy(self._now(), dict(by_engine), held))
            await asyncio.sleep(1.0)


class _Meter:
    """Takes the time to the first token of a request and reports its growth now and then."""

    def __init__(self, session: RoutedSession, turn: int, prompt: int, interval_s: float) -> None:
        self._session = session
        self._turn = turn
        self._prompt = prompt
        self._interval_s = interval_s
        self._clock = asyncio.get_running_loop().time
        self._start = self._reported = self._clock()
        self.ttft_s = 0.0

    def on_tokens(self, count: int) -> None:
        now = self._clock()
        if self.ttft_s == 0.0:
            self.ttft_s = now - self._start
        if now - self._reported >= self._interval_s:
            self._reported = now
            self._session.report(Progress(self._turn, self._prompt, count))
