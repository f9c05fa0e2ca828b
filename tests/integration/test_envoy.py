"""Envoy with the configuration of GATEWAYS.md: the proxy says where a request goes, Envoy carries it there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.gateways import BLOCKS, program, running
from tests.integration.openai_engine import OpenAIEngine, beating, free_address
from tests.integration.processes import Server
from tests.integration.proxies import COMPLETIONS, Caller, Ledger, proxied, soon


@pytest.fixture
async def engines(server: Server, pool: str, ledger: Ledger) -> AsyncIterator[list[OpenAIEngine]]:
    """Two, which take two sessions each."""
    ledger.cap(2)
    made = [OpenAIEngine("engine-0"), OpenAIEngine("engine-1")]
    async with beating(server, pool, *made):
        yield made


@pytest.fixture
async def proxies(server: Server, pool: str, engines: list[OpenAIEngine]) -> AsyncIterator[list[Caller]]:
    async with (
        proxied(server.address, pool, max_hold=1.0) as one,
        proxied(server.address, pool, max_hold=1.0) as two,
    ):
        yield [one, two]


def configuration(block: str, proxies: list[Caller]) -> tuple[dict[str, Any], str]:
    """As documented, on free ports, and where it listens."""
    address, text = free_address(), BLOCKS[block]
    swapped = {"10000": address.rpartition(":")[2]}
    swapped |= {
        documented: proxy.url.rpartition(":")[2] for documented, proxy in zip(("8081", "8082"), proxies, strict=True)
    }
    for documented, mine in swapped.items():
        assert text.count(f"port_value: {documented}}}") == 1
        text = text.replace(f"port_value: {documented}}}", f"port_value: {mine}}}")
    content: dict[str, Any] = yaml.safe_load(text)
    return content, f"http://{address}"


@asynccontextmanager
async def enveloped(content: dict[str, Any], url: str, folder: Path) -> AsyncIterator[Caller]:
    """Envoy with a configuration."""
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(content))
    arguments = [program("envoy"), "-c", str(file), "--disable-hot-restart", "--concurrency", "1"]
    async with running(arguments, url, folder / "envoy.log", ready="/v1/models") as caller:
        yield caller


@pytest.fixture
async def envoy(proxies: list[Caller], tmp_path: Path) -> AsyncIterator[Caller]:
    async with enveloped(*configuration("envoy", proxies), tmp_path) as caller:
        yield caller


async def test_requests_go_to_the_engine_that_moorage_chose(
    envoy: Caller, engines: list[OpenAIEngine], ledger: Ledger
) -> None:
    homes: dict[str, str] = {}
    smuggled = {"X-Gateway-Destination-Endpoint": "127.0.0.1:1", "X-Workload-Class": "agentic"}
    for turn in range(4):
        for name in ("s-1", "s-2", "s-3"):
            answer = await envoy.post(COMPLETIONS, name, prompt="a b c d", headers=smuggled)
            assert answer.status == 200, answer.body
            assert answer.headers["X-Moorage-Session"] == name
            homes.setdefault(name, answer.headers["X-Moorage-Instance"])
            assert answer.headers["X-Moorage-Instance"] == homes[name]
            assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == (4 if turn else 0)
    assert set(homes.values()) == {"engine-0", "engine-1"}
    for engine in engines:
        seen = {headers["x-session-id"] for headers in engine.headers}
        assert seen == {name for name, home in homes.items() if home == engine.instance_id}
    assert {s.session_id: s.workload_class for s in ledger.sessions()} == dict.fromkeys(homes, "agentic")
    ended = await envoy.post("/finish_session?session_id=s-1")
    assert ended.json["released"] is True
    assert ledger.session("s-1") is None


async def test_who_does_not_fit_waits_and_is_told(envoy: Caller, engines: list[OpenAIEngine], ledger: Ledger) -> None:
    for n in range(4):
        assert (await envoy.post(COMPLETIONS, f"in-{n}")).status == 200
    held = await envoy.post(COMPLETIONS, "out")
    assert (held.status, held.json["error"]["code"]) == (429, "POOL_CAP")
    assert int(held.headers["Retry-After"]) >= 1
    waiting = asyncio.create_task(envoy.post(COMPLETIONS, "out"))
    await asyncio.sleep(0.3)
    await envoy.post("/finish_session?session_id=in-0")
    assert (await waiting).status == 200
    gone = asyncio.create_task(envoy.post(COMPLETIONS, "gone"))
    await soon(ledger.has("gone", "HELD"))
    gone.cancel()
    await soon(lambda: ledger.session("gone") is None)
    assert len(engines[0].requests) + len(engines[1].requests) == 5


async def test_what_can_not_be_placed_goes_nowhere(
    envoy: Caller, proxies: list[Caller], engines: list[OpenAIEngine]
) -> None:
    nameless = await envoy.post(COMPLETIONS)
    assert (nameless.status, "session id" in nameless.json["error"]["message"]) == (400, True)
    too_large = await envoy.post(COMPLETIONS, "s-1", headers={"X-Prompt-Tokens": "1000000000"})
    assert too_large.status == 422
    # A gateway may show the proxy the body too.
    in_body = await proxies[0].post("/moorage/place/v1/completions", metadata={"session_id": "s-1"})
    assert (in_body.status, in_body.headers["X-Session-ID"]) == (200, "s-1")
    bad = await proxies[0].post("/moorage/place/v1/completions", metadata={"session_id": ["s"]})
    assert bad.status == 400
    assert (await envoy.post("/v1/embeddings", "s-1", input="a")).status == 404
    assert engines[0].requests == engines[1].requests == []


async def test_streams_pass_and_abort_and_a_dead_engine_is_told(envoy: Caller, engines: list[OpenAIEngine]) -> None:
    whole = await envoy.post(COMPLETIONS, "s-1", stream=True, max_tokens=4)
    assert len(whole.events) == 4
    cut = asyncio.create_task(envoy.post(COMPLETIONS, "s-1", stream=True, max_tokens=100, fake_pause=0.1))
    await soon(lambda: sum(engine.running for engine in engines) == 1)
    cut.cancel()
    await soon(lambda: sum(engine.aborted for engine in engines) == 1)
    for engine in engines:
        await engine.stop()
    assert (await envoy.post(COMPLETIONS, "s-1")).status == 503


async def test_without_moorage_nothing_passes(tmp_path: Path) -> None:
    async with proxied(free_address()) as one, proxied(free_address()) as two:
        content, url = configuration("envoy", [one, two])
        file = tmp_path / "envoy.yaml"
        file.write_text(yaml.safe_dump(content))
        arguments = [program("envoy"), "-c", str(file), "--disable-hot-restart", "--concurrency", "1"]
        # /health says 503 here: whatever answers shows that Envoy is up.
        async with running(arguments, url, tmp_path / "envoy.log", ready=None) as envoy:
            assert (await envoy.post(COMPLETIONS, "s-1")).status == 503


async def test_as_a_plain_balancer_in_front_of_proxies(
    proxies: list[Caller], engines: list[OpenAIEngine], ledger: Ledger, tmp_path: Path
) -> None:
    content, url = configuration("envoy", proxies)
    (manager,) = content["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    settings = manager["typed_config"]
    settings["http_filters"] = settings["http_filters"][-1:]
    for route in settings["route_config"]["virtual_hosts"][0]["routes"]:
        route["route"]["cluster"] = "moorage"
        route.pop("typed_per_filter_config", None)
    async with enveloped(content, url, tmp_path) as envoy:
        answers = [await envoy.post(COMPLETIONS, "s-1") for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert len({answer.headers["X-Moorage-Instance"] for answer in answers}) == 1
        assert (await envoy.post(COMPLETIONS, "s-1", headers={"X-Session-End": "true"})).status == 200
        await soon(lambda: ledger.sessions() == [])
