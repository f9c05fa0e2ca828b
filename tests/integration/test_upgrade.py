"""A rolling upgrade: servers of the baseline release and of this version on one Redis, and the baseline's client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from moorage import AsyncClient
from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.store import keys
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.load import Load
from tests.integration.processes import PATIENCE_S, Api, Server, Start, environment, eventually
from tests.ledger_audit import audit

ROOT = Path(__file__).parents[2]
CAP = 6
POOLS = f"{{default: {{policy: static, static_cap: {CAP}, epoch_interval_s: 0.5}}}}"

#: What a rollout worker that was never upgraded does. Argument: the server.
_OLD_WORKER = """
import asyncio, sys
import moorage, moorage_server
from moorage import AsyncClient

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        async with client.session("old", workload_class="agentic", prompt_tokens=64, max_context_tokens=128) as s:
            for n in range(3):
                turn = await s.place(prompt_tokens=64 + n)
                s.report(cached_tokens=32, output_tokens=4)
        print(moorage.__file__, moorage_server.__file__, turn.endpoint, s.residency is not None)

asyncio.run(main())
"""


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline's source. A clone without its history asks where it came from for that one commit."""
    commit = (ROOT / "tests/fixtures/baseline.txt").read_text("utf-8").split()[-1]
    source = ("archive", "--format=tar", commit, "client", "server")
    archive = _git(*source)
    if archive.returncode != 0:
        _git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", commit)
        archive = _git(*source)
    if archive.returncode != 0:
        why = f"git has no commit {commit}: {archive.stderr.decode().strip()}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("baseline")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


class Rollout:
    """Servers of both versions on one ledger."""

    def __init__(self, start: Start, redis: RedisServer, baseline: Path) -> None:
        self.prefix = f"u{uuid.uuid4().hex}"
        self._redis, self._start = redis, start
        self._env = {"MOORAGE_REDIS_URL": redis.url, "MOORAGE_REDIS_KEY_PREFIX": self.prefix, "MOORAGE_POOLS": POOLS}
        self.old_path = {"PYTHONPATH": f"{baseline / 'client'}{os.pathsep}{baseline / 'server'}"}

    def old(self) -> Server:
        """A server of the baseline."""
        return self._ready(self._start(**self._env, **self.old_path))

    def new(self) -> Server:
        """A server of this version."""
        return self._ready(self._start(**self._env))

    @staticmethod
    def _ready(server: Server) -> Server:
        eventually(server.api.ready)
        return server

    async def balanced(self) -> None:
        """The books, with no server at work."""
        async with Redis.from_url(self._redis.url) as client:
            assert await audit(client, self.prefix, "default") == []


@pytest.fixture
def rollout(start: Start, redis_server: RedisServer, baseline: Path) -> Rollout:
    return Rollout(start, redis_server, baseline)


@contextlib.contextmanager
def _engines(*servers: Server) -> Iterator[None]:
    """Heartbeats of two engines through each server."""
    with contextlib.ExitStack() as beats:
        for server in servers:
            beats.enter_context(Engines(server.api, "engine-0", "engine-1", blocks=512))
        yield


def test_the_baseline_writes_the_schema_of_today(baseline: Path) -> None:
    """Another schema is another ledger: then no two versions run side by side, and the baseline is another one."""
    source = (baseline / "server/moorage_server/store/keys.py").read_text("utf-8")
    (schema,) = re.findall(r"^SCHEMA = (\d+)$", source, re.MULTILINE)
    assert int(schema) == keys.SCHEMA


