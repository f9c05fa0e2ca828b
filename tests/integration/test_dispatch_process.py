"""Streams at a server process: an outage of its store, its end, and the Python client that lives through both."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import grpc
import pytest

from moorage import AsyncClient, SessionProgress, Unavailable
from moorage.v1 import scheduler_pb2 as pb
from tests.conftest import RedisServer
from tests.contract.plane import eventually as eventually_async
from tests.contract.streams import Stream
from tests.integration.engines import Engines
from tests.integration.processes import Server, Start, eventually

Code = grpc.StatusCode
QUICK = {"MOORAGE_HEALTH_CHECK_INTERVAL_S": "0.05", "MOORAGE_HEALTH_CHECK_TIMEOUT_S": "0.5"}
TWO_SESSIONS = "{default: {policy: static, static_cap: 2, epoch_interval_s: 0.2}}"


@pytest.fixture
def server(start: Start, own_redis_server: RedisServer) -> Server:
    made = start("--redis-url", own_redis_server.url, MOORAGE_POOLS=TWO_SESSIONS, **QUICK)
    eventually(made.api.ready)
    return made


async def test_many_sessions_at_once_over_one_client(start: Start, redis_server: RedisServer) -> None:
    server = start("--redis-url", redis_server.url, MOORAGE_REDIS_KEY_PREFIX="many-at-once")
    eventually(server.api.ready)

    async def live(stream: Any, number: int) -> None:
        sid = f"s{number}"
        admitted = await stream.admit(sid, max_wait=20, prompt_tokens=64, max_context_tokens=256)
        assert admitted.decision == pb.DECISION_PLACE
        for turn in range(1, 4):
            # The report is under way when the next turn is asked for: it is carried out first.
            progress = SessionProgress(session_id=sid, lease_token=admitted.lease.token, turn=turn, context_tokens=100)
            ack, placed = await asyncio.gather(
                stream.report(progress), stream.place(sid, lease_token=admitted.lease.token, turn=turn)
            )
            assert ack.known
            assert (placed.decision, placed.moved) == (pb.DECISION_PLACE, False)
        assert (await stream.release(sid, lease_token=admitted.lease.token, outcome="COMPLETED")).released

    with Engines(server.api, "engine-0", "engine-1", blocks=1_000):
        async with AsyncClient(server.address) as client, client.dispatch() as stream:
            await asyncio.gather(*(live(stream, n) for n in range(60)))
    assert server.terminate() == 0


async def test_an_outage_of_the_store_passes(server: Server, own_redis_server: RedisServer) -> None:
    with Engines(server.api, "engine-0"):
        async with AsyncClient(server.address, timeout=2.0) as client, client.dispatch() as stream:
            admitted = await stream.admit("s", max_wait=10, prompt_tokens=64)
            assert admitted.decision == pb.DECISION_PLACE
            raw = Stream(client.scheduler)
            own_redis_server.stop()
            place = pb.PlaceRequest(session_id="s", lease_token=admitted.lease.token)
            assert (await raw.ask(place)).error.code == Code.UNAVAILABLE.value[0]
            assert raw.code is None, "the stream outlives the outage"
            with pytest.raises(Unavailable) as caught:
                await stream.place("s", lease_token=admitted.lease.token)
            assert caught.value.reason == "STORE_UNAVAILABLE"
            own_redis_server.start()

            async def back() -> bool:
                try:
                    return (await stream.admit("t", prompt_tokens=64)).decision == pb.DECISION_PLACE
                except Unavailable:
                    return False

            await eventually_async(back, 30.0)
            # The store lost its memory, as this Redis keeps nothing: the session is unknown, not invented.
            assert (await raw.ask(place)).error.code == Code.NOT_FOUND.value[0]
            await raw.close()


async def test_a_server_that_ends_answers_what_it_has_read(start: Start, own_redis_server: RedisServer) -> None:
    env = {"MOORAGE_POOLS": TWO_SESSIONS, **QUICK}
    first = start("--redis-url", own_redis_server.url, **env)
    eventually(first.api.ready)
    with Engines(first.api, "engine-0"):
        async with AsyncClient(first.address) as client:
            for sid in ("one", "two"):
                assert (await client.admit(sid, prompt_tokens=64, max_wait=10)).decision == pb.DECISION_PLACE
            stream = Stream(client.scheduler)
            request = pb.AdmitRequest(session_id="three", prompt_tokens=64)
            request.max_wait.FromSeconds(60)
            (waiting,) = stream.send(request)
            place = pb.PlaceRequest(session_id="one", lease_token="x")
            assert (await stream.ask(place)).error.code == Code.ABORTED.value[0]
            first.process.send_signal(signal.SIGTERM)
            held = (await stream.answer(waiting, within=30)).admit
            assert (held.decision, held.hold.position) == (pb.DECISION_HOLD, 1)
            assert await stream.ended(30) is Code.UNAVAILABLE
    assert first.process.wait(30) == 0


async def test_a_client_goes_on_over_the_next_server(start: Start, own_redis_server: RedisServer) -> None:
    env = {"MOORAGE_POOLS": TWO_SESSIONS, **QUICK}
    first = start("--redis-url", own_redis_server.url, **env)
    eventually(first.api.ready)
    port = first.address.rpartition(":")[2]
    async with AsyncClient(first.address, timeout=20.0) as client, client.dispatch() as stream:
        with Engines(first.api, "engine-0"):
            admitted = await stream.admit("s", max_wait=10, prompt_tokens=64)
        turns = asyncio.create_task(_turns(stream, admitted.lease.token))
        await asyncio.sleep(0.2)
        assert first.terminate() == 0
        second = start("--redis-url", own_redis_server.url, "--listen", f"127.0.0.1:{port}", **env)
        await asyncio.to_thread(eventually, second.api.ready)
        await asyncio.sleep(0.5)
        turns.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turns
        placed = await stream.place("s", lease_token=admitted.lease.token)
        assert placed.lease.token == admitted.lease.token
        assert (await stream.release("s", lease_token=admitted.lease.token, outcome="COMPLETED")).released


async def _turns(stream: Any, token: str) -> None:
    """Turn after turn; none may fail."""
    for turn in range(1, 1_000_000):
        placed = await stream.place("s", lease_token=token, turn=turn)
        assert placed.decision == pb.DECISION_PLACE
        await asyncio.sleep(0.01)
