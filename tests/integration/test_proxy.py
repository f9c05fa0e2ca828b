"""`moorage proxy` in front of engines that speak OpenAI's API, with a real server behind it."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from moorage.proxy.rules import ClassPolicy, Rules
from moorage.proxy.settings import Timeouts
from tests.integration.openai_engine import OpenAIEngine, beating, free_address
from tests.integration.processes import Server
from tests.integration.proxies import COMPLETIONS, Caller, Ledger, proxied, soon


@pytest.fixture
async def engine(server: Server, pool: str) -> AsyncIterator[OpenAIEngine]:
    made = OpenAIEngine("engine-0")
    async with beating(server, pool, made):
        yield made


@pytest.fixture
async def caller(server: Server, pool: str, engine: OpenAIEngine) -> AsyncIterator[Caller]:
    async with proxied(server.address, pool, max_hold=20.0) as made:
        yield made


async def test_a_conversation_is_one_session(caller: Caller, engine: OpenAIEngine, ledger: Ledger) -> None:
    messages = [{"role": "user", "content": "word " * 100}]
    path, headers = "/v1/chat/completions", {"X-Workload-Class": "agentic", "X-Group-ID": "g-1"}
    first = await caller.post(path, "s-1", messages=messages, headers=headers)
    assert (first.status, first.headers["X-Moorage-Instance"], first.headers["X-Moorage-Session"]) == (
        200, "engine-0", "s-1",
    )  # fmt: skip
    messages.append({"role": "user", "content": "more " * 20})
    second = await caller.post(path, "s-1", messages=messages, headers=headers)
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 103
    found = await soon(lambda: (s := ledger.session("s-1")) and s.context_tokens == 123 and s)
    assert (found.workload_class, found.group_id, found.turn) == ("agentic", "g-1", 1)
    assert ledger.has("s-1", "TOOL_WAIT")()
    assert engine.headers[1]["x-session-id"] == "s-1"
    ended = await caller.post("/finish_session?session_id=s-1")
    assert ended.json == {"session_id": "s-1", "released": True, "pending": False}
    assert ledger.session("s-1") is None
    assert ledger.state().completed_by_class["agentic"] == 1
    again = await caller.post("/finish_session?session_id=s-1")
    assert again.json["released"] is False


async def test_a_stream_shows_the_usage_only_to_whom_asked(
    caller: Caller, engine: OpenAIEngine, ledger: Ledger
) -> None:
    plain = await caller.post(COMPLETIONS, "s-1", stream=True, prompt="a b c d e")
    assert plain.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert [event["choices"][0]["text"] for event in plain.events] == ["word0", "word1", "word2"]
    found = await soon(lambda: (s := ledger.session("s-1")) and s.context_tokens and s)
    assert found.context_tokens == 8
    asked = await caller.post(stream=True, stream_options={"include_usage": True})
    assert asked.events[-1]["usage"]["prompt_tokens"] == 4
    other = await caller.post(stream=True, stream_options={"include_usage": False, "other": 1})
    assert len(other.events) == 3
    assert [r["stream_options"] for r in engine.requests] == [
        {"include_usage": True}, {"include_usage": True}, {"include_usage": True, "other": 1},
    ]  # fmt: skip
    told = await caller.post("/v1/responses", "r-1", input="a b", stream=True)
    assert told.events[-1]["type"] == "response.completed"
    assert "stream_options" not in engine.requests[-1]
    assert (await soon(lambda: (s := ledger.session("r-1")) and s.context_tokens and s)).context_tokens == 5


async def test_a_request_without_an_id_is_a_session_of_its_own(caller: Caller, ledger: Ledger) -> None:
    answers = await asyncio.gather(*(caller.post(prompt=[1, 2, 3], max_tokens=2) for _ in range(5)))
    assert len({answer.headers["X-Moorage-Session"] for answer in answers}) == 5
    await soon(lambda: sum(ledger.state().completed_by_class.values()) == 5)
    assert ledger.sessions() == []


async def test_the_last_request_says_so(caller: Caller, ledger: Ledger) -> None:
    await caller.post(COMPLETIONS, "s-1")
    assert ledger.session("s-1") is not None
    await caller.post(COMPLETIONS, "s-1", headers={"X-Session-End": "true"})
    await soon(lambda: ledger.session("s-1") is None)
    assert sum(ledger.state().completed_by_class.values()) == 1


async def test_silence_ends_a_session(server: Server, pool: str, engine: OpenAIEngine, ledger: Ledger) -> None:
    rules = Rules(classes={"short": ClassPolicy(idle_s=0.3), "once": ClassPolicy(single_turn=True)})
    async with proxied(server.address, pool, rules=rules, lease=2.0) as caller:
        for name in ("short", "once", "other"):
            await caller.post(COMPLETIONS, name, headers={"X-Workload-Class": name})
        await soon(lambda: ledger.session("short") is None and ledger.session("once") is None, 10)
        assert ledger.session("other") is not None
    completed = ledger.state().completed_by_class
    assert (completed["short"], completed["once"]) == (1, 1)


async def test_a_held_request_waits_for_its_turn(caller: Caller, ledger: Ledger) -> None:
    ledger.cap(1)
    assert (await caller.post(COMPLETIONS, "s-1")).status == 200
    held = asyncio.create_task(caller.post(COMPLETIONS, "s-2"))
    await soon(ledger.has("s-2", "HELD"))
    await caller.post("/finish_session?session_id=s-1")
    assert (await held).status == 200


async def test_beyond_the_bound_it_is_told_to_come_back(
    server: Server, pool: str, engine: OpenAIEngine, ledger: Ledger
) -> None:
    ledger.cap(1)
    async with proxied(server.address, pool, max_hold=0.3) as caller:
        await caller.post(COMPLETIONS, "s-1")
        refused = await caller.post(COMPLETIONS, "s-2")
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        error = refused.json["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "POOL_CAP", None)
        # Who named its session may come back to its place; who did not can not.
        assert ledger.has("s-2", "HELD")()
        assert (await caller.post()).status == 429
        await soon(lambda: {s.session_id for s in ledger.sessions()} == {"s-1", "s-2"})
        ended = await caller.post("/finish_session?session_id=s-2&outcome=aborted")
        assert ended.json["released"] is True


async def test_who_goes_away_while_held_leaves_the_queue(caller: Caller, ledger: Ledger) -> None:
    ledger.cap(1)
    await caller.post(COMPLETIONS, "s-1")
    held = asyncio.create_task(caller.post(COMPLETIONS, "s-2"))
    await soon(ledger.has("s-2", "HELD"))
    held.cancel()
    await soon(lambda: ledger.session("s-2") is None)


async def test_what_can_never_fit_is_unprocessable(caller: Caller, engine: OpenAIEngine) -> None:
    answer = await caller.post(headers={"X-Prompt-Tokens": "1000000000"})
    assert (answer.status, answer.json["error"]["code"]) == (422, "TOO_LARGE")
    assert engine.requests == []


@pytest.mark.parametrize(
    ("body", "headers", "named"),
    [
        ({}, {"X-Session-ID": "x" * 257}, "256 bytes"),
        ({"session_id": ["s"]}, {}, "session_id"),
        ({}, {"X-Group-Size": "-1"}, "X-Group-Size"),
    ],
)
async def test_what_is_malformed_is_named(
    caller: Caller, body: dict[str, object], headers: dict[str, str], named: str
) -> None:
    answer = await caller.post(headers=headers, **body)
    assert answer.status == 400
    assert named in answer.json["error"]["message"]


async def test_without_moorage_it_says_so_or_goes_on(engine: OpenAIEngine) -> None:
    nowhere = free_address()
    async with proxied(nowhere) as caller:
        answer = await caller.post()
        assert (answer.status, answer.json["error"]["type"]) == (503, "service_unavailable_error")
        assert "Retry-After" in answer.headers
        assert (await caller.get("/health")).status == 503
        assert (await caller.get("/v1/models")).status == 503
    async with proxied(nowhere, on_unavailable="admit", fallback=[engine.endpoint]) as caller:
        first, second = await caller.post(COMPLETIONS, "s-1"), await caller.post(COMPLETIONS, "s-1")
        assert (first.status, second.status) == (200, 200)
        assert first.headers["X-Moorage-Instance"] == engine.endpoint
        assert (await caller.get("/health")).status == 200


@pytest.mark.parametrize(("status", "outcome"), [(400, "aborted"), (503, "failed")])
async def test_errors_of_engines_are_passed_on(caller: Caller, ledger: Ledger, status: int, outcome: str) -> None:
    answer = await caller.post(fake_status=status)
    assert (answer.status, answer.headers["X-Engine"]) == (status, "here")
    assert answer.json == {"error": {"message": "as told"}}
    await soon(lambda: ledger.sessions() == [])
    assert sum(ledger.state().released_by_class.values()) == 1
    assert sum(ledger.state().completed_by_class.values()) == 0


async def test_a_stream_that_breaks_is_not_passed_off_as_whole(caller: Caller) -> None:
    with pytest.raises(aiohttp.ClientError):
        await caller.post(stream=True, fake_cut=2, fake_pause=0.05, max_tokens=5)
    assert (await caller.post()).status == 200


async def test_who_goes_away_cancels_the_engine(caller: Caller, engine: OpenAIEngine, ledger: Ledger) -> None:
    for stream in (True, False):
        request = asyncio.create_task(caller.post(stream=stream, fake_pause=5.0, max_tokens=100))
        await soon(lambda: engine.running == 1)
        assert len(ledger.sessions()) == 1
        request.cancel()
        await soon(lambda: engine.running == 0)
        await soon(lambda: ledger.sessions() == [])
    assert engine.aborted == 2


async def test_a_slow_client_slows_the_engine(caller: Caller, engine: OpenAIEngine) -> None:
    body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 2000, "fake_pad": 100_000}
    async with caller.http.post("/v1/completions", json=body) as response:
        await response.content.readany()
        await soon(lambda: engine.pieces > 0)
        before = -1
        while before != engine.pieces:
            before = engine.pieces
            await asyncio.sleep(1.0)
        # Sockets and buffers of three processes' worth hold some; by far not the 200 MB.
        assert before < 500
        size = 0
        while chunk := await response.content.readany():
            size += len(chunk)
    assert size > 190e6


async def test_refused_sessions_move_to_another_engine(server: Server, pool: str, ledger: Ledger) -> None:
    one, two = OpenAIEngine("engine-0"), OpenAIEngine("engine-1")
    async with beating(server, pool, one, two), proxied(server.address, pool, max_hold=5.0) as caller:
        first = await caller.post(COMPLETIONS, "s-1")
        dead, alive = (one, two) if first.headers["X-Moorage-Instance"] == "engine-0" else (two, one)
        await dead.stop()
        second = await caller.post(COMPLETIONS, "s-1")
        assert (second.status, second.headers["X-Moorage-Instance"]) == (200, alive.instance_id)
        answers = [await caller.post() for _ in range(4)]
        assert {answer.headers["X-Moorage-Instance"] for answer in answers} == {alive.instance_id}
        await alive.stop()
        last = await caller.post(COMPLETIONS, "s-1")
        assert last.status in (429, 502)


async def test_engines_have_their_time(server: Server, pool: str, engine: OpenAIEngine) -> None:
    async with proxied(server.address, pool, timeouts=Timeouts(first_byte=0.3, connect=0.1, idle=0.3)) as caller:
        late = await caller.post(fake_pause=3.0)
        assert (late.status, late.json["error"]["code"]) == (504, "engine_timeout")
        with pytest.raises(aiohttp.ClientError):
            await caller.post(stream=True, fake_pause=3.0)
        assert (await caller.post(stream=True, fake_pause=0.15, max_tokens=5)).status == 200
    async with proxied(server.address, pool, timeouts=Timeouts(total=0.5)) as caller:
        with pytest.raises(aiohttp.ClientError):
            await caller.post(stream=True, fake_pause=0.1, max_tokens=50)
    await soon(lambda: engine.running == 0)


async def test_two_proxies_share_a_session(server: Server, pool: str, ledger: Ledger) -> None:
    one, two = OpenAIEngine("engine-0"), OpenAIEngine("engine-1")
    quick = {"rules": Rules(default_policy=ClassPolicy(idle_s=0.5)), "lease": 3.0}
    async with (
        beating(server, pool, one, two),
        proxied(server.address, pool, **quick) as left,
        proxied(server.address, pool, lease=3.0) as right,
    ):
        ledger.cap(1)
        first = await left.post(COMPLETIONS, "s-1", prompt="a b c d")
        await soon(ledger.has("s-1", "TOOL_WAIT"))
        second = await right.post(COMPLETIONS, "s-1", prompt="a b c d e f g h")
        assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
        assert first.headers["X-Moorage-Instance"] == second.headers["X-Moorage-Instance"]
        await soon(lambda: (s := ledger.session("s-1")) and s.turn == 1)
        # The left one thinks that it is idle, the right one has it: it lives on.
        until = time.monotonic() + 5
        while time.monotonic() < until:
            assert ledger.session("s-1") is not None
            await asyncio.sleep(0.1)
        ended = await left.post("/finish_session?session_id=s-1")
        assert ended.json["released"] is True
        assert ledger.session("s-1") is None
        # And it enters again where it is asked for next.
        assert (await right.post(COMPLETIONS, "s-1")).status == 200


async def test_tokens_are_asked_for_and_kept(server: Server, pool: str, engine: OpenAIEngine, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# clients\nsecret-of-the-proxy\n")
    async with proxied(server.address, pool, require_token_file=str(file)) as caller:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Moorage-Token": "wrong"}):
            assert (await caller.post(headers=headers)).status == 401
        assert (await caller.get("/v1/models")).status == 401
        assert (await caller.get("/health")).status == 200
        assert (await caller.post(headers={"Authorization": "Bearer secret-of-the-proxy"})).status == 200
        assert "authorization" not in engine.headers[-1]
        both = {"Authorization": "Bearer engine", "X-Moorage-Token": "secret-of-the-proxy"}
        assert (await caller.post(headers=both)).status == 200
        assert engine.headers[-1]["authorization"] == "Bearer engine"
        assert "x-moorage-token" not in engine.headers[-1]
        file.write_text("another-secret\n")
        assert (await caller.post(headers=both)).status == 401


async def test_headers_travel_end_to_end(caller: Caller, engine: OpenAIEngine) -> None:
    headers = {
        "Authorization": "Bearer engine", "X-Request-ID": "r-1", "Connection": "keep-alive, X-Hop", "X-Hop": "1",
        "X-data-parallel-rank": "7", "X-SMG-Routing-Key": "s-9", "traceparent": "00-1-2-01",
    }  # fmt: skip
    answer = await caller.post(headers=headers)
    seen = engine.headers[-1]
    assert (seen["authorization"], seen["x-request-id"], seen["traceparent"]) == ("Bearer engine", "r-1", "00-1-2-01")
    assert (seen["x-session-id"], seen["x-smg-routing-key"]) == ("s-9", "s-9")
    assert not {"x-hop", "x-data-parallel-rank"} & seen.keys()
    assert (answer.headers["X-Request-ID"], answer.headers["X-Moorage-Session"]) == ("r-1", "s-9")


async def test_a_packed_request_arrives_unpacked(caller: Caller, engine: OpenAIEngine) -> None:
    packed = gzip.compress(json.dumps({"model": "tiny", "prompt": "a b", "stream": True}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with caller.http.post(COMPLETIONS, data=packed, headers=headers) as response:
        assert response.status == 200
    assert engine.requests[-1]["prompt"] == "a b"


async def test_requests_of_one_session_may_overlap(caller: Caller, engine: OpenAIEngine, ledger: Ledger) -> None:
    long = asyncio.create_task(caller.post(COMPLETIONS, "s-1", fake_pause=1.0, prompt="a"))
    await soon(lambda: engine.running == 1)
    short = await caller.post(COMPLETIONS, "s-1", prompt="a b c d e", headers={"X-Session-End": "true"})
    assert short.status == 200
    ended = await caller.post("/finish_session?session_id=s-1&outcome=FAILED")
    assert (ended.status, ended.json["pending"]) == (202, True)
    assert ledger.has("s-1", "RUNNING")() or ledger.has("s-1", "PLACED")()
    assert (await long).status == 200
    await soon(lambda: ledger.session("s-1") is None)
    assert (sum(ledger.state().released_by_class.values()), sum(ledger.state().completed_by_class.values())) == (1, 0)


async def test_a_last_request_that_is_held_may_come_again(
    server: Server, pool: str, engine: OpenAIEngine, ledger: Ledger
) -> None:
    ledger.cap(1)
    async with proxied(server.address, pool, max_hold=0.2) as caller:
        await caller.post(COMPLETIONS, "s-1")
        last = {"X-Session-End": "true"}
        assert (await caller.post(COMPLETIONS, "s-2", headers=last)).status == 429
        assert ledger.has("s-2", "HELD")()
        await caller.post("/finish_session?session_id=s-1")
        assert (await caller.post(COMPLETIONS, "s-2", headers=last)).status == 200
        await soon(lambda: ledger.sessions() == [])


async def test_ranks_are_named(server: Server, pool: str) -> None:
    engine = OpenAIEngine("engine-0", rank=1)
    async with beating(server, pool, engine), proxied(server.address, pool) as caller:
        assert (await caller.post()).status == 200
        assert engine.headers[-1]["x-data-parallel-rank"] == "1"


async def test_models_health_and_what_is_not_there(caller: Caller) -> None:
    assert (await caller.get("/v1/models")).json["data"] == [{"id": "tiny"}]
    assert (await caller.get("/health")).json["status"] == "ok"
    missing = await caller.post("/v1/embeddings", input="a")
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
    for query in ("", "?session_id=s&outcome=LOST"):
        assert (await caller.post(f"/finish_session{query}")).status == 400
