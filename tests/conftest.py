"""Stores for tests: the embedded one and a real Redis behind one fixture, each with a clock that tests may set."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fakeredis import FakeServer
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from moorage_server.store import connect, scripts
from moorage_server.store.cluster import ClusterClient
from moorage_server.store.redis_store import RedisStore
from tests.redis_setups import Cluster, needs

#: How scripts read the time, and how they read it in tests: from a key, while there is one.
_CLOCK_LINE = "local now = clock[1] * 1000 + math.floor(clock[2] / 1000)"
_CLOCK_HOOK = "now = tonumber(call('GET', '{key}') or now)"
#: A busy machine is no outage, seconds.
_PATIENCE_S = 20.0


class RedisServer:
    """A redis-server of our own, without persistence, that a test may stop and start again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        program = shutil.which("redis-server")
        assert program is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        # Tests may put a server to sleep.
        options += ["--enable-debug-command", "local"]
        self._process = subprocess.Popen([program, *options], cwd=self._folder, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            try:
                with SyncRedis(port=self.port) as client:
                    client.ping()
                return
            except RedisConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def freeze(self) -> None:
        """Keeps its connections, and answers nobody."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Carries on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Returns once it is gone; all it held is lost."""
        if self._process is not None:
            self.thaw()
            self._process.terminate()
            self._process.wait(timeout=10)
            self._process = None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis, shared by all tests of the session: do not stop it."""
    needs("redis-server")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A real Redis for one test, which may stop it."""
    needs("redis-server")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


class Clock:
    """The store's clock. It runs by itself until it is set; then it moves only when told."""

    def __init__(self, client: Redis, key: str) -> None:
        self._client, self._key = client, key
        self.now_ms = 0

    async def set(self, now_ms: int) -> None:
        """Stops the clock at a time."""
        self.now_ms = now_ms
        await self._client.set(self._key, now_ms)

    async def advance(self, ms: int) -> None:
        """Moves a stopped clock; it may go back."""
        await self.set(self.now_ms + ms)


class Backend:
    """One store, empty, private to a test. ``open`` gives the view of it that one server process has."""

    def __init__(self, kind: str, client: Redis, another: Callable[[], Redis | ClusterClient], prefix: str) -> None:
        self.kind, self.client, self.prefix = kind, client, prefix
        self.clock = Clock(client, f"{prefix}:clock")
        self._another = another
        self._opened: list[RedisStore] = []

    def open(self) -> RedisStore:
        """A store of its own connections; closed with the backend."""
        store = RedisStore(self._another(), self._another(), self.prefix)
        self._opened.append(store)
        return store

    async def close(self) -> None:
        """Closes all that was opened."""
        for store in self._opened:
            await store.close()
        await self.client.aclose()


def settable_clock(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """Lets the scripts read the time from a key where there is one."""
    plain = scripts.source
    hook = _CLOCK_HOOK.format(key=f"{prefix}:clock")

    def with_clock(name: str) -> str:
        head, line, rest = plain(name).partition(_CLOCK_LINE)
        assert line, f"{name}.lua does not read the time where it is expected"
        return f"{head}{line} {hook}{rest}"

    monkeypatch.setattr(scripts, "source", with_clock)


def make_backend(store: FakeServer | str, timeout_s: float = _PATIENCE_S, *, cluster: bool = False) -> Backend:
    """A backend on a fakeredis, on the Redis at a URL, or on a Cluster whose only master is there."""
    prefix = f"t{uuid.uuid4().hex}"

    def one() -> Redis:
        if isinstance(store, FakeServer):
            return connect.embedded_clients(store)[0]
        return connect.clients(store, timeout_s)[0]

    if cluster:
        assert isinstance(store, str)
        return Backend("cluster", one(), lambda: ClusterClient(store, timeout_s), prefix)
    return Backend("fakeredis" if isinstance(store, FakeServer) else "redis", one(), one, prefix)


@pytest.fixture(scope="session")
def small_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Cluster of one master, shared by all tests of the session: where the clock is, which all pools share, too."""
    needs("redis-server")
    with closing(Cluster(tmp_path_factory.mktemp("cluster"), masters=1)) as cluster:
        yield cluster


@pytest.fixture(params=["fakeredis", "redis", "cluster"])
async def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backend]:
    """The same test on every kind of store."""
    if request.param == "fakeredis":
        made = make_backend(FakeServer())
    elif request.param == "redis":
        made = make_backend(request.getfixturevalue("redis_server").url)
    else:
        made = make_backend(request.getfixturevalue("small_cluster").url, cluster=True)
    settable_clock(monkeypatch, made.prefix)
    yield made
    await made.close()


@pytest.fixture
def store(backend: Backend) -> RedisStore:
    """One server process's view of the backend."""
    return backend.open()
