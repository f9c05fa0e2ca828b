"""A fake control plane, served, and clients of it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from moorage import AsyncClient, Client
from tests.unit.client.fake_scheduler import FakeScheduler, serve

#: An outage ends a call at once instead of after three seconds of retries.
NO_RETRIES = (("grpc.enable_retries", 0),)


@pytest.fixture
def fake() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def target(fake: FakeScheduler) -> Iterator[str]:
    with serve(fake) as address:
        yield address


@pytest.fixture
def nowhere() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
async def client(target: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(target, options=NO_RETRIES, release_timeout=1.0) as made:
        yield made


@pytest.fixture
def sync_client(target: str) -> Iterator[Client]:
    with Client(target, options=NO_RETRIES, release_timeout=1.0) as made:
        yield made
