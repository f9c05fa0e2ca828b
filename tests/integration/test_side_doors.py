"""The listeners beside the main one, of servers as processes: metrics, and health in plain text."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import inspector_pb2_grpc
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.processes import PATIENCE_S, Server, Start, environment, eventually, moorage
from tests.unit.server.exposed import Exposed

POOLS = "{default: {policy: static, static_cap: 1, epoch_interval_s: 0.2}}"
DOORS = {"MOORAGE_METRICS_LISTEN": "127.0.0.1:0", "MOORAGE_HEALTH_LISTEN": "127.0.0.1:0", "MOORAGE_POOLS": POOLS}
ENGINE = {"pool": "default", "instance": "engine-0", "dp_rank": 0}


def _address(server: Server, door: str) -> str:
    """Where a door of the server is, as it logs."""
    line = eventually(lambda: next((line for line in server.log().splitlines() if '"listening"' in line), None))
    address: str = json.loads(line)[door]
    return address


def _scrape(server: Server) -> Exposed:
    with urllib.request.urlopen(f"http://{_address(server, 'metrics')}/metrics", timeout=PATIENCE_S) as page:
        return Exposed(page.read().decode())


def _health(channel: grpc.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    stub = health_pb2_grpc.HealthStub(channel)
    status: int = stub.Check(request, timeout=PATIENCE_S, wait_for_ready=True).status
    return status


def test_both_servers_show_the_pool_and_each_its_own_calls(start: Start, redis_server: RedisServer) -> None:
    ledger = {"MOORAGE_REDIS_URL": redis_server.url, "MOORAGE_REDIS_KEY_PREFIX": f"i{uuid.uuid4().hex}"}
    a, b = (start(**ledger, **DOORS) for _ in range(2))
    for server in (a, b):
        eventually(server.api.ready)
    with Engines(a.api, "engine-0"):
        a.api.admit("s", max_wait_s=20)
        a.api.admit("t")
        at = {"pool": "default", "workload_class": "rlvr"}
        for server in (a, b):
            # Views are a moment old, and the cap is known after an epoch.
            eventually(lambda s=server: _scrape(s).value("moorage_demand_sessions", pool="default"))
            eventually(lambda s=server: _scrape(s).value("moorage_brake", **ENGINE) is not None)
        shown = [_scrape(server) for server in (a, b)]
    assert [found.value("moorage_sessions", **at, state="active") for found in shown] == [1, 1]
    assert [found.value("moorage_demand_sessions", pool="default") for found in shown] == [1, 1]
    assert sum(found.value("moorage_epoch_holder", pool="default") or 0 for found in shown) == 1
    assert [found.value("moorage_session_cap", **ENGINE) for found in shown] == [1, 1]
    calls = [found.value("moorage_rpc_seconds_count", rpc="Admit", code="OK") for found in shown]
    assert calls == [2, None]
    assert (shown[0].value("moorage_store_seconds_count", script="admit") or 0) >= 2


def test_an_outage_takes_the_pools_and_the_readiness(start: Start, own_redis_server: RedisServer) -> None:
    server = start(MOORAGE_REDIS_URL=own_redis_server.url, **DOORS)
    eventually(server.api.ready)
    with grpc.insecure_channel(_address(server, "health")) as probes:
        with Engines(server.api, "engine-0"):
            eventually(lambda: _scrape(server).value("moorage_demand_sessions", pool="default") == 0)
        assert _health(probes, "readiness") == health_pb2.HealthCheckResponse.SERVING
        own_redis_server.stop()
        eventually(lambda: _health(probes, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING)
        assert _health(probes, "liveness") == health_pb2.HealthCheckResponse.SERVING
        found = _scrape(server)
        assert found.value("moorage_ready") == 0
        assert found.value("moorage_demand_sessions", pool="default") is None
        assert sum(found.value("moorage_store_errors_total", kind=k) or 0 for k in _kinds(found)) > 0
        own_redis_server.start()
        eventually(lambda: _scrape(server).value("moorage_demand_sessions", pool="default") == 0)
        assert server.terminate() == 0


def _kinds(found: Exposed) -> set[str]:
    return found.labels("moorage_store_errors_total", "kind")


def test_probes_hear_of_the_end_while_it_lasts(start: Start) -> None:
    server = start(**DOORS, MOORAGE_SHUTDOWN_PRE_STOP_DELAY_S="1")
    eventually(server.api.ready)
    with grpc.insecure_channel(_address(server, "health")) as probes:
        assert _health(probes, "readiness") == health_pb2.HealthCheckResponse.SERVING
        server.process.terminate()
        eventually(lambda: _health(probes, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING)
        assert _health(probes, "liveness") == health_pb2.HealthCheckResponse.SERVING
        assert _scrape(server).value("moorage_ready") == 0
        assert server.process.wait(PATIENCE_S) == 0


def test_the_health_listener_serves_health_alone(start: Start) -> None:
    server = start(**DOORS)
    with grpc.insecure_channel(_address(server, "health")) as probes:
        assert _health(probes, "liveness") == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            inspector_pb2_grpc.InspectorServiceStub(probes).GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("door", ["METRICS", "HEALTH"])
def test_a_taken_door_ends_the_start(door: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = moorage("serve", "--listen", "127.0.0.1:0", env={f"MOORAGE_{door}_LISTEN": address})
    assert (done.returncode, done.stdout) == (1, "")
    assert f"can not listen on {address}" in done.stderr
    assert "Traceback" not in done.stderr


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the names of the spans that it is sent."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        self.names |= {span.name for scope in scopes for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_the_collector_before_the_end(start: Start) -> None:
    collector = Collector()
    receiver = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, receiver)
    port = receiver.add_insecure_port("127.0.0.1:0")
    receiver.start()
    server = start(MOORAGE_TRACING_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
    server.api.admit("s")
    assert server.terminate() == 0
    receiver.stop(None).wait()
    assert {"moorage.v1.SchedulerService/Admit", "script admit"} <= collector.names


def test_an_absent_collector_does_not_keep_the_server(start: Start) -> None:
    server = start(MOORAGE_TRACING_OTLP_ENDPOINT="http://127.0.0.1:9")
    server.api.admit("s")
    started = time.monotonic()
    assert server.terminate() == 0
    assert time.monotonic() - started < 8


def test_traces_need_their_extra() -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; from moorage.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve"],
        env=environment({"MOORAGE_TRACING_OTLP_ENDPOINT": "http://127.0.0.1:9"}),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moorage serve: tracing.otlp_endpoint: needs moorage[tracing]; ")
