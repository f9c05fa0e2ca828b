"""`moorage` as processes, and the little that tests need around them: stubs, waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moorage.v1 import inspector_pb2_grpc, operator_pb2_grpc, scheduler_pb2_grpc
from moorage.v1 import scheduler_pb2 as pb

COMMAND = (sys.executable, "-m", "moorage.cli.main")
#: Longest time that anything here is waited for, in seconds: generous, machines may be busy.
PATIENCE_S = 30.0

T = TypeVar("T")


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would configure moorage, then `changes`."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("MOORAGE_")}, **changes}


def moorage(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment(env or {}),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def eventually(probe: Callable[[], T | None], within_s: float = PATIENCE_S, pause_s: float = 0.02) -> T:
    """The first true answer of `probe`; AssertionError where there is none in time."""
    deadline = time.monotonic() + within_s
    while True:
        answer = probe()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within_s:g} s, last answer: {answer!r}"
        time.sleep(pause_s)


class Api:
    """Stubs on one server, without retries: a test sees every failure."""

    def __init__(self, address: str) -> None:
        options = [("grpc.enable_retries", 0), ("grpc.max_reconnect_backoff_ms", 200)]
        self.channel = grpc.insecure_channel(address, options=options)
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.inspector = inspector_pb2_grpc.InspectorServiceStub(self.channel)
        self.operator = operator_pb2_grpc.OperatorServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    def health(self, service: str) -> str:
        """SERVING or NOT_SERVING."""
        request = health_pb2.HealthCheckRequest(service=service)
        status = self._health.Check(request, timeout=PATIENCE_S, wait_for_ready=True).status
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        return name

    def ready(self) -> bool:
        """Whether the server says that it can decide."""
        return self.health("readiness") == "SERVING"

    def admit(
        self, session: str, pool: str = "default", *, max_wait_s: int = 0, workload_class: str = "rlvr"
    ) -> pb.AdmitResponse:
        """Asks for a session of 64 tokens and at most 128 to enter."""
        request = pb.AdmitRequest(
            pool=pool, session_id=session, workload_class=workload_class, prompt_tokens=64, max_context_tokens=128
        )
        if max_wait_s:
            request.max_wait.FromSeconds(max_wait_s)
        return self.scheduler.Admit(request, timeout=max_wait_s + PATIENCE_S)

    def release(self, session: str, token: str, pool: str = "default") -> pb.ReleaseResponse:
        """Ends a session as COMPLETED."""
        request = pb.ReleaseRequest(pool=pool, session_id=session, lease_token=token, outcome=pb.OUTCOME_COMPLETED)
        return self.scheduler.Release(request, timeout=PATIENCE_S)


class Server:
    """A running `moorage serve`. Its log is JSON lines in a file."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        assert process.stdout is not None
        self.said = process.stdout.readline()
        assert self.said, f"it ended without a word: {self.log()}"
        self.address = self.said.split(" on ")[1].split(",")[0]
        self.api = Api(self.address)

    @classmethod
    def start(cls, log: Path, *flags: str, **env: str) -> Server:
        """Starts one on a free port of loopback; returns once it listens."""
        command = [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--log-format", "json", *flags]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, env=environment(env), stdout=subprocess.PIPE, stderr=errors, text=True)
        return cls(process, log)

    def log(self) -> str:
        """All it logged so far."""
        return self._log.read_text("utf-8")

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Ends it, however it fares."""
        self.api.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


#: Starts a server with flags and MOORAGE_* variables.
Start = Callable[..., Server]
