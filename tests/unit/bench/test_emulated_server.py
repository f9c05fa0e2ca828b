"""The emulated engines' HTTP API, as clients of vLLM see it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bench.emulated_server import chat_tokens, serving
from bench.emulator import EmulatedEngine
from tests.unit.client.fake_scheduler import until

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
PROMPT = list(range(100, 164))


@pytest.fixture
async def engine() -> AsyncIterator[EmulatedEngine]:
    async with serving(0, "1", blocks=64, tool_turns=1) as engine:
        yield engine


async def post(engine: EmulatedEngine, path: str, **body: Any) -> Any:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{engine.config.endpoint}{path}", json={"model": "tiny", "max_tokens": 6, **body}) as answer,
    ):
        if answer.status != 200 or not body.get("stream"):
            return await answer.json(content_type=None) if answer.status == 200 else answer.status
        lines = [line.removeprefix("data: ") for line in (await answer.text()).splitlines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


async def test_a_stream_has_the_tokens_of_the_whole_answer_and_the_next_turn_finds_them(engine: EmulatedEngine) -> None:
    events = await post(
        engine, "/v1/completions", prompt=PROMPT, stream=True, return_token_ids=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert len(tokens) == 6
    assert len(events) > 2, "they come as they are made"
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 6
    again = await post(engine, "/v1/completions", prompt=[*PROMPT, *tokens, 7], return_token_ids=True)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert len(again["choices"][0]["token_ids"]) == 6


async def test_a_chat_calls_its_tool_and_goes_on_from_what_is_cached(engine: EmulatedEngine) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "word " * 40}]
    first = (await post(engine, "/v1/chat/completions", messages=messages, tools=TOOLS))["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    (call,) = first["message"]["tool_calls"]
    assert (call["function"]["name"], list(json.loads(call["function"]["arguments"]))) == ("search", ["query"])
    before = chat_tokens(messages)
    messages += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "found"}]
    assert chat_tokens(messages)[: len(before)] == before
    second = await post(engine, "/v1/chat/completions", messages=messages, tools=TOOLS)
    assert second["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in second["choices"][0]["message"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    forced = await post(engine, "/v1/chat/completions", messages=messages, tools=TOOLS, tool_choice="required")
    assert forced["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_streamed_chat_ends_with_its_call(engine: EmulatedEngine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    events = await post(engine, "/v1/chat/completions", messages=messages, tools=TOOLS, stream=True)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"]["content"] for choice in choices).count("t") == 6
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert choices[-1]["delta"]["tool_calls"][0]["function"]["name"] == "search"


async def test_what_does_not_fit_is_refused(engine: EmulatedEngine) -> None:
    assert await post(engine, "/v1/completions", prompt="text") == 400
    assert await post(engine, "/v1/completions", prompt=PROMPT, max_tokens=64 * 16) == 400


async def test_a_client_that_goes_away_frees_its_blocks(engine: EmulatedEngine) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 500, "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{engine.config.endpoint}/v1/completions", json=body) as answer,
    ):
        await answer.content.readany()
        assert engine.running == 1
    await until(lambda: not engine.running)
    assert engine.pool.free == engine.pool.total
