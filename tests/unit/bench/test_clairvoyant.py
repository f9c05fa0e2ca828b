"""Admission that knows every plan: what it books, in which order, and what it gets from an engine."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import virtual_time
from bench.backends import EmulatedBackend
from bench.clairvoyant import FIRST_STEP_S, HALF_LIFE_TOKENS, ClairvoyantRouter, Course, Forecast, Pace
from bench.emulator import COSTS, EmulatedEngine, EngineConfig
from bench.player import PlayConfig, Player, RunRecord
from bench.routers import Progress
from bench.summary import figures
from bench.workload import SessionPlan, Turn, Workload

BLOCK = 4


def plan(prompt: int, *turns: tuple[int, int, int]) -> SessionPlan:
    """A session; turns are (tokens that the tool adds, tokens generated, steps of the gap before)."""
    made = tuple(Turn(new, output, gap * FIRST_STEP_S) for new, output, gap in turns)
    return SessionPlan("s", "agentic", "g", 1, tuple(range(prompt)), made)


def blocks_by_step(session: SessionPlan) -> list[int]:
    """Blocks that a session holds at the end of each step of its life, on an engine that keeps the first pace."""
    context = len(session.prompt)
    contexts = []
    for number, turn in enumerate(session.turns):
        if number:
            contexts += [context] * (round(turn.tool_gap_s / FIRST_STEP_S) + 1)
        context += turn.new_tokens
        contexts += [context + done for done in range(1, turn.output_tokens + 1)]
        context += turn.output_tokens
    return [-(-tokens // BLOCK) for tokens in contexts]


first_turns = st.tuples(st.just(0), st.integers(1, 40), st.just(0))
later_turns = st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(0, 30))
plans = st.builds(
    lambda prompt, first, later: plan(prompt, first, *later),
    st.integers(1, 60),
    first_turns,
    st.lists(later_turns, max_size=4),
)


@dataclass
class Life:
    """When, in steps, and where a session was admitted."""

    plan: SessionPlan
    start: int
    engine: str


async def live(router: ClairvoyantRouter, session_plan: SessionPlan, after: int, lives: list[Life]) -> None:
    """Live as planned, from `after` steps on, with a report in the middle of each turn."""
    await asyncio.sleep(after * FIRST_STEP_S)
    async with router.session(session_plan) as session:
        start = round(asyncio.get_running_loop().time() / FIRST_STEP_S)
        context = len(session_plan.prompt)
        for number, turn in enumerate(session_plan.turns):
            if number:
                await asyncio.sleep(turn.tool_gap_s + FIRST_STEP_S)
            context += turn.new_tokens
            engine = await session.place(number, range(context))
            if not number:
                lives.append(Life(session_plan, start, engine))
            half = turn.output_tokens // 2
            await asyncio.sleep(half * FIRST_STEP_S)
            session.report(Progress(number, context, half))
            await asyncio.sleep((turn.output_tokens - half) * FIRST_STEP_S)
            session.report(Progress(number, context, turn.output_tokens, True))
            context += turn.output_tokens


def lived(arrivals: Sequence[tuple[int, SessionPlan]], engines: int, blocks: int) -> list[Life]:
    """Play sessions that arrive after so many steps; return their lives in the order of admission."""

    async def main() -> list[Life]:
        router = ClairvoyantRouter([f"e{n}" for n in range(engines)], blocks, BLOCK)
        lives: list[Life] = []
        await asyncio.gather(*(live(router, session_plan, after, lives) for after, session_plan in arrivals))
        assert router.waiting == sum(router.living.values()) == 0
        return lives

    return virtual_time.run(main())


@given(st.lists(plans, min_size=1, max_size=6), st.data())
def test_a_forecast_peaks_at_what_is_needed_most_at_any_time(sessions: list[SessionPlan], data: st.DataObject) -> None:
    paths, needs = [], np.zeros(3_000)
    for session in sessions:
        stages = len(session.turns)
        turn = data.draw(st.integers(0, stages - 1))
        done = data.draw(st.integers(0, session.turns[turn].output_tokens - 1))
        paths.append(Course(session).path(2 * turn + 1, done, 0.0, FIRST_STEP_S))
        left = blocks_by_step(session)
        gone = sum(t.output_tokens + 1 + round(t.tool_gap_s / FIRST_STEP_S) for t in session.turns[: turn + 1])
        left = left[gone - 1 - session.turns[turn].output_tokens + done :]
        assert paths[-1].end == pytest.approx(len(left))
        assert paths[-1].blocks(np.arange(len(left)) + 0.999, BLOCK).tolist() == left
        needs[: len(left)] += left
    forecast = Forecast(paths, BLOCK)
    assert forecast.peak >= needs.max()
    # Where one ends just as another's tool is done, both count.
    times = np.concatenate([np.arange(3_000.0), [path.end for path in paths]])
    assert forecast.peak == np.sum([path.blocks(times, BLOCK) for path in paths], axis=0).max()
    one_by_one = Forecast((), BLOCK)
    for path in paths:
        one_by_one = one_by_one.added(path)
    assert one_by_one.peak == forecast.peak


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), plans), min_size=1, max_size=12), st.integers(1, 3), st.integers(8, 80))
def test_what_is_admitted_never_needs_more_blocks_than_there_are(
    arrivals: list[tuple[int, SessionPlan]], engines: int, blocks: int
) -> None:
    lives = lived(arrivals, engines, blocks)
    assert len(lives) == len(arrivals)
    held: dict[tuple[str, int], list[int]] = {}
    for life in lives:
        for step, need in enumerate(blocks_by_step(life.plan), life.start):
            held.setdefault((life.engine, step), []).append(need)
    assert all(sum(needs) < blocks or len(needs) == 1 for needs in held.values())


@settings(deadline=None)
@given(st.lists(plans, min_size=2, max_size=12), st.integers(1, 3), st.integers(8, 80))
def test_who_came_first_enters_first(sessions: list[SessionPlan], engines: int, blocks: int) -> None:
    lives = lived([(after, session) for after, session in enumerate(sessions)], engines, blocks)
    assert [life.plan for life in lives] == sessions
    assert [life.start for life in lives] == sorted(life.start for life in lives)


def test_sessions_share_an_engine_that_their_largest_contexts_would_not_fit() -> None:
    # 15 and 20 blocks in the end, of 21: but the first has ended long before.
    lives = lived([(0, plan(40, (0, 20, 0))), (0, plan(4, (0, 76, 0)))], 1, 22)
    assert [life.start for life in lives] == [0, 0]
    # The other way round both would end with all they need.
    lives = lived([(0, plan(40, (0, 20, 0))), (0, plan(60, (0, 20, 0)))], 1, 22)
    assert [life.start for life in lives] == [0, 20]


def test_a_session_goes_where_the_peak_is_lowest() -> None:
    lives = lived([(0, plan(40, (0, 20, 0))), (0, plan(4, (0, 4, 0))), (0, plan(4, (0, 4, 0)))], 2, 100)
    assert [life.engine for life in lives] == ["e0", "e1", "e1"]


def test_alone_a_session_enters_whatever_it_needs() -> None:
    lives = lived([(0, plan(400, (0, 20, 0))), (1, plan(400, (0, 20, 0))), (2, plan(4, (0, 1, 0)))], 1, 8)
    assert [life.start for life in lives] == [0, 20, 40]


def test_one_that_gives_up_waiting_blocks_nobody_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        router = ClairvoyantRouter(["e0"], 22, BLOCK)
        lives: list[Life] = []
        first = asyncio.create_task(live(router, plan(40, (0, 20, 0)), 0, lives))
        large = asyncio.create_task(live(router, plan(80, (0, 1, 0)), 1, lives))
        small = asyncio.create_task(live(router, plan(1, (0, 1, 0)), 2, lives))
        await asyncio.sleep(4 * FIRST_STEP_S)
        # The small one would fit, and is not let past.
        assert (router.living, router.waiting) == ({"e0": 1}, 2)
        large.cancel()
        await asyncio.wait([large, small])
        assert small.result() is None
        assert not first.done()
        await first
        assert (router.living, router.waiting) == ({"e0": 0}, 0)

    virtual_time.run(main())


def test_one_that_gives_up_as_it_is_admitted_gives_its_place_to_the_next() -> None:
    async def main() -> None:
        router = ClairvoyantRouter(["e0"], 22, BLOCK)
        whole = plan(80, (0, 1, 0))
        first = await router.session(whole).__aenter__()
        waiting = [asyncio.create_task(router.session(whole).__aenter__()) for _ in range(2)]
        await asyncio.sleep(0.1)
        await first.__aexit__(None, None, None)
        assert (router.living, router.waiting) == ({"e0": 1}, 1)
        waiting[0].cancel()
        second = await waiting[1]
        assert waiting[0].cancelled()
        assert (router.living, router.waiting) == ({"e0": 1}, 0)
        await second.__aexit__(None, None, None)
        assert router.living == {"e0": 0}

    virtual_time.run(main())


def test_a_turn_that_is_tried_again_begins_again() -> None:
    async def main() -> None:
        router = ClairvoyantRouter(["e0"], 22, BLOCK)
        async with router.session(plan(8, (0, 40, 0))) as session:
            for _ in range(2):
                await session.place(0, range(8))
                await asyncio.sleep(30 * FIRST_STEP_S)
                session.report(Progress(0, 8, 30))
            assert router.pace("e0").step_s == pytest.approx(FIRST_STEP_S)
            # It has 38 of 48 tokens: 12 blocks in 8 steps, where this one has 7, so that 2 of 21 are left.
            assert await router.session(plan(20, (0, 8, 0))).__aenter__()
            waits = asyncio.create_task(router.session(plan(4, (0, 20, 0))).__aenter__())
            await asyncio.sleep(0)
            assert router.waiting == 1
            waits.cancel()

    virtual_time.run(main())


def test_the_pace_follows_what_is_reported() -> None:
    pace = Pace()
    assert pace.step_s == FIRST_STEP_S
    for _ in range(200):
        pace.learn(1.0, 100)
    assert pace.step_s == pytest.approx(0.01, rel=0.001)
    for _ in range(round(HALF_LIFE_TOKENS / 50)):
        pace.learn(1.0, 50)
    assert pace.step_s == pytest.approx(0.015, rel=0.01)
    # Time in which nothing was generated counts too.
    before = pace.step_s
    pace.learn(1.0, 0)
    assert pace.step_s > before


@pytest.mark.parametrize("kind", COSTS)
def test_on_an_engine_what_was_computed_stays_cached_and_nobody_is_preempted(kind: str) -> None:
    async def main() -> tuple[RunRecord, list[EmulatedEngine]]:
        engines = [EmulatedEngine(EngineConfig(f"e{n}", num_blocks=768, costs=COSTS[kind])) for n in range(2)]
        backends = {engine.config.instance_id: EmulatedBackend(engine) for engine in engines}
        router = ClairvoyantRouter(list(backends), 768, EngineConfig().block_size)
        async with AsyncExitStack() as stack:
            for backend in backends.values():
                await stack.enter_async_context(backend)
            record = await Player(Workload(seed=3), router, backends, PlayConfig(live=64, duration_s=30.0)).run()
        assert router.waiting == sum(router.living.values()) == 0
        return record, engines

    record, engines = virtual_time.run(main())
    found = figures(record, 0.0, record.end, 32)
    assert found.continuation_hit_rate is not None
    assert found.continuation_hit_rate > 0.99
    assert found.completed > 20
    assert [engine.counters.preemptions for engine in engines] == [0, 0]
    # The memory is what they waited for.
    assert max(moment.held for moment in record.occupancy) > 10
