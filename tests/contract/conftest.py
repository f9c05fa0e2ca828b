"""What the tests of the contract share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from moorage_server.core.config import PoolConfig
from moorage_server.store.redis_store import RedisStore
from tests.conftest import Backend
from tests.contract.plane import POOL, Plane, capped
from tests.contract.steps import NOON, Steps


@pytest.fixture
async def steps(backend: Backend, store: RedisStore) -> AsyncIterator[Steps]:
    """A pool with one serving instance, at a stopped clock. The books must balance when the test is through."""
    await backend.clock.set(NOON)
    made = Steps(backend, store)
    await made.snapshot()
    yield made
    await made.balanced()


@pytest.fixture
def bare(backend: Backend, store: RedisStore) -> Steps:
    """A pool that nobody has named yet; the clock runs."""
    return Steps(backend, store)


Planes = Callable[..., Awaitable[list[Plane]]]


@pytest.fixture
async def planes(backend: Backend) -> AsyncIterator[Planes]:
    """``await planes(2, config)``: so many server processes on one store. The books must balance in the end."""
    async for start in planes_on(backend):
        yield start


async def planes_on(backend: Backend, made: Callable[[Plane], None] = lambda plane: None) -> AsyncIterator[Planes]:
    """The body of the fixture; ``made`` is told of each plane before it starts."""
    running: list[Plane] = []

    async def start(count: int = 1, config: PoolConfig | None = None) -> list[Plane]:
        started = [Plane(backend, {POOL: config or capped(2)}) for _ in range(count)]
        for plane in started:
            made(plane)
            await plane.start()
        running.extend(started)
        return started

    yield start
    await asyncio.gather(*(plane.stop() for plane in running))
    if running:
        await running[0].balanced()
