"""The store goes away and comes back under a running server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moorage import Client, NotFound
from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import operator_pb2 as opb
from moorage.v1 import scheduler_pb2 as pb
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.processes import PATIENCE_S, Api, Server, Start, eventually

QUICK = {"MOORAGE_HEALTH_CHECK_INTERVAL_S": "0.05", "MOORAGE_HEALTH_CHECK_TIMEOUT_S": "0.5"}
ONE_SESSION = "{default: {policy: static, static_cap: 1, epoch_interval_s: 0.2}}"


@dataclass
class Outage:
    """A server with one engine and one session, whose Redis can be stopped and started again."""

    redis: RedisServer
    server: Server
    token: str

    @property
    def api(self) -> Api:
        return self.server.api

    def begin(self) -> None:
        self.redis.stop()
        eventually(lambda: not self.api.ready())

    def finish(self) -> None:
        self.redis.start()
        eventually(self.api.ready)


@pytest.fixture
def outage(start: Start, own_redis_server: RedisServer) -> Iterator[Outage]:
    server = start("--redis-url", own_redis_server.url, MOORAGE_POOLS=ONE_SESSION, **QUICK)
    eventually(server.api.ready)
    with Engines(server.api, "engine-0"):
        placed = eventually(lambda: _placed(server.api.admit("first")))
        yield Outage(own_redis_server, server, placed.lease.token)


def _placed(answer: pb.AdmitResponse) -> pb.AdmitResponse | None:
    return answer if answer.decision == pb.DECISION_PLACE else None


def test_readiness_follows_the_store_and_liveness_does_not(outage: Outage) -> None:
    assert outage.api.health("") == "SERVING"
    outage.begin()
    eventually(lambda: outage.api.health("") == "NOT_SERVING")
    assert outage.api.health("liveness") == "SERVING"
    outage.finish()
    eventually(lambda: outage.api.health("") == "SERVING")


CALLS: dict[str, Callable[[Outage], object]] = {
    "Admit": lambda o: o.api.admit("second"),
    "Admit that waits": lambda o: o.api.admit("second", max_wait_s=20),
    "Admit of a living session": lambda o: o.api.admit("first"),
    "Place": lambda o: o.api.scheduler.Place(
        pb.PlaceRequest(session_id="first", lease_token=o.token), timeout=PATIENCE_S
    ),
    "Release": lambda o: o.api.release("first", o.token),
    "Heartbeat": lambda o: o.api.scheduler.Heartbeat(
        pb.HeartbeatRequest(sessions=[pb.SessionProgress(session_id="first", lease_token=o.token)]), timeout=PATIENCE_S
    ),
    "GetPool": lambda o: o.api.inspector.GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S),
    "ListInstances": lambda o: o.api.inspector.ListInstances(ipb.ListInstancesRequest(), timeout=PATIENCE_S),
    "ListSessions": lambda o: o.api.inspector.ListSessions(ipb.ListSessionsRequest(), timeout=PATIENCE_S),
    "CordonInstance": lambda o: o.api.operator.CordonInstance(
        opb.CordonInstanceRequest(instance_id="engine-0"), timeout=PATIENCE_S
    ),
    "EvictSession": lambda o: o.api.operator.EvictSession(
        opb.EvictSessionRequest(session_id="first"), timeout=PATIENCE_S
    ),
}


def test_every_call_says_unavailable_and_when_to_try_again(outage: Outage) -> None:
    outage.begin()
    for name, call in CALLS.items():
        error = _failure(lambda call=call: call(outage))  # type: ignore[misc]
        assert error.code() is grpc.StatusCode.UNAVAILABLE, name
        trailers = dict(error.trailing_metadata())
        details = status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
        assert _detail(details, error_details_pb2.ErrorInfo()).reason == "STORE_UNAVAILABLE", name
        assert _detail(details, error_details_pb2.ErrorInfo()).domain == "moorage.v1", name
        retry = _detail(details, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds()
        assert 0 < retry == int(trailers["grpc-retry-pushback-ms"]), name


def _failure(call: Callable[[], object]) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def _detail(details: list[AnyMessage], message: Any) -> Any:
    assert any(detail.Unpack(message) for detail in details), f"no {message.DESCRIPTOR.name}"
    return message


def test_a_waiting_caller_learns_of_the_outage(outage: Outage) -> None:
    errors: list[Any] = []
    waiting = threading.Thread(
        target=lambda: errors.append(_failure(lambda: outage.api.admit("second", max_wait_s=60)))
    )
    waiting.start()
    eventually(lambda: outage.api.inspector.GetPool(ipb.GetPoolRequest()).held_sessions == 1)
    outage.begin()
    waiting.join(PATIENCE_S)
    assert [error.code() for error in errors] == [grpc.StatusCode.UNAVAILABLE]


def test_callers_recover_although_the_store_forgot_everything(outage: Outage) -> None:
    outage.begin()
    outage.finish()
    # The client retries: a call that meets a connection of before the outage still fails.
    with Client(outage.server.address) as client:
        # The Redis of this test keeps nothing: what it knew of sessions is lost, and nobody makes it up.
        with pytest.raises(NotFound):
            client.place("first", lease_token=outage.token)
        answer = eventually(lambda: _placed(client.admit("first", max_context_tokens=128)))
        assert answer.lease.token != outage.token
        assert client.admit("second").decision == pb.DECISION_HOLD
        assert client.release("first", outcome="COMPLETED", lease_token=answer.lease.token).released
        assert client.admit("second", max_wait=10).decision == pb.DECISION_PLACE


def test_it_starts_before_its_store(start: Start, own_redis_server: RedisServer) -> None:
    own_redis_server.stop()
    server = start("--redis-url", own_redis_server.url, **QUICK)
    assert server.api.health("liveness") == "SERVING"
    assert not server.api.ready()
    own_redis_server.start()
    eventually(server.api.ready)
    with Engines(server.api, "engine-0"):
        assert eventually(lambda: _placed(server.api.admit("first"))).placement.instance_id == "engine-0"
