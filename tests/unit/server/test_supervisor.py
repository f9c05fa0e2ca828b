"""What the supervisor of several server processes decides."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import pytest

from moorage_server.runtime.supervisor import Backoff, Supervisor

PATIENCE_S = 5.0


class FakeWorker:
    """Does as the test says; ends in order when asked, unless it is stubborn."""

    def __init__(self, number: int, stubborn: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.pid: int | None = 1000 + number
        self.serving: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.asked = 0
        self._stubborn = stubborn

    def serve(self, words: str = "here") -> None:
        self.serving.set_result(words)

    def end(self, code: int) -> None:
        self.ended.set_result(code)

    def terminate(self) -> None:
        self.asked += 1
        if not self._stubborn:
            self.end(0)

    def kill(self) -> None:
        self.end(-signal.SIGKILL)


class House:
    """A supervisor at work, and all the workers that it ever started, by number."""

    def __init__(self, count: int, stubborn: bool = False, first_s: float = 0.0) -> None:
        self.started: list[list[FakeWorker]] = [[] for _ in range(count)]
        self.announced: list[str] = []
        self.refuse = 0
        self._news = asyncio.Event()
        self._stubborn = stubborn
        self.supervisor = Supervisor(count, self._start, self.announced.append, lambda: Backoff(first_s=first_s))
        self.run = asyncio.create_task(self.supervisor.run())

    def _start(self, number: int) -> FakeWorker:
        if self.refuse:
            self.refuse -= 1
            raise BlockingIOError("no more processes")
        worker = FakeWorker(number, self._stubborn)
        self.started[number].append(worker)
        self._news.set()
        return worker

    def counts(self) -> list[int]:
        return [len(workers) for workers in self.started]

    async def until(self, counts: list[int]) -> None:
        """Returns once so many were started of each."""
        async with asyncio.timeout(PATIENCE_S):
            while self.counts() != counts:
                self._news.clear()
                await self._news.wait()

    async def up(self) -> None:
        """All serve."""
        await self.until([1] + [0] * (len(self.started) - 1))
        self.started[0][0].serve("zero")
        await self.until([1] * len(self.started))
        for number, (worker,) in enumerate(self.started[1:], 1):
            worker.serve(f"worker {number}")
        await _settle()

    async def code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.run


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_pauses_double_up_to_a_bound_and_start_anew_after_a_long_life() -> None:
    backoff = Backoff(first_s=0.5, most_s=3, healthy_s=60)
    assert [backoff.after(lived) for lived in (0, 1, 59, 0, 60, 0)] == [0.5, 1, 2, 3, 0.5, 1]
    backoff.deaths = 10**6
    assert backoff.after(0) == 3


async def test_one_goes_ahead_and_it_is_announced_once_when_all_serve() -> None:
    house = House(3)
    await house.until([1, 0, 0])
    await _settle()
    assert house.counts() == [1, 0, 0]
    house.started[0][0].serve()
    await house.until([1, 1, 1])
    house.started[2][0].serve("two")
    await _settle()
    assert house.announced == []
    house.started[1][0].serve("one")
    await _settle()
    assert house.announced == ["one"]
    house.supervisor.on_signal(signal.SIGTERM)
    assert await house.code() == 0


async def test_one_that_dies_starts_again_and_nothing_is_announced_again() -> None:
    house = House(2)
    await house.up()
    house.started[1][0].end(-signal.SIGSEGV)
    await house.until([1, 2])
    house.started[1][1].serve()
    await _settle()
    house.started[0][0].end(0)
    await house.until([2, 2])
    assert len(house.announced) == 1
    house.supervisor.on_signal(signal.SIGTERM)
    assert await house.code() == 0
    assert [workers[-1].asked for workers in house.started] == [1, 1]


async def test_a_process_that_can_not_be_started_is_tried_again() -> None:
    house = House(2)
    await house.up()
    house.refuse = 3
    house.started[0][0].end(1)
    await house.until([2, 1])
    house.supervisor.on_signal(signal.SIGINT)
    assert await house.code() == 0


@pytest.mark.parametrize(("ended", "code"), [(2, 2), (1, 1), (-signal.SIGKILL, 1), (0, 1)])
async def test_at_the_start_the_end_of_one_is_the_end_of_all(ended: int, code: int) -> None:
    house = House(3)
    await house.until([1, 0, 0])
    house.started[0][0].end(ended)
    assert await house.code() == code
    assert house.counts() == [1, 0, 0]
    assert house.announced == []


async def test_at_the_start_the_others_are_ended_in_order() -> None:
    house = House(3)
    await house.until([1, 0, 0])
    house.started[0][0].serve()
    await house.until([1, 1, 1])
    house.started[2][0].end(1)
    assert await house.code() == 1
    assert [workers[0].asked for workers in house.started] == [1, 1, 0]
    assert house.announced == []


async def test_a_configuration_gone_bad_ends_only_a_server_that_nobody_serves_for() -> None:
    house = House(2)
    await house.up()
    house.started[1][0].end(-signal.SIGKILL)
    await house.until([1, 2])
    house.started[1][1].end(2)
    await house.until([1, 3])
    # The other one served on; now it does not.
    house.started[0][0].end(-signal.SIGKILL)
    await _settle()
    house.started[1][2].end(2)
    assert await house.code() == 2


async def test_nobody_is_started_again_while_it_ends() -> None:
    house = House(2, stubborn=True)
    await house.up()
    house.supervisor.on_signal(signal.SIGTERM)
    await _settle()
    house.started[0][0].end(-signal.SIGSEGV)
    house.started[1][0].end(0)
    assert await house.code() == 0
    assert house.counts() == [1, 1]


async def test_the_pause_before_a_new_start_does_not_hold_up_the_end() -> None:
    house = House(2, first_s=3600)
    await house.up()
    house.started[1][0].end(1)
    await _settle()
    house.supervisor.on_signal(signal.SIGTERM)
    assert await house.code() == 0
    assert house.counts() == [1, 1]


@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_second_signal_ends_at_once(second: signal.Signals, code: int) -> None:
    house = House(2, stubborn=True)
    await house.up()
    house.supervisor.on_signal(signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.shield(house.run)
    assert not house.run.done()
    house.supervisor.on_signal(second)
    assert await house.code() == code
    assert [workers[0].ended.result() for workers in house.started] == [-signal.SIGKILL] * 2


async def test_a_signal_before_the_start_is_over_ends_it_unannounced() -> None:
    house = House(2)
    await house.until([1, 0])
    house.supervisor.on_signal(signal.SIGTERM)
    assert await house.code() == 0
    assert (house.counts(), house.announced) == ([1, 0], [])
