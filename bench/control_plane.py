"""The control plane as a benchmark needs it: started as a child process, waited for, told the trainer's mixture."""

import asyncio
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.children import Child, running
from bench.workload import Workload, WorkloadConfig
from moorage.v1 import operator_pb2, operator_pb2_grpc

if TYPE_CHECKING:
    from moorage.v1.operator_pb2_grpc import OperatorServiceAsyncStub

READY_SECONDS = 30.0
PRIOR_SAMPLE = 64

MOORAGE = (sys.executable, "-m", "moorage.cli.main")
"""The `moorage` command of the environment this runs in."""


@contextmanager
def redis(log: Path) -> Iterator[str]:
    """Run a Redis of our own on loopback, without persistence; yields its URL."""
    with redis_process(log) as (url, _):
        yield url


@contextmanager
def redis_process(log: Path) -> Iterator[tuple[str, Child]]:
    """The same; yields its URL and the process."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with running("redis-server", command, log) as child:
        yield f"redis://127.0.0.1:{port}/0", child


@contextmanager
def serve(port: int, log: Path, redis_url: str | None = None) -> Iterator[Child]:
    """Run `moorage serve` on loopback, on the Redis at `redis_url`, or on the embedded store."""
    store = ["--embedded"] if redis_url is None else ["--redis-url", redis_url]
    command = [*MOORAGE, "serve", *store, "--listen", f"127.0.0.1:{port}"]
    with running("moorage serve", command, log) as child:
        yield child


@contextmanager
def collect(urls: Sequence[str], pool: str, server: str, interval_s: float, log: Path) -> Iterator[Child]:
    """Run `moorage collect vllm` for the engines at `urls`."""
    flags = [part for url in urls for part in ("--url", url)]
    command = [*MOORAGE, "collect", "vllm", *flags, "--pool", pool, "--server", server, "--interval", f"{interval_s}s"]
    with running("moorage collect", command, log) as child:
        yield child


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def wait_ready(channel: grpc.aio.Channel, child: Child | None, timeout_s: float = READY_SECONDS) -> None:
    """Wait until the server says it is ready; RuntimeError if its process ends or the time is over."""
    stub = health_pb2_grpc.HealthStub(channel)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline:
        if child is not None:
            child.require_alive()
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=2.0)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the control plane was not ready within {timeout_s:.0f} s")


async def configure(
    channel: grpc.aio.Channel,
    pool: str,
    workload: WorkloadConfig,
    policy: str | None = None,
    static_cap: int | None = None,
) -> operator_pb2.PoolConfig:
    """Tell the pool its classes, and the policy where one is given; return the configuration in force.

    Each class gets the share the trainer wants and, as prior, the mean final context of such sessions: what someone who
    ran the workload before would know.
    """
    config = operator_pb2.PoolConfig(policy=policy, static_cap=static_cap)
    sample = Workload(workload, seed=0)
    for name, share in sample.target.items():
        prior = fmean(sample.session(name, index).final_context for index in range(PRIOR_SAMPLE))
        config.classes[name].target_share = share
        config.classes[name].prior_context_tokens = round(prior)
    request = operator_pb2.ConfigurePoolRequest(pool=pool, config=config)
    request.update_mask.paths.extend(f"classes.{name}" for name in sample.target)
    request.update_mask.paths.extend(field for field in ("policy", "static_cap") if config.HasField(field))
    stub = cast("OperatorServiceAsyncStub", operator_pb2_grpc.OperatorServiceStub(channel))
    answer = await stub.ConfigurePool(request, timeout=10.0)
    return answer.config
