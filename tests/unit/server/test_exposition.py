"""Scrapes of a running server: what they show, what they leave alone, and what is left in an outage."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from redis.exceptions import ConnectionError as RedisConnectionError

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import ClassConfig, PoolConfig
from moorage_server.meters import POOLS
from moorage_server.runtime.addresses import host_and_port
from moorage_server.runtime.exposition import MetricsListener, Sampler
from moorage_server.runtime.server import AddressInUse
from moorage_server.store.redis_store import RedisStore
from tests.unit.server.exposed import Exposed

POOL = {"default": PoolConfig(policy="static", static_cap=1, epoch_interval_s=0.1)}
CALLS = ("moorage_decisions_total", "moorage_rpc_seconds_bucket", "moorage_store_seconds_bucket", "moorage_ready")


class Scrapes:
    """A metrics listener on a running server."""

    def __init__(self, world: Any) -> None:
        control, server = world.control, world.server
        self.store: RedisStore = control.store
        self.sampler = Sampler(control, server.stats, self.store.meter, lambda: server.ready)
        self.listener = MetricsListener("127.0.0.1:0", self.sampler, asyncio.get_running_loop())

    async def get(self) -> Exposed:
        """One scrape."""
        status, body = await asyncio.to_thread(self._get)
        assert status == 200, body
        return Exposed(body)

    def _get(self) -> tuple[int, str]:
        connection = http.client.HTTPConnection(*host_and_port(self.listener.address), timeout=10)
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


@asynccontextmanager
async def scraped(world: Any) -> AsyncIterator[Scrapes]:
    scrapes = Scrapes(world)
    scrapes.listener.start()
    try:
        yield scrapes
    finally:
        await scrapes.listener.stop()


async def test_what_a_scrape_shows(world: Any, eventually: Any) -> None:
    async with world(POOL) as w, scraped(w) as scrapes:
        await w.instance(cached_blocks=3)
        token = await w.placed("s", workload_class="a")
        assert (await w.admit("t", workload_class="a")).decision == pb.DECISION_HOLD
        await w.scheduler.Place(pb.PlaceRequest(session_id="s", lease_token=token, turn=1))
        await eventually(lambda: _holds(scrapes))
        # Views are a moment old.
        await asyncio.sleep(0.3)
        found = await scrapes.get()
    at = {"pool": "default"}
    assert found.value("moorage_decisions_total", **at, rpc="Admit", decision="place", reason="") == 1
    assert found.value("moorage_decisions_total", **at, rpc="Admit", decision="hold", reason="POOL_CAP") == 1
    assert found.value("moorage_decisions_total", **at, rpc="Place", decision="place", reason="") == 1
    assert found.value("moorage_rpc_seconds_count", rpc="Admit", code="OK") == 2
    assert found.value("moorage_sessions", **at, workload_class="a", state="active") == 1
    assert found.value("moorage_sessions", **at, workload_class="a", state="held") == 1
    assert found.value("moorage_demand_sessions", **at) == 1
    assert found.value("moorage_blocks", **at, instance="i", dp_rank=0, kind="total") == 1000
    assert found.value("moorage_blocks", **at, instance="i", dp_rank=0, kind="cached") == 3
    assert found.value("moorage_session_cap", **at, instance="i", dp_rank=0) == 1
    assert found.value("moorage_instance_freshness", **at, instance="i", dp_rank=0, freshness="fresh") == 1
    assert (found.value("moorage_store_seconds_count", script="admit") or 0) >= 2
    assert (found.value("moorage_epochs_total", **at) or 0) >= 1
    assert found.value("moorage_lease_expiries_total", **at) == 0
    assert found.value("moorage_ready") == 1
    assert found.labels("moorage_build_info", "version")
    assert (found.value("process_cpu_seconds_total") or 0) > 0


async def _holds(scrapes: Scrapes) -> bool:
    found = await scrapes.get()
    return found.value("moorage_epoch_holder", pool="default") == 1 and found.value("moorage_ready") == 1


async def test_waits_do_not_drown_latencies(world: Any, eventually: Any) -> None:
    async with world(POOL) as w, scraped(w) as scrapes:
        await w.instance()
        await w.placed("s", workload_class="a")
        waiting = asyncio.ensure_future(w.admit("t", workload_class="a", max_wait=Duration(seconds=1)))

        async def waits() -> bool:
            return (await scrapes.get()).value("moorage_waiting_calls", pool="default") == 1

        await eventually(waits)
        assert (await waiting).decision == pb.DECISION_HOLD
        found = await scrapes.get()
    at = {"pool": "default", "outcome": "hold"}
    assert found.value("moorage_wait_seconds_count", **at) == 1
    assert 0.9 < (found.value("moorage_wait_seconds_sum", **at) or 0) < 5
    assert (found.value("moorage_rpc_seconds_sum", rpc="Admit", code="OK") or 9) < 0.9
    assert found.value("moorage_waiting_calls", pool="default") == 0


async def test_a_placement_while_the_home_is_paused_waits_too(world: Any) -> None:
    async with world(POOL) as w, scraped(w) as scrapes:
        await w.instance()
        token = await w.placed("s", workload_class="a")
        await w.instance(state=pb.INSTANCE_STATE_PAUSED)
        request = pb.PlaceRequest(session_id="s", lease_token=token, turn=1, max_wait=Duration(nanos=300_000_000))
        assert (await w.scheduler.Place(request)).hold.reason == pb.HOLD_REASON_WEIGHT_UPDATE
        found = await scrapes.get()
    assert found.value("moorage_wait_seconds_count", pool="default", outcome="hold") == 1
    assert (found.value("moorage_rpc_seconds_sum", rpc="Place", code="OK") or 9) < 0.25
    assert found.value("moorage_decisions_total", pool="default", rpc="Place", decision="hold", reason="WEIGHT_UPDATE")


async def test_leases_that_run_out_are_counted(world: Any, eventually: Any) -> None:
    async with world(POOL) as w, scraped(w) as scrapes:
        await w.instance()
        await w.placed("s", lease_ttl=Duration(seconds=1))

        async def expired() -> bool:
            return (await scrapes.get()).value("moorage_lease_expiries_total", pool="default") == 1

        await eventually(expired)


async def test_pools_that_nobody_named_have_no_label(world: Any) -> None:
    async with world(POOL) as w, scraped(w) as scrapes:
        for n in range(POOLS + 10):
            await w.admit(f"s-{n}", pool=f"misspelt-{n}")
        found = await scrapes.get()
    for name in found.names():
        assert found.labels(name, "pool") <= {"default", "other"}, name
    counted = found.value("moorage_decisions_total", pool="other", rpc="Admit", decision="hold", reason="NO_INSTANCE")
    assert counted == POOLS + 10


async def test_a_pool_that_registers_has_a_label(world: Any) -> None:
    async with world() as w, scraped(w) as scrapes:
        await w.instance(pool="new")
        await w.admit("s", pool="new")
        found = await scrapes.get()
    assert "new" in found.labels("moorage_decisions_total", "pool")
    assert found.value("moorage_blocks", pool="new", instance="i", dp_rank=0, kind="total") == 1000


async def test_scrapes_make_the_store_work_no_more_than_the_view_does(world: Any, eventually: Any) -> None:
    quiet = {"default": PoolConfig(epoch_interval_s=60)}
    async with world(quiet) as w, scraped(w) as scrapes:
        await eventually(lambda: _holds(scrapes))
        # What the first epoch wakes up.
        await asyncio.sleep(0.5)
        calls: list[str] = []
        scrapes.store.meter.listener = lambda script, _: calls.append(script)
        started = asyncio.get_running_loop().time()
        for _ in range(20):
            await scrapes.get()
        seconds = asyncio.get_running_loop().time() - started
        scrapes.store.meter.listener = None
    assert set(calls) == {"view"}
    assert len(calls) <= 4 * seconds + 2


async def test_an_outage_leaves_what_the_process_counts(
    monkeypatch: pytest.MonkeyPatch, world: Any, eventually: Any
) -> None:
    async def away(*_: Any) -> Any:
        raise RedisConnectionError

    configured = {"default": PoolConfig(policy="static", static_cap=1, classes={"a": ClassConfig(target_share=1)})}
    async with world(configured) as w, scraped(w) as scrapes:
        await w.instance()
        await w.placed("s", workload_class="a")
        before = await eventually(lambda: _with_sessions(scrapes))
        with monkeypatch.context() as outage:
            outage.setattr(scrapes.store._scripts, "evalsha", away)
            with pytest.raises(grpc.aio.AioRpcError):
                await w.admit("t", workload_class="a")
            during = await eventually(lambda: _with_sessions(scrapes, False))
        await eventually(lambda: _with_sessions(scrapes))
    pools = {name for name in before.names() if "max, not sum" in _help(before, name)}
    assert {"moorage_sessions", "moorage_blocks", "moorage_mixture_share", "moorage_completed_total"} <= pools
    assert not pools & during.names(), "unknown is not zero"
    assert set(CALLS) <= during.names()
    assert during.value("moorage_rpc_seconds_count", rpc="Admit", code="UNAVAILABLE") == 1
    assert (during.value("moorage_store_errors_total", kind="ConnectionError") or 0) >= 1


async def _with_sessions(scrapes: Scrapes, wanted: bool = True) -> Exposed | None:
    found = await scrapes.get()
    return found if ("moorage_sessions" in found.names()) is wanted else None


def _help(found: Exposed, sample: str) -> str:
    family = found.families.get(sample) or found.families.get(sample.removesuffix("_total"))
    return "" if family is None else family.documentation


async def test_a_stuck_loop_is_unavailable_not_a_hanging_scrape(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage_server.runtime.exposition._LOOP_S", 0.1)

    async def stuck(_: Sampler) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(Sampler, "sample", stuck)
    async with world() as w, scraped(w) as scrapes:
        status, body = await asyncio.to_thread(scrapes._get)
    assert (status, body) == (503, "the server is busy\n")


async def test_a_taken_address_is_refused(world: Any) -> None:
    async with world() as w, scraped(w) as scrapes:
        with pytest.raises(AddressInUse, match=r"can not listen on 127\.0\.0\.1:"):
            MetricsListener(scrapes.listener.address, scrapes.sampler, asyncio.get_running_loop())


async def test_a_client_that_says_nothing_keeps_nobody_waiting(world: Any) -> None:
    async with world() as w, scraped(w) as scrapes:
        with socket.create_connection(host_and_port(scrapes.listener.address)) as silent:
            silent.sendall(b"GET /met")
            assert (await scrapes.get()).value("moorage_build_info", version=version("moorage")) == 1
