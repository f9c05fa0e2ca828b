"""The bound around a router."""

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import pytest

from bench.routers import BoundedRouter, Progress, RoutedSession, StickyRouter
from bench.workload import SessionPlan, Turn

PLAN = SessionPlan("s", "rlvr", "g", 1, (1,), (Turn(0, 1, 0.0),))


class Refusing:
    """A router that lets nobody in."""

    def session(self, plan: SessionPlan) -> RoutedSession:
        return self

    async def __aenter__(self) -> Self:
        raise RuntimeError("no")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise AssertionError("never entered")

    async def place(self, turn: int, prompt: object) -> str:
        raise AssertionError("never entered")

    def report(self, progress: Progress) -> None:
        raise AssertionError("never entered")


def test_sessions_above_the_bound_wait_first_come_first_served() -> None:
    async def main() -> None:
        router = BoundedRouter(StickyRouter(["e0", "e1"]), 2)
        entered: list[int] = []

        async def play(number: int) -> None:
            async with router.session(PLAN) as session:
                entered.append(number)
                assert await session.place(0, [1]) in ("e0", "e1")
                session.report(Progress(0, 1, 1, True))
                assert len(entered) <= number // 2 * 2 + 2
                await asyncio.sleep(0.01)

        await asyncio.gather(*(play(number) for number in range(6)))
        assert entered == list(range(6))

    asyncio.run(main())


def test_without_a_bound_nobody_waits() -> None:
    async def main() -> None:
        router = BoundedRouter(StickyRouter(["e0"]), None)
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(1.0):
                places = [await (await stack.enter_async_context(router.session(PLAN))).place(0, [1]) for _ in range(9)]
        assert places == ["e0"] * 9

    asyncio.run(main())


def test_a_session_that_fails_to_enter_gives_its_place_back() -> None:
    async def main() -> None:
        router = BoundedRouter(Refusing(), 1)
        for _ in range(3):
            async with asyncio.timeout(1.0):
                with pytest.raises(RuntimeError, match="no"):
                    await router.session(PLAN).__aenter__()

    asyncio.run(main())
