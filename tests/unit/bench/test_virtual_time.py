"""Virtual time: waits cost nothing, order is kept, a deadlock is said aloud."""

import asyncio
import time

import pytest

from bench import virtual_time


def test_an_hour_passes_at_once_and_in_order() -> None:
    async def main() -> tuple[float, list[str]]:
        order: list[str] = []

        async def wake(name: str, after: float) -> None:
            await asyncio.sleep(after)
            order.append(name)

        await asyncio.gather(wake("late", 3_600.0), wake("early", 0.5), wake("middle", 60.0))
        return asyncio.get_running_loop().time(), order

    started = time.monotonic()
    elapsed, order = virtual_time.run(main())
    assert elapsed == pytest.approx(3_600.0)
    assert order == ["early", "middle", "late"]
    assert time.monotonic() - started < 1.0


def test_timeouts_fire_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(90.0):
                await asyncio.sleep(1_000.0)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(90.0)


def test_waiting_for_nothing_is_an_error_instead_of_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer brings"):
        virtual_time.run(main())
