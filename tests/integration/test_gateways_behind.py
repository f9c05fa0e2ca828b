"""vllm-router between proxies and engines, started as GATEWAYS.md says."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from moorage.v1 import inspector_pb2 as ipb
from tests.integration.engines import ReplayedEngine
from tests.integration.gateways import BLOCKS, router
from tests.integration.openai_engine import OpenAIEngine, beating
from tests.integration.processes import COMMAND, PATIENCE_S, Server, environment
from tests.integration.proxies import COMPLETIONS, Caller, Ledger, proxied, soon


class Behind(OpenAIEngine):
    """An engine that is reached through a router."""

    router = ""

    @property
    def endpoint(self) -> str:
        """Where its router listens."""
        return self.router

    @property
    def url(self) -> str:
        """Where it listens itself."""
        return f"http://127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def routed(folder: Path, *engines: Behind, sglang: bool = False) -> AsyncIterator[Caller]:
    """One router for some engines."""
    for engine in engines:
        await engine.start()
    log, workers = folder / f"{engines[0].instance_id}.log", [engine.url for engine in engines]
    starting = (
        router("sglang-front", "sglang-router", log, workers, policy="manual")
        if sglang
        else router("vllm-behind", "vllm-router", log, workers)
    )
    async with starting as caller:
        for engine in engines:
            engine.router = caller.url
        yield caller


async def test_all_turns_reach_the_engine_that_moorage_chose(
    server: Server, pool: str, ledger: Ledger, tmp_path: Path
) -> None:
    ledger.cap(3)
    engines = [Behind("engine-0"), Behind("engine-1")]
    async with (
        routed(tmp_path, engines[0]),
        routed(tmp_path, engines[1]),
        beating(server, pool, *engines),
        proxied(server.address, pool) as caller,
    ):
        homes: dict[str, str] = {}
        for turn in range(3):
            for name in (f"s-{n}" for n in range(6)):
                answer = await caller.post(COMPLETIONS, name)
                assert answer.status == 200, answer.body
                assert (
                    homes.setdefault(name, answer.headers["X-Moorage-Instance"])
                    == (answer.headers["X-Moorage-Instance"])
                )
                assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == (4 if turn else 0)
        for engine in engines:
            chosen = {name for name, home in homes.items() if home == engine.instance_id}
            assert {headers["x-session-id"] for headers in engine.headers} == chosen
            assert len(chosen) == 3
        stream = await caller.post(COMPLETIONS, "s-0", stream=True, max_tokens=4)
        assert len(stream.events) == 4
        cut = asyncio.create_task(caller.post(COMPLETIONS, "s-0", stream=True, max_tokens=100, fake_pause=0.1))
        await soon(lambda: sum(engine.running for engine in engines) == 1)
        cut.cancel()
        await soon(lambda: sum(engine.aborted for engine in engines) == 1)


async def test_ranks_pass(server: Server, pool: str, tmp_path: Path) -> None:
    engine = Behind("engine-0", rank=1)
    async with (
        routed(tmp_path, engine),
        beating(server, pool, engine),
        proxied(server.address, pool) as caller,
    ):
        assert (await caller.post()).status == 200
        assert engine.headers[-1]["x-data-parallel-rank"] == "1"


async def test_a_router_that_is_gone_moves_its_sessions(server: Server, pool: str, tmp_path: Path) -> None:
    engines = [Behind("engine-0"), Behind("engine-1")]
    async with contextlib.AsyncExitStack() as one, contextlib.AsyncExitStack() as two:
        routers = {"engine-0": one, "engine-1": two}
        for engine in engines:
            await routers[engine.instance_id].enter_async_context(routed(tmp_path, engine))
        async with beating(server, pool, *engines), proxied(server.address, pool) as caller:
            home = (await caller.post(COMPLETIONS, "s-1")).headers["X-Moorage-Instance"]
            await routers.pop(home).aclose()
            answer = await caller.post(COMPLETIONS, "s-1")
            assert answer.status == 200
            assert {answer.headers["X-Moorage-Instance"]} == routers.keys()


async def test_an_engine_that_is_gone_behind_its_router_is_an_error_of_the_router(
    server: Server, pool: str, tmp_path: Path
) -> None:
    engine = Behind("engine-0")
    async with routed(tmp_path, engine), beating(server, pool, engine), proxied(server.address, pool) as caller:
        assert (await caller.post(COMPLETIONS, "s-1")).status == 200
        await engine.stop()
        assert (await caller.post(COMPLETIONS, "s-1")).status == 500


@pytest.mark.parametrize("sglang", [False, True])
async def test_a_group_behind_one_router_keeps_a_session_on_one_of_its_engines(
    server: Server, pool: str, tmp_path: Path, sglang: bool
) -> None:
    """moorage sees one instance: which of the engines it is, is the router's choice alone."""
    group = [Behind("group-0"), Behind("group-0")]
    async with (
        routed(tmp_path, *group, sglang=sglang),
        beating(server, pool, group[0]),
        proxied(server.address, pool) as caller,
    ):
        for turn in range(2):
            for n in range(30):
                answer = await caller.post(COMPLETIONS, f"s-{n}")
                assert answer.headers["X-Moorage-Instance"] == "group-0"
                assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == (4 if turn else 0)
        seen = [{headers["x-smg-routing-key"] for headers in engine.headers} for engine in group]
        assert not seen[0] & seen[1]
        assert all(seen)
        await group[1].stop()


async def test_the_collector_reads_an_engine_through_its_router(server: Server, pool: str, tmp_path: Path) -> None:
    engine = ReplayedEngine()
    async with router("vllm-behind", "vllm-router", tmp_path / "router.log", [engine.url]) as caller:
        (line,) = (line for line in BLOCKS["vllm-behind"].splitlines() if line.startswith("moorage collect"))
        swapped = {"127.0.0.1:50061": server.address, "gpu7=http://10.0.0.7:9000": f"gpu7={caller.url}"}
        arguments = [swapped.get(word, word) for word in shlex.split(line)[1:]]
        command = [*COMMAND, *arguments, "--pool", pool]
        collector = await asyncio.to_thread(subprocess.Popen, command, env=environment({}), stderr=subprocess.DEVNULL)
        try:
            snapshot = (await soon(lambda: _instances(server, pool)))[0].snapshot
            assert (snapshot.instance_id, snapshot.endpoint) == ("gpu7", caller.url)
            assert snapshot.total_blocks > 0
            assert snapshot.max_context_tokens == 8192
        finally:
            collector.kill()
            collector.wait()
            engine.leave()


def _instances(server: Server, pool: str) -> list[ipb.Instance]:
    # There is no pool before the first snapshot.
    with contextlib.suppress(grpc.RpcError):
        request = ipb.ListInstancesRequest(pool=pool)
        return list(server.api.inspector.ListInstances(request, timeout=PATIENCE_S).instances)
    return []
