"""A store that goes away under a running server, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from fakeredis import FakeServer

from moorage.v1 import scheduler_pb2 as pb
from tests.conftest import RedisServer, make_backend
from tests.contract.plane import POOL, Plane, capped, eventually, refused


class Outage:
    """A server with a store that can be taken away."""

    def __init__(self, plane: Plane, down: Callable[[], None], up: Callable[[], None]) -> None:
        self.plane, self.down, self.up = plane, down, up


@pytest.fixture(params=["fakeredis", "redis"])
async def outage(request: pytest.FixtureRequest) -> AsyncIterator[Outage]:
    """On the embedded store, and on a Redis that stops answering."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("own_redis_server")
        backend, down, up = make_backend(server.url, 0.3), server.freeze, server.thaw
    else:
        fake = FakeServer()
        backend = make_backend(fake)

        def down() -> None:
            fake.connected = False

        def up() -> None:
            fake.connected = True

    plane = Plane(backend, {POOL: capped(1)})
    await plane.start()
    yield Outage(plane, down, up)
    up()
    await plane.stop()
    await plane.balanced()
    await backend.close()


async def test_an_outage_is_unavailable_for_everything_and_passes(outage: Outage) -> None:
    plane = outage.plane
    await plane.report()
    token = await plane.placed("s")
    outage.down()
    calls = (
        plane.admit("t"),
        plane.admit("u", wait=30),
        plane.place("s", token),
        # A store that only slept carries out what it was sent: this one must not end the session afterwards.
        plane.release("s", "1.x"),
        plane.progress("s", token),
        plane.report(),
    )
    for refusal in await asyncio.gather(*map(refused, calls)):
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
        assert refusal.retry.retry_delay.seconds == 1
        assert int(refusal.trailers["grpc-retry-pushback-ms"]) == 1_000
    outage.up()

    async def is_back() -> bool:
        try:
            return bool((await plane.progress("s", token)).known)
        except grpc.aio.AioRpcError:
            return False

    await eventually(is_back)
    answer = await plane.place("s", token)
    assert (answer.decision, answer.lease.token) == (pb.DECISION_PLACE, token)


async def test_an_outage_ends_a_wait(outage: Outage) -> None:
    plane = outage.plane
    await plane.report()
    await plane.placed("s")
    waiting = await plane.waits("t")
    outage.down()
    refusal = await asyncio.wait_for(refused(waiting), 10)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")


async def test_the_epochs_go_on_after_an_outage(outage: Outage) -> None:
    plane = outage.plane
    await plane.report()
    await eventually(lambda: _epochs(plane))
    outage.down()
    await asyncio.sleep(0.5)
    outage.up()
    before = await eventually(lambda: _epochs(plane))

    async def more() -> bool:
        return bool(await _epochs(plane) > before + 2)

    await eventually(more)


async def _epochs(plane: Plane) -> int:
    return int((await plane.books()).pool.get("epochs", 0))
