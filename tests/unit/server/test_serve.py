"""``moorage serve`` as a process: what it prints, how it ends, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import inspector_pb2_grpc
from moorage_server.runtime.main import serve

PROGRAM = "import json, sys; from moorage_server.runtime.main import serve; sys.exit(serve(*json.loads(sys.argv[1])))"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server on a free port of loopback, with overrides, a file and variables."""
    running: list[subprocess.Popen[str]] = []

    def run(file: str | None = None, env: dict[str, str] | None = None, **overrides: Any) -> subprocess.Popen[str]:
        arguments = json.dumps([{"listen": "127.0.0.1:0", **overrides}, file])
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MOORAGE_")}
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, **(env or {})},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def address(line: str) -> str:
    return line.split(" on ")[1].split(",")[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_told_to_stop(start: Start, number: signal.Signals) -> None:
    process = start(log_format="json", env={"MOORAGE_LISTN": "127.0.0.1:1"})
    line = first_line(process)
    assert line.startswith("moorage listens on 127.0.0.1:")
    assert "ALL STATE IS LOST AT EXIT" in line
    with grpc.insecure_channel(address(line)) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    warning, *rest = [json.loads(line) for line in errors.splitlines()]
    assert (warning["variable"], warning["did_you_mean"]) == ("MOORAGE_LISTN", "MOORAGE_LISTEN")
    assert rest[0]["event"] == "listening"
    assert rest[-1]["event"] == "stopped"


def test_it_starts_without_its_store_and_says_where_it_looks(start: Start) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        process = start(env={"MOORAGE_REDIS_URL": f"redis://user:hush@127.0.0.1:{port}/0"})
        line = first_line(process)
        assert f"store redis://***@127.0.0.1:{port}/0" in line
        with grpc.insecure_channel(address(line), options=[("grpc.enable_retries", 0)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            ready = stub.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=30, wait_for_ready=True)
            assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as caught:
                inspector_pb2_grpc.InspectorServiceStub(channel).GetPool(ipb.GetPoolRequest(), timeout=30)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        process.terminate()
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "hush" not in line + output + errors


def test_a_taken_address_is_an_error(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output == ""
    assert "moorage serve: can not listen on 127.0.0.1:" in errors
    assert "Traceback" not in errors


def test_an_unusable_configuration_is_told_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "moorage.yaml"
    file.write_text("pools: {p: {headroom: 2}}\n")
    assert serve({}, str(file)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("moorage serve: unusable configuration\n")
    assert "  pools.p.headroom: must be above 0 and at most 1, got '2.0'" in printed.err


def test_an_unusable_store_url_is_told_without_its_password(start: Start) -> None:
    process = start(redis_url="ftp://user:hush@h:1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "redis.url" in errors
    assert "hush" not in errors
    assert "Traceback" not in errors
