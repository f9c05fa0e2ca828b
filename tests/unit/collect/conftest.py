"""The two ends that the collector talks to, started and ended with each test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest

from moorage.v1 import scheduler_pb2_grpc
from tests.unit.collect.fakes import Answer, FakeEngine, FakeScheduler, StartEngine


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts fake engines; all end with the test."""
    async with AsyncExitStack() as stack:

        async def start(answers: dict[str, Answer]) -> FakeEngine:
            engine = FakeEngine(answers)
            server = await asyncio.start_server(engine.handle, "127.0.0.1", 0)
            stack.callback(server.close)
            engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return engine

        yield start


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    """A scheduler on a free port of the loopback."""
    servicer = FakeScheduler()
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(grace=None)
