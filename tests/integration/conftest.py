"""Fixtures of the tests that run `moorage` as processes."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RedisServer
from tests.integration.processes import Server, Start, eventually
from tests.integration.proxies import Ledger


@contextlib.contextmanager
def serving(tmp_path_factory: pytest.TempPathFactory, *flags: str, **env: str) -> Iterator[Server]:
    """A server with flags and MOORAGE_* variables, to share; afterwards it may not have logged a traceback."""
    server = Server.start(tmp_path_factory.mktemp("serve") / "serve.log", *flags, **env)
    yield server
    server.end()
    assert "Traceback" not in server.log()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, with flags and MOORAGE_* variables; afterwards none may have logged a traceback."""
    servers: list[Server] = []

    def run(*flags: str, **env: str) -> Server:
        server = Server.start(tmp_path / f"serve-{len(servers)}.log", *flags, **env)
        servers.append(server)
        return server

    yield run
    for server in servers:
        server.end()
    for server in servers:
        assert "Traceback" not in server.log()


@pytest.fixture(scope="module")
def shared_server(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server on a real Redis for all tests of a file, which take a pool each."""
    env = {"MOORAGE_REDIS_URL": redis_server.url, "MOORAGE_REDIS_KEY_PREFIX": f"i{uuid.uuid4().hex}"}
    with serving(tmp_path_factory, **env) as server:
        eventually(server.api.ready)
        yield server


@pytest.fixture(scope="module")
def conformance_servers(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of the servers that the conformance table needs, by the variables that name them to its runners."""
    # Nobody listens there as long as this socket is bound.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{nobody.getsockname()[1]}/0"
        with serving(tmp_path_factory, MOORAGE_REDIS_URL=url) as down:
            yield {"MOORAGE_SERVER": shared_server.address, "MOORAGE_SERVER_STORE_DOWN": down.address}


@pytest.fixture
def pool() -> str:
    """Name of a pool that nobody else uses."""
    return f"pool-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with the embedded store for all tests of the file, which take a pool each."""
    with serving(tmp_path_factory, "--embedded") as running:
        eventually(running.api.ready)
        yield running


@pytest.fixture
def ledger(server: Server, pool: str) -> Ledger:
    return Ledger(server, pool)
