"""vllm-router and SGLang's gateway in front of several proxies, started as GATEWAYS.md says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from moorage.v1 import inspector_pb2 as ipb
from tests.integration.gateways import router
from tests.integration.openai_engine import OpenAIEngine, beating
from tests.integration.processes import Server
from tests.integration.proxies import COMPLETIONS, Answer, Caller, Ledger, proxied, soon

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


@pytest.fixture
async def engines(server: Server, pool: str, ledger: Ledger) -> AsyncIterator[list[OpenAIEngine]]:
    """Two, which take one session each."""
    ledger.cap(1)
    made = [OpenAIEngine("engine-0"), OpenAIEngine("engine-1")]
    async with beating(server, pool, *made):
        yield made


@dataclass
class Front:
    """A gateway with two proxies behind it."""

    kind: str
    gateway: Caller
    proxies: list[Caller]
    log: Path

    async def post(self, session: str, path: str = COMPLETIONS, /, **body: object) -> Answer:
        """A request of a session, named as clients of either gateway name it."""
        headers = {"X-Session-ID": session, "X-SMG-Routing-Key": session}
        return await self.gateway.post(path, headers=headers, **body)


MAX_HOLD_S = 1.0


@pytest.fixture(params=["vllm", "sglang"])
async def front(
    request: pytest.FixtureRequest, server: Server, pool: str, engines: list[OpenAIEngine], tmp_path: Path
) -> AsyncIterator[Front]:
    log = tmp_path / "gateway.log"
    async with (
        proxied(server.address, pool, max_hold=MAX_HOLD_S) as one,
        proxied(server.address, pool, max_hold=MAX_HOLD_S) as two,
        router(f"{request.param}-front", f"{request.param}-router", log, [one.url, two.url]) as gateway,
    ):
        yield Front(request.param, gateway, [one, two], log)


async def sessions_of(proxy: Caller) -> int:
    """How many sessions a proxy has."""
    number: int = (await proxy.get("/health")).json["sessions"]
    return number


def reported(ledger: Ledger, session_id: str, context_tokens: int) -> ipb.Session | None:
    """The session, once its context is known to be so large."""
    session = ledger.session(session_id)
    return session if session is not None and session.context_tokens == context_tokens else None


async def fill(front: Front) -> None:
    """Each of the two engines has the one session that it takes: in-0, in-1."""
    for n in range(2):
        assert (await front.post(f"in-{n}")).status == 200


async def test_turns_that_go_through_different_proxies_are_one_session(
    front: Front, engines: list[OpenAIEngine], ledger: Ledger
) -> None:
    messages, homes, cached = [{"role": "user", "content": "word " * 100}], set(), []
    for turn in range(6):
        answer = await front.post("s-1", CHAT, messages=messages, metadata={"workload_class": "agentic"})
        assert answer.status == 200, answer.body
        homes.add(answer.headers["X-Moorage-Instance"])
        cached.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages.append({"role": "user", "content": "more " * 20})
        # What a turn reported tells the next one's proxy its number, and only a higher one's hits count.
        context = 103 + 20 * turn
        found = await soon(partial(reported, ledger, "s-1", context))
        assert (found.workload_class, found.turn) == ("agentic", turn)
    assert [await sessions_of(proxy) for proxy in front.proxies] == [1, 1]
    assert len(homes) == 1
    assert cached == [0, 103, 123, 143, 163, 183]
    assert ledger.state().active_sessions == 1


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *(("vllm", policy) for policy in ("cache_aware", "power_of_two", "consistent_hash", "sticky_least_loaded")),
        *(("sglang", policy) for policy in ("cache_aware", "power_of_two", "manual")),
    ],
)
async def test_other_policies_do_as_well(
    server: Server, pool: str, engines: list[OpenAIEngine], ledger: Ledger, tmp_path: Path, kind: str, policy: str
) -> None:
    log = tmp_path / "gateway.log"
    async with proxied(server.address, pool) as one, proxied(server.address, pool) as two:
        async with router(f"{kind}-front", f"{kind}-router", log, [one.url, two.url], policy=policy) as gateway:
            front = Front(kind, gateway, [one, two], log)
            for turn in range(4):
                answers = [await front.post(name) for name in ("s-1", "s-2")]
                assert [answer.status for answer in answers] == [200, 200]
                cached = {answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers}
                assert cached == ({4} if turn else {0})
        assert ledger.state().active_sessions == 2


async def test_a_session_ends_through_the_gateway(front: Front, ledger: Ledger) -> None:
    await front.post("s-1")
    last = await front.post("s-1", metadata={"session_end": "true"})
    assert last.status == 200
    await soon(lambda: ledger.session("s-1") is None)
    # What it calls its own is answered without a word to moorage.
    await front.post("s-2")
    told = await front.gateway.post("/finish_session?session_id=s-2")
    assert (told.status, ledger.session("s-2") is not None) == ({"vllm": 200, "sglang": 404}[front.kind], True)
    passed = await front.gateway.post("/moorage/finish_session", session_id="s-2", outcome="FAILED")
    if front.kind == "vllm":
        assert passed.json["released"] is True
        assert (await front.gateway.post(COMPLETIONS, "s-3", headers={"X-Session-End": "true"})).status == 200
        await soon(lambda: ledger.sessions() == [])
        assert sum(ledger.state().completed_by_class.values()) == 2
    else:
        assert passed.status == 404


async def test_responses_name_their_session_in_the_body(front: Front, engines: list[OpenAIEngine]) -> None:
    for _ in range(2):
        body = {"input": "a b", "metadata": {"session_id": "r-1"}}
        answer = await front.gateway.post(RESPONSES, headers={"X-Session-ID": "lost"}, **body)
        assert (answer.status, answer.headers["X-Moorage-Session"]) == (200, "r-1")


async def test_holds_pass_and_trip_nothing(front: Front, ledger: Ledger) -> None:
    await fill(front)
    held = await asyncio.gather(*(front.post(f"out-{n}") for n in range(15)))
    assert {answer.status for answer in held} == {429}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in held)
    # Asked twice each, by the gateway: each has one place in the queue, and keeps it.
    assert ledger.state().held_sessions == 15
    assert (await front.post("in-0")).status == 200
    await front.post("in-0", metadata={"session_end": "true"})
    await soon(lambda: ledger.state().active_sessions == 1)
    assert (await front.post("out-0")).status == 200
    assert ledger.state().active_sessions == 2


async def test_a_held_request_enters_when_its_turn_comes(front: Front, ledger: Ledger) -> None:
    await fill(front)
    held = asyncio.create_task(front.post("out"))
    await soon(ledger.has("out", "HELD"))
    await front.proxies[0].post("/finish_session?session_id=in-0")
    assert (await held).status == 200


async def test_streams_are_not_buffered_and_broken_ones_not_mended(front: Front, engines: list[OpenAIEngine]) -> None:
    body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 5, "fake_pause": 0.3}
    async with front.gateway.http.post(COMPLETIONS, json=body) as response:
        began = time.monotonic()
        first = await response.content.readany()
        assert b"word0" in first
        assert b"word4" not in first
        rest = await response.content.read()
        assert time.monotonic() - began > 0.9
        assert rest.rstrip().endswith(b"data: [DONE]")
    with pytest.raises(aiohttp.ClientError):
        await front.gateway.post(stream=True, fake_cut=2, fake_pause=0.05, max_tokens=5)


async def test_who_goes_away_releases(front: Front, engines: list[OpenAIEngine], ledger: Ledger) -> None:
    for stream in (True, False):
        body = {"stream": stream, "fake_pause": 0.2 if stream else 5.0, "max_tokens": 100}
        request = asyncio.create_task(front.gateway.post(**body))
        await soon(lambda: sum(engine.running for engine in engines) == 1)
        request.cancel()
        await soon(lambda: sum(engine.running for engine in engines) == 0 and ledger.sessions() == [])
    await fill(front)
    held = asyncio.create_task(front.post("out"))
    await soon(ledger.has("out", "HELD"))
    held.cancel()
    await soon(lambda: ledger.session("out") is None)


async def test_a_proxy_that_is_gone_costs_no_answer(
    server: Server, pool: str, engines: list[OpenAIEngine], ledger: Ledger, tmp_path: Path
) -> None:
    for kind in ("vllm", "sglang"):
        async with proxied(server.address, pool) as stays:
            async with proxied(server.address, pool) as goes:
                workers = [stays.url, goes.url]
                starting = router(f"{kind}-front", f"{kind}-router", tmp_path / f"{kind}.log", workers)
                gateway = await starting.__aenter__()
            try:
                front = Front(kind, gateway, [stays], tmp_path / f"{kind}.log")
                answers = [await front.post("s-1") for _ in range(6)]
                assert [answer.status for answer in answers] == [200] * 6
                assert len({answer.headers["X-Moorage-Instance"] for answer in answers}) == 1
                assert ledger.state().active_sessions == 1
                await stays.post("/finish_session?session_id=s-1")
            finally:
                await starting.__aexit__(None, None, None)


async def test_models_and_health(front: Front) -> None:
    models = (await front.gateway.get("/v1/models")).json["data"]
    # SGLang's gateway answers of itself.
    assert [model["id"] for model in models] == [{"vllm": "tiny", "sglang": "unknown"}[front.kind]]
    assert (await front.gateway.get("/health")).status == 200
