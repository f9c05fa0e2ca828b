"""Each kind of store behind TLS and a password: opened, used and listened to, and closed to who may not come in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from moorage_server.errors import StoreUnavailable
from moorage_server.store import connect
from moorage_server.store.records import Snapshot
from moorage_server.store.redis_store import RedisStore
from tests.redis_setups import MASTER, PASSWORD, Cluster, Guard, Sentinels, Single, needs

KINDS = {"single": Single, "sentinels": Sentinels, "cluster": Cluster}


class Guarded:
    """A setup, and how a store on it is opened."""

    def __init__(self, setup: Single | Sentinels | Cluster) -> None:
        self._setup = setup
        self.ca = setup.guard.ca
        self.url = setup.guard.url() if isinstance(setup, Sentinels) else setup.url

    async def open(self, url: str) -> RedisStore:
        """The store, with another URL's credentials."""
        if isinstance(self._setup, Sentinels):
            addresses = [("127.0.0.1", node.port) for node in self._setup.sentinels]
            return await connect.open_store(url, embedded=False, sentinels=addresses, master_name=MASTER)
        return await connect.open_store(url, embedded=False, cluster=isinstance(self._setup, Cluster))


@pytest.fixture(scope="module", params=KINDS)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    needs("redis-server")
    folder: Path = tmp_path_factory.mktemp("guarded")
    with closing(KINDS[request.param](folder, guard=Guard(folder))) as setup:
        yield Guarded(setup)


@pytest.mark.parametrize("told", ["SSL_CERT_FILE", "ssl_ca_certs"])
async def test_it_is_used_and_listened_to(guarded: Guarded, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = guarded.url
    if told == "SSL_CERT_FILE":
        monkeypatch.setenv(told, str(guarded.ca))
    else:
        url += f"?{told}={guarded.ca}"
    store = await guarded.open(url)
    await store.ping()
    listening = asyncio.Event()

    async def listen() -> None:
        async for _ in store.listen(lambda *_: None):
            listening.set()

    task = asyncio.create_task(listen())
    async with asyncio.timeout(5):
        await listening.wait()
    assert await store.snapshot(told, Snapshot("0|engine", "1", 1, "SERVING", 16, b"")) == "NEW"
    assert told in await store.pools()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.close()


@pytest.mark.parametrize("wrong", ["password", "authority"])
async def test_who_may_not_come_in_finds_it_unavailable(
    guarded: Guarded, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = guarded.url
    if wrong == "password":
        monkeypatch.setenv("SSL_CERT_FILE", str(guarded.ca))
        url = url.replace(PASSWORD, "guess")
    store = await guarded.open(url)
    with pytest.raises(StoreUnavailable) as caught:
        await store.ping()
    assert "guess" not in str(caught.value)
    assert PASSWORD not in str(caught.value)
    await store.close()
