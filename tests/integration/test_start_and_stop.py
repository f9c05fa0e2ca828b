"""How a server starts, refuses to start, and stops."""

from __future__ import annotations

import socket
import threading
import uuid
from pathlib import Path

import grpc
import pytest

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.processes import Start, eventually, moorage

ONE_SESSION = "{default: {policy: static, static_cap: 1, epoch_interval_s: 0.2}}"


def test_the_embedded_store_is_said_aloud(start: Start) -> None:
    server = start()
    assert server.said == (
        f"moorage listens on {server.address}, "
        "embedded store: ALL STATE IS LOST AT EXIT, one process only; --redis-url keeps it\n"
    )
    eventually(server.api.ready)
    assert server.terminate() == 0


def test_the_store_is_said_without_its_password(start: Start, redis_server: RedisServer) -> None:
    server = start("--redis-url", f"redis://user:hush@127.0.0.1:{redis_server.port}/0")
    assert server.said.endswith(f", store redis://***@127.0.0.1:{redis_server.port}/0\n")
    assert server.terminate() == 0
    assert "hush" not in server.log()


@pytest.mark.parametrize(
    ("yaml", "complaint"),
    [
        ("pools: {main: {headroom: 1.5}}", "pools.main.headroom: must be above 0 and at most 1, got '1.5'"),
        ("pools: {main: {lease_ttl: 5}}", "pools.main.lease_ttl: unknown key; did you mean lease_ttl_s?"),
        ("pools: {main: {policy: fifo}}", "pools.main.policy: must be one of"),
        ("redis: {url: 'redis://h:1', embedded: true}", "redis: url and embedded exclude each other"),
        ("listen: 50061", "listen: must be a valid string"),
        ("log: {level: loud}", "log.level: must be 'debug', 'info', 'warning' or 'error', got 'loud'"),
        ("health: {check_interval_s: 0}", "health.check_interval_s: must be greater than or equal to 0.05, got '0'"),
        ("- a\n- b", "must hold keys and values, got a list"),
    ],
)
def test_a_bad_file_stops_the_start_and_names_the_key(tmp_path: Path, yaml: str, complaint: str) -> None:
    file = tmp_path / "moorage.yaml"
    file.write_text(yaml)
    done = moorage("serve", "--config", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_variable_is_named_too() -> None:
    done = moorage("serve", env={"MOORAGE_SHUTDOWN_GRACE_S": "soon"})
    assert done.returncode == 2
    assert "shutdown.grace_s: must be a valid number" in done.stderr
    assert "MOORAGE_SHUTDOWN_GRACE_S" in done.stderr


def test_flags_that_exclude_each_other_are_a_usage_error() -> None:
    done = moorage("serve", "--embedded", "--redis-url", "redis://127.0.0.1:1")
    assert done.returncode == 2
    assert "--redis-url and --embedded exclude each other" in done.stderr


def test_a_taken_address_ends_the_start(redis_server: RedisServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = moorage("serve", "--listen", address, "--redis-url", redis_server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"can not listen on {address}" in done.stderr


def test_sigterm_answers_those_who_wait_and_keeps_their_place(start: Start, redis_server: RedisServer) -> None:
    ledger = {"MOORAGE_REDIS_URL": redis_server.url, "MOORAGE_REDIS_KEY_PREFIX": f"i{uuid.uuid4().hex}"}
    server = start(**ledger, MOORAGE_POOLS=ONE_SESSION)
    with Engines(server.api, "engine-0"):
        first = server.api.admit("first", max_wait_s=20)
        answers: list[pb.AdmitResponse] = []
        waiting = threading.Thread(target=lambda: answers.append(server.api.admit("second", max_wait_s=60)))
        waiting.start()
        eventually(lambda: server.api.inspector.GetPool(ipb.GetPoolRequest()).held_sessions == 1)
        assert server.terminate() == 0
        waiting.join(5)
    assert [answer.decision for answer in answers] == [pb.DECISION_HOLD]
    assert answers[0].hold.position == 1
    assert answers[0].hold.HasField("retry_after")

    successor = start(**ledger, MOORAGE_POOLS=ONE_SESSION)
    with Engines(successor.api, "engine-0"):
        assert successor.api.admit("third").hold.position == 2
        assert successor.api.release("first", first.lease.token).released
        assert successor.api.admit("second", max_wait_s=20).decision == pb.DECISION_PLACE


def test_sigterm_ends_watches_with_a_last_word(start: Start) -> None:
    server = start(MOORAGE_POOLS=ONE_SESSION)
    with Engines(server.api, "engine-0"):
        server.api.admit("living", max_wait_s=20)
    events = server.api.inspector.WatchEvents(ipb.WatchEventsRequest(resume_token="0"))
    assert server.api.admit("held").decision == pb.DECISION_HOLD
    assert next(event for event in events if event.session_id == "held").kind == "hold"
    server.process.terminate()
    assert [event.kind for event in events][-1] == "closing"
    assert server.process.wait(20) == 0


def test_before_the_listener_closes_load_balancers_get_their_time(start: Start) -> None:
    server = start(MOORAGE_SHUTDOWN_PRE_STOP_DELAY_S="1")
    eventually(server.api.ready)
    server.process.terminate()
    eventually(lambda: not server.api.ready())
    # Not ready, and still of service.
    assert server.api.admit("s").hold.reason == pb.HOLD_REASON_NO_INSTANCE
    assert server.process.wait(20) == 0
    with pytest.raises(grpc.RpcError):
        server.api.admit("s")
