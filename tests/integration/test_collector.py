"""`moorage collect vllm` as a process: recorded engine pages over HTTP in, instances of a real server out."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator

import pytest

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import operator_pb2 as opb
from moorage.v1 import scheduler_pb2 as pb
from tests.integration.engines import ReplayedEngine
from tests.integration.processes import COMMAND, PATIENCE_S, Api, Server, environment, eventually


class Collected:
    """A pool that a collector process fills from one replayed engine."""

    def __init__(self, engine: ReplayedEngine, api: Api, pool: str, process: subprocess.Popen[str]) -> None:
        self.engine, self.api, self.pool, self.process = engine, api, pool, process

    def instance(self) -> ipb.Instance | None:
        """The instance as the server sees it."""
        request = ipb.ListInstancesRequest(pool=self.pool)
        instances = self.api.inspector.ListInstances(request, timeout=PATIENCE_S).instances
        return instances[0] if instances else None

    def becomes(self, true: Callable[[ipb.Instance], bool]) -> ipb.Instance:
        """Waits until something is true of the instance."""

        def probe() -> ipb.Instance | None:
            instance = self.instance()
            return instance if instance is not None and true(instance) else None

        return eventually(probe)


@pytest.fixture
def collected(shared_server: Server, pool: str) -> Iterator[Collected]:
    api = shared_server.api
    config = opb.PoolConfig()
    config.heartbeat_interval.FromMilliseconds(200)
    config.gone_after.FromMilliseconds(1500)
    config.epoch_interval.FromMilliseconds(200)
    api.operator.ConfigurePool(opb.ConfigurePoolRequest(pool=pool, config=config), timeout=PATIENCE_S)
    engine = ReplayedEngine()
    command = [*COMMAND, "collect", "vllm", "--url", f"engine-a={engine.url}", "--pool", pool, "--interval", "100ms"]
    process = subprocess.Popen(
        command, env=environment({"MOORAGE_SERVER": shared_server.address}), stderr=subprocess.PIPE, text=True
    )
    yield Collected(engine, api, pool, process)
    process.kill()
    process.communicate()
    engine.leave()


def test_an_engine_is_registered_with_what_it_tells(collected: Collected) -> None:
    instance = collected.becomes(lambda i: i.snapshot.HasField("max_context_tokens"))
    snapshot = instance.snapshot
    assert (snapshot.instance_id, snapshot.endpoint) == ("engine-a", collected.engine.url)
    assert (snapshot.block_size, snapshot.total_blocks, snapshot.used_blocks) == (32, 767, 0)
    assert snapshot.state == pb.INSTANCE_STATE_SERVING
    assert snapshot.max_context_tokens == 8192
    assert not snapshot.HasField("cached_blocks"), "vLLM does not tell, and unknown is not zero"
    assert instance.freshness == ipb.FRESHNESS_FRESH


def test_load_and_overload_arrive(collected: Collected) -> None:
    collected.engine.show("lifecycle_04")
    running = collected.becomes(lambda i: i.snapshot.running == 3).snapshot
    assert (running.waiting, running.used_blocks) == (0, 186)
    collected.engine.show("lifecycle_10")
    overload = collected.becomes(lambda i: i.snapshot.waiting_capacity == 3).snapshot
    assert (overload.running, overload.waiting, overload.used_blocks) == (3, 3, 576)
    collected.engine.show("lifecycle_11")
    assert collected.becomes(lambda i: i.snapshot.preemptions_total == 1).snapshot.waiting == 0


def test_a_session_sleeps_with_its_engine_and_moves_when_it_restarts(collected: Collected) -> None:
    collected.becomes(lambda i: i.freshness == ipb.FRESHNESS_FRESH)
    placed = collected.api.admit("s", collected.pool, max_wait_s=20)
    assert placed.placement.endpoint == collected.engine.url
    request = pb.PlaceRequest(pool=collected.pool, session_id="s", lease_token=placed.lease.token)

    collected.engine.show("lifecycle_07")
    collected.becomes(lambda i: i.snapshot.state == pb.INSTANCE_STATE_SLEEPING)
    asleep = collected.api.scheduler.Place(request, timeout=PATIENCE_S)
    assert asleep.decision == pb.DECISION_HOLD

    collected.engine.show("lifecycle_08")
    collected.becomes(lambda i: i.snapshot.state == pb.INSTANCE_STATE_SERVING)
    awake = collected.api.scheduler.Place(request, timeout=PATIENCE_S)
    assert (awake.decision, awake.moved) == (pb.DECISION_PLACE, False)
    assert awake.placement.incarnation == placed.placement.incarnation

    collected.engine.show("lifecycle_12")
    collected.becomes(lambda i: i.snapshot.incarnation != placed.placement.incarnation)
    request.max_wait.FromSeconds(20)
    restarted = collected.api.scheduler.Place(request, timeout=PATIENCE_S)
    assert (restarted.decision, restarted.moved) == (pb.DECISION_PLACE, True)
    assert restarted.placement.incarnation != placed.placement.incarnation
    assert restarted.lease.token != placed.lease.token


def test_a_silent_engine_goes_stale_then_gone_and_returns(collected: Collected) -> None:
    collected.becomes(lambda i: i.freshness == ipb.FRESHNESS_FRESH)
    collected.engine.fall_silent()
    collected.becomes(lambda i: i.freshness == ipb.FRESHNESS_STALE)
    collected.becomes(lambda i: i.freshness == ipb.FRESHNESS_GONE)
    # A decision may rest on a view of a quarter of a second ago.
    tries = (collected.api.admit(f"try-{number}", collected.pool) for number in itertools.count())
    eventually(lambda: next(tries).hold.reason == pb.HOLD_REASON_NO_INSTANCE)
    collected.engine.come_back()
    collected.becomes(lambda i: i.freshness == ipb.FRESHNESS_FRESH)
    assert collected.api.admit("s", collected.pool, max_wait_s=20).decision == pb.DECISION_PLACE


def test_it_says_what_it_finds_and_ends_in_good_order(collected: Collected) -> None:
    collected.becomes(lambda i: i.freshness == ipb.FRESHNESS_FRESH)
    collected.engine.leave()
    gone = collected.becomes(lambda i: i.freshness == ipb.FRESHNESS_GONE)
    assert gone.snapshot.state == pb.INSTANCE_STATE_STOPPED, "it is not waited for: nobody listens there"
    collected.engine.come_back()
    collected.becomes(lambda i: i.freshness == ipb.FRESHNESS_FRESH)
    collected.process.terminate()
    _, log = collected.process.communicate(timeout=PATIENCE_S)
    assert collected.process.returncode == 0
    for event in ("collector_started engines=1", "state=reachable", "state=unreachable", "engine_stopped", "collector_stopped"):
        assert event in log
    assert "Traceback" not in log