def test_a_worker_of_the_baseline_needs_no_upgrade(rollout: Rollout, baseline: Path) -> None:
    server = rollout.new()
    with _engines(server):
        worker = subprocess.run(
            [sys.executable, "-c", _OLD_WORKER, server.address],
            env=environment(rollout.old_path),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert worker.returncode == 0, worker.stderr
    client, its_server, endpoint, measured = worker.stdout.split()
    assert client.startswith(str(baseline / "client"))
    assert its_server.startswith(str(baseline / "server"))
    assert endpoint.startswith("http://engine-")
    assert measured == "True"


def _admitted(api: Api, session: str) -> str:
    answer = eventually(lambda: a if (a := api.admit(session)).decision == pb.DECISION_PLACE else None)
    return answer.lease.token


def _turn(api: Api, session: str, token: str, turn: int, context: int) -> None:
    """One turn: placed, and reported with what it found in the cache."""
    place = pb.PlaceRequest(session_id=session, lease_token=token, turn=turn, prompt_tokens=context)
    placed = api.scheduler.Place(place, timeout=PATIENCE_S)
    assert (placed.decision, placed.lease.token) == (pb.DECISION_PLACE, token)
    progress = pb.SessionProgress(
        session_id=session, lease_token=token, turn=turn, context_tokens=context, cached_tokens=48, output_tokens=8
    )
    beat = api.scheduler.Heartbeat(pb.HeartbeatRequest(sessions=[progress]), timeout=PATIENCE_S)
    assert [item.known for item in beat.sessions] == [True]


def _release(api: Api, session: str, token: str, outcome: pb.Outcome) -> bool:
    request = pb.ReleaseRequest(session_id=session, lease_token=token, outcome=outcome)
    return api.scheduler.Release(request, timeout=PATIENCE_S).released


async def test_sessions_live_on_through_either_version(rollout: Rollout) -> None:
    """Each step of a life on the other version than the step before; both ways round."""
    old, new = rollout.old(), rollout.new()
    with _engines(old, new):
        for first, second in ((old.api, new.api), (new.api, old.api)):
            token = _admitted(first, "s")
            assert second.admit("s").lease.token == token
            for turn, api in enumerate((second, first, second, first)):
                _turn(api, "s", token, turn, 64 + 16 * turn)
            assert _release(second, "s", token, pb.OUTCOME_PAUSED)
            again = _admitted(first, "s")
            assert again != token
            _turn(second, "s", again, 4, 128)
            assert _release(first, "s", again, pb.OUTCOME_PAUSED)
            last = _admitted(second, "s")
            assert second.admit("s").lease.token == first.admit("s").lease.token == last
            for api in (first, second):
                session = api.inspector.GetSession(ipb.GetSessionRequest(session_id="s"), timeout=PATIENCE_S).session
                assert session.instance_id.startswith("engine-")
                assert api.inspector.GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S).active_sessions == 1
            assert _release(first, "s", last, pb.OUTCOME_COMPLETED)
            assert not _release(second, "s", last, pb.OUTCOME_COMPLETED)
    assert (old.terminate(), new.terminate()) == (0, 0)
    await rollout.balanced()


async def test_an_upgrade_and_a_rollback_under_load(rollout: Rollout) -> None:
    """Old, both, new, both, old again: the epochs go from one version to the other and back, and nothing is lost."""
    old = rollout.old()
    eventually(lambda: "epoch_taken" in old.log())
    new = rollout.new()
    with _engines(old, new):
        address = f"ipv4:{old.address},{new.address}"
        async with AsyncClient(address) as client:
            load = Load(client, "default", 2 * CAP + 2, stay=CAP)
            running = asyncio.create_task(load.run())
            await asyncio.sleep(2)
            assert await asyncio.to_thread(old.terminate) == 0
            await asyncio.to_thread(eventually, lambda: "epoch_taken" in new.log())
            upgraded = time.monotonic()
            await asyncio.sleep(2)
            assert sum(at > upgraded for at in load.placed_at) > 0
            rolled_back = await asyncio.to_thread(rollout.old)
            with _engines(rolled_back):
                # What lives at the end lives on through the version that came back.
                load.stop()
                await asyncio.wait_for(running, PATIENCE_S)
                assert await asyncio.to_thread(new.terminate) == 0
                await asyncio.to_thread(eventually, lambda: "epoch_taken" in rolled_back.log())
                for session, token in load.living.items():
                    _turn(rolled_back.api, session, token, 9, 96)
                print(load)
                assert (load.readmitted, load.errors["lost"], load.torn_at) == (0, 0, [])
                for session, token in load.living.items():
                    assert _release(rolled_back.api, session, token, pb.OUTCOME_COMPLETED)
    for server in (old, new, rolled_back):
        assert "epoch_failed" not in server.log()
    assert rolled_back.terminate() == 0
    await rollout.balanced()
