"""The player, on emulated engines in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from types import TracebackType
from typing import Self

import pytest

from bench import virtual_time
from bench.backends import Completion, EmulatedBackend, OnTokens
from bench.emulator import EmulatedEngine, EngineConfig
from bench.player import PlayConfig, Player, RunRecord
from bench.routers import LeastLoadedRouter, Progress, Router, StickyRouter
from bench.summary import Summary, summarise
from bench.workload import SessionPlan, Workload

NAMES = ["e0", "e1"]


def play(
    config: PlayConfig, kind: str = "sticky", cap: int | None = None, blocks: int = 768
) -> tuple[RunRecord, dict[str, EmulatedEngine]]:
    async def main() -> tuple[RunRecord, dict[str, EmulatedEngine]]:
        engines = {name: EmulatedEngine(EngineConfig(name, name, num_blocks=blocks)) for name in NAMES}
        backends = {name: EmulatedBackend(engine) for name, engine in engines.items()}
        router: Router = StickyRouter(NAMES, cap) if kind == "sticky" else LeastLoadedRouter(NAMES)
        async with AsyncExitStack() as stack:
            for backend in backends.values():
                await stack.enter_async_context(backend)
            return await Player(Workload(seed=1), router, backends, config).run(), engines

    return virtual_time.run(main())


def figures(config: PlayConfig, kind: str, cap: int | None = None, blocks: int = 768) -> Summary:
    return summarise(play(config, kind, cap, blocks)[0], warmup_s=30.0)


def test_every_session_is_played_as_planned() -> None:
    record, engines = play(PlayConfig(live=8, sessions=30))
    workload = Workload(seed=1)
    plans = {plan.session_id: plan for plan in [workload.next_session() for _ in range(30)]}
    assert {session.session_id for session in record.sessions} == set(plans)
    for session in record.sessions:
        plan = plans[session.session_id]
        assert session.outcome == "completed"
        assert [turn.output_tokens for turn in session.turns] == [turn.output_tokens for turn in plan.turns]
        assert session.turns[-1].prompt_tokens + session.turns[-1].output_tokens == plan.final_context
        gaps = [after.start - before.end for before, after in pairwise(session.turns)]
        assert gaps == pytest.approx([turn.tool_gap_s for turn in plan.turns[1:]], abs=1e-6)
        assert all(turn.start < turn.start + turn.ttft_s <= turn.end for turn in session.turns)
    generated = sum(plan.output_tokens for plan in plans.values())
    assert sum(engine.counters.generation_tokens for engine in engines.values()) == generated
    assert all(engine.pool.free == engine.pool.total for engine in engines.values())


def test_the_same_seed_plays_the_same_run() -> None:
    config = PlayConfig(live=24, duration_s=40.0)
    assert play(config)[0] == play(config)[0]


def test_a_duration_cancels_what_still_lives_and_leaves_no_request_behind() -> None:
    record, engines = play(PlayConfig(live=10, duration_s=20.0))
    outcomes = Counter(session.outcome for session in record.sessions)
    assert record.end == pytest.approx(20.0)
    assert outcomes["cancelled"] == 10
    assert outcomes["living"] == 0
    assert all(engine.running == engine.waiting == 0 for engine in engines.values())


def test_live_rollouts_are_bounded_and_a_cap_holds_the_rest() -> None:
    record, _ = play(PlayConfig(live=20, duration_s=30.0), cap=4)
    assert all(sum(sample.by_engine.values()) <= 8 for sample in record.occupancy)
    assert max(sum(sample.by_engine.values()) + sample.held for sample in record.occupancy) == 20
    assert max(sample.held for sample in record.occupancy) >= 12
    waits = [session.admitted - session.start for session in record.sessions if session.admitted is not None]
    assert waits[:8] == [0.0] * 8
    assert max(waits) > 1.0


def test_a_sticky_session_stays_and_a_least_loaded_one_wanders() -> None:
    sticky, _ = play(PlayConfig(live=10, sessions=20))
    assert all(len({turn.engine for turn in session.turns}) == 1 for session in sticky.sessions)
    wandering, _ = play(PlayConfig(live=10, sessions=20), kind="least-loaded")
    agentic = [session for session in wandering.sessions if session.workload_class == "agentic"]
    assert any(len({turn.engine for turn in session.turns}) == 2 for session in agentic)


def test_too_many_sessions_collapse_the_cache_and_a_cap_prevents_it() -> None:
    config = PlayConfig(live=96, duration_s=120.0)
    crowded = figures(config, "least-loaded").steady
    capped = figures(config, "sticky", cap=10).steady
    roomy = figures(config, "sticky", cap=10, blocks=6_000).steady
    assert crowded is not None
    assert capped is not None
    assert roomy is not None
    assert crowded.continuation_hit_rate is not None
    assert crowded.continuation_hit_rate < 0.2
    assert capped.continuation_hit_rate is not None
    assert capped.continuation_hit_rate > 0.8
    assert roomy.continuation_hit_rate == pytest.approx(1.0, abs=0.01)
    assert crowded.samples_per_minute is not None
    assert capped.samples_per_minute is not None
    assert capped.samples_per_minute > 1.2 * crowded.samples_per_minute


class Recorder:
    """A router that sends everything to one place and keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, Progress]] = []

    def session(self, plan: SessionPlan) -> "Recorder":
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        return "e"

    def report(self, progress: Progress) -> None:
        self.reports.append((asyncio.get_running_loop().time(), progress))


class Metronome:
    """A backend that generates ten tokens a second."""

    async def complete(
        self, request_id: str, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens
    ) -> Completion:
        for count in range(1, output_tokens + 1):
            await asyncio.sleep(0.1)
            on_tokens(count)
        return Completion([1] * output_tokens, 0)


class Broken:
    """A backend that always fails."""

    async def complete(
        self, request_id: str, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens
    ) -> Completion:
        raise ConnectionError("no engine here")


def test_growth_is_reported_about_once_a_second_and_the_end_of_a_turn_at_once() -> None:
    recorder = Recorder()
    workload = Workload(seed=1)
    record = virtual_time.run(Player(workload, recorder, {"e": Metronome()}, PlayConfig(live=1, sessions=1)).run())
    plan = Workload(seed=1).session(record.sessions[0].workload_class, 0)
    done = [progress for _, progress in recorder.reports if progress.turn_done]
    assert [progress.turn for progress in done] == list(range(len(plan.turns)))
    assert done[-1].context_tokens == plan.final_context
    growing = [(time, progress) for time, progress in recorder.reports if not progress.turn_done]
    assert growing
    for (before, earlier), (after, later) in pairwise(growing):
        if earlier.turn == later.turn:
            assert 1.0 <= after - before + 1e-9 < 1.2
            assert later.context_tokens - earlier.context_tokens in (10, 11)


def test_failures_are_recorded_and_do_not_flood() -> None:
    config = PlayConfig(live=4, duration_s=10.0)
    record = virtual_time.run(Player(Workload(seed=1), Recorder(), {"e": Broken()}, config).run())
    outcomes = Counter(session.outcome for session in record.sessions)
    assert outcomes["completed"] == 0
    assert 36 <= outcomes["failed"] <= 44


def test_a_run_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="a number of sessions or a duration"):
        PlayConfig()
