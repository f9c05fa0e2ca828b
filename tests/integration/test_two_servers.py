"""Two server processes on one Redis: one ledger, one queue, one holder of the epochs."""

from __future__ import annotations

import json
import signal
import statistics
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.processes import PATIENCE_S, Api, Server, Start, eventually

EPOCH_S = 1.0
POOLS = f"{{default: {{policy: static, static_cap: 1, epoch_interval_s: {EPOCH_S}}}}}"


class Pair:
    """Two servers on one ledger, with one engine that takes one session."""

    def __init__(self, start: Start, redis: RedisServer) -> None:
        ledger = {"MOORAGE_REDIS_URL": redis.url, "MOORAGE_REDIS_KEY_PREFIX": f"i{uuid.uuid4().hex}"}
        self.a, self.b = (start(**ledger, MOORAGE_POOLS=POOLS) for _ in range(2))
        for server in (self.a, self.b):
            eventually(server.api.ready)

    def holder(self) -> Server:
        """The server that took the epochs."""
        return eventually(lambda: next((s for s in (self.a, self.b) if "epoch_taken" in s.log()), None))

    def other(self, server: Server) -> Server:
        return self.b if server is self.a else self.a


@pytest.fixture
def pair(start: Start, redis_server: RedisServer) -> Iterator[Pair]:
    servers = Pair(start, redis_server)
    # Heartbeats go through both, as if behind a load balancer; repeats of a sequence number do no harm.
    with Engines(servers.a.api, "engine-0"), Engines(servers.b.api, "engine-0"):
        yield servers


def _admitted(api: Api, session: str) -> pb.AdmitResponse:
    return eventually(lambda: a if (a := api.admit(session)).decision == pb.DECISION_PLACE else None)


def _warmed_up(pair: Pair) -> None:
    """Returns once the pool admits: after its first epoch."""
    pair.a.api.release("warm-up", _admitted(pair.a.api, "warm-up").lease.token)


def test_a_session_lives_on_both(pair: Pair) -> None:
    placed = _admitted(pair.a.api, "s")
    request = pb.PlaceRequest(session_id="s", lease_token=placed.lease.token, turn=1)
    again = pair.b.api.scheduler.Place(request, timeout=PATIENCE_S)
    assert again.decision == pb.DECISION_PLACE
    assert again.placement.instance_id == placed.placement.instance_id
    assert again.lease.token == placed.lease.token
    assert pair.b.api.release("s", placed.lease.token).released
    assert not pair.a.api.release("s", placed.lease.token).released


def test_a_retry_through_the_other_gets_the_first_answer(pair: Pair) -> None:
    _warmed_up(pair)
    request = pb.AdmitRequest(request_id=str(uuid.uuid4()), session_id="s", workload_class="rlvr", prompt_tokens=64)
    first = pair.a.api.scheduler.Admit(request, timeout=PATIENCE_S)
    assert first.decision == pb.DECISION_PLACE
    assert pair.b.api.scheduler.Admit(request, timeout=PATIENCE_S) == first
    assert pair.a.api.inspector.GetPool(ipb.GetPoolRequest()).active_sessions == 1


def test_a_caller_that_waits_at_one_wakes_when_the_other_releases(pair: Pair) -> None:
    lasted = []
    for number in range(7):
        living = _admitted(pair.b.api, f"living-{number}")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(pair.a.api.admit, f"waiting-{number}", max_wait_s=20)
            eventually(lambda: pair.b.api.inspector.GetPool(ipb.GetPoolRequest()).held_sessions == 1)
            assert not waiting.done()
            released = time.monotonic()
            assert pair.b.api.release(f"living-{number}", living.lease.token).released
            answer = waiting.result(PATIENCE_S)
        lasted.append(time.monotonic() - released)
        assert answer.decision == pb.DECISION_PLACE
        assert pair.a.api.release(f"waiting-{number}", answer.lease.token).released
    # Woken, not polled: on their own, servers look only every half second.
    assert statistics.median(lasted) < 0.15


def test_two_that_ask_for_one_session_at_once_get_one_admission(pair: Pair) -> None:
    _warmed_up(pair)
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit((pair.a, pair.b)[n % 2].api.admit, "s", max_wait_s=10) for n in range(16)]
        answers = [future.result(PATIENCE_S) for future in asked]
    assert {answer.decision for answer in answers} <= {pb.DECISION_PLACE, pb.DECISION_HOLD}
    tokens = {answer.lease.token for answer in answers if answer.decision == pb.DECISION_PLACE}
    assert len(tokens) == 1
    assert pair.b.api.inspector.GetPool(ipb.GetPoolRequest()).active_sessions == 1


def test_epochs_run_once(pair: Pair) -> None:
    pair.holder()
    before, started = _epochs(pair.b.api), time.monotonic()
    time.sleep(3 * EPOCH_S)
    run, most = _epochs(pair.b.api) - before, (time.monotonic() - started) / EPOCH_S + 1
    assert 2 <= run <= most
    assert (pair.a.log() + pair.b.log()).count("epoch_taken") == 1


def test_a_killed_holder_is_replaced_within_two_epochs(pair: Pair) -> None:
    holder = pair.holder()
    heir = pair.other(holder)
    placed = _admitted(heir.api, "first")
    killed = time.time()
    holder.process.send_signal(signal.SIGKILL)
    holder.process.wait(PATIENCE_S)
    taken = eventually(lambda: _taken_at(heir))
    assert taken - killed < 2 * EPOCH_S + 0.5
    before = _epochs(heir.api)
    eventually(lambda: _epochs(heir.api) >= before + 2)
    # What the dead one admitted lives on, and the queue moves.
    assert heir.api.admit("first").lease.token == placed.lease.token
    assert heir.api.release("first", placed.lease.token).released
    assert heir.api.admit("second", max_wait_s=10).decision == pb.DECISION_PLACE


def test_a_holder_that_stops_in_order_hands_the_epochs_over(pair: Pair) -> None:
    holder = pair.holder()
    heir = pair.other(holder)
    assert holder.terminate() == 0
    stopped = time.time()
    assert eventually(lambda: _taken_at(heir)) - stopped < EPOCH_S + 0.5


def _epochs(api: Api) -> int:
    return api.inspector.GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S).epochs


def _taken_at(server: Server) -> float | None:
    """When the server took the epochs, Unix time."""
    line = next((line for line in server.log().splitlines() if '"epoch_taken"' in line), None)
    return None if line is None else datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()
