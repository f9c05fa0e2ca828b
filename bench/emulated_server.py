"""Emulated engines behind HTTP: as much of vLLM's OpenAI-compatible API as rollouts use, and heartbeats for them.

`python -m bench.emulated_server --engines 2 --server HOST:PORT --pool POOL` prints one URL a line and serves until
SIGTERM. `/v1/completions` takes token ids and streams them; `/v1/chat/completions` takes messages whose words stand for
a token each, and calls the first tool it is offered until `--tool-turns` results are in the conversation, or for ever
where tool_choice is "required". Nothing the model says means anything: lengths are as asked for, and time and cache are
those of `bench.emulator`.
"""

import argparse
import asyncio
import itertools
import json
import logging
import signal
import sys
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web

from bench.backends import Completion, EmulatedBackend
from bench.demo import HEARTBEAT_S, engine_config, send_snapshots
from bench.emulator import CostModel, EmulatedEngine
from bench.workload import FIRST_TOKEN, TOKEN_COUNT, token_ids
from moorage import AsyncClient

MODEL = "tiny"
#: Half of what a step of the demo's engines takes.
COSTS = CostModel(
    step_overhead_s=0.004_5,
    prefill_token_s=0.000_1,
    prefill_context_s=0.0,
    decode_seq_s=0.000_35,
    decode_context_s=3e-7,
)

Emit = Callable[[Mapping[str, Any]], Awaitable[None]]


class HttpEngine:
    """One emulated engine and its routes."""

    def __init__(self, backend: EmulatedBackend, tool_turns: int) -> None:
        self._backend = backend
        self._tool_turns = tool_turns
        self._numbers = itertools.count()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "max_model_len": self._backend.engine.config.max_context}
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        if not isinstance(prompt, list):
            raise web.HTTPBadRequest(text="prompt: a list of token ids, please")
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "model": MODEL}

        def choice(tokens: list[int], finish: str | None) -> dict[str, Any]:
            told = {"token_ids": tokens} if body.get("return_token_ids") else {}
            return {"index": 0, "text": words(tokens), "finish_reason": finish, **told}

        return await self._answer(request, body, prompt, head, choice, choice)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "model": MODEL, "created": int(time.time())}
        results = sum(message["role"] == "tool" for message in body["messages"])
        wants = body.get("tool_choice") == "required" or results < self._tool_turns
        calls_tool = bool(body.get("tools")) and wants

        def message(tokens: list[int], finish: str | None, role: bool) -> dict[str, Any]:
            content: dict[str, Any] = {"content": words(tokens)}
            if role:
                content["role"] = "assistant"
            if finish is None or not calls_tool:
                return content
            function = {"name": body["tools"][0]["function"]["name"], "arguments": json.dumps({"query": words(tokens)})}
            call = {"id": f"call-{uuid.uuid4().hex[:8]}", "type": "function", "function": function}
            return {**content, "tool_calls": [{"index": 0, **call}]}

        def end(finish: str | None) -> str | None:
            return "tool_calls" if finish and calls_tool else finish

        def whole(tokens: list[int], finish: str | None) -> dict[str, Any]:
            return {"index": 0, "message": message(tokens, finish, True), "finish_reason": end(finish)}

        def piece(tokens: list[int], finish: str | None) -> dict[str, Any]:
            return {"index": 0, "delta": message(tokens, finish, False), "finish_reason": end(finish)}

        head["object"] = "chat.completion.chunk" if body.get("stream") else "chat.completion"
        return await self._answer(request, body, chat_tokens(body["messages"]), head, whole, piece)

    async def _answer(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        prompt: list[int],
        head: Mapping[str, Any],
        whole: Callable[[list[int], str | None], dict[str, Any]],
        piece: Callable[[list[int], str | None], dict[str, Any]],
    ) -> web.StreamResponse:
        count = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        most = self._backend.engine.config.max_context
        if not prompt or len(prompt) + count > most:
            raise web.HTTPBadRequest(text=f"{len(prompt)} + {count} tokens do not fit a context of {most}")
        if not body.get("stream"):
            done = await self._backend.complete(self._request_id(), prompt, count, lambda _: None)
            choices = [whole(done.token_ids, "stop")]
            return web.json_response({**head, "choices": choices, "usage": usage(prompt, done)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def emit(content: Mapping[str, Any]) -> None:
            await response.write(b"data: " + json.dumps({**head, **content}).encode() + b"\n\n")

        done = await self._stream(prompt, count, piece, emit)
        if (body.get("stream_options") or {}).get("include_usage"):
            await emit({"choices": [], "usage": usage(prompt, done)})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _stream(
        self, prompt: list[int], count: int, piece: Callable[[list[int], str | None], dict[str, Any]], emit: Emit
    ) -> Completion:
        """Emit tokens as they come; the emulator draws them from the request's id."""
        request_id = self._request_id()
        tokens, sent, arrived = token_ids(request_id, 0, count), 0, 0
        news = asyncio.Event()

        def on_tokens(received: int) -> None:
            nonlocal arrived
            arrived = received
            news.set()

        work = asyncio.create_task(self._backend.complete(request_id, prompt, count, on_tokens))
        work.add_done_callback(lambda _: news.set())
        try:
            while not work.done():
                await news.wait()
                news.clear()
                if sent < arrived < count:
                    fresh, sent = tokens[sent:arrived], arrived
                    await emit({"choices": [piece(fresh, None)]})
            done = work.result()
        finally:
            work.cancel()
        await emit({"choices": [piece(tokens[sent:], "stop")]})
        return done

    def _request_id(self) -> str:
        return f"{self._backend.engine.config.instance_id}/{next(self._numbers)}"


def words(tokens: list[int]) -> str:
    """A word for each token."""
    return "".join(f"t{token} " for token in tokens)


def chat_tokens(messages: list[Mapping[str, Any]]) -> list[int]:
    """A token for each role and each word; an answer that comes back as a message is what was generated."""
    tokens: list[int] = []
    for message in messages:
        tokens.append(_token(f"<{message['role']}>"))
        tokens += [_token(word) for word in str(message.get("content") or "").split()]
        tokens += [_token(call["function"]["name"]) for call in message.get("tool_calls") or ()]
    return [*tokens, _token("<assistant>")]


def _token(word: str) -> int:
    if word[:1] == "t" and word[1:].isdecimal():
        return int(word[1:])
    return FIRST_TOKEN + zlib.crc32(word.encode()) % TOKEN_COUNT


def usage(prompt: list[int], done: Completion) -> dict[str, Any]:
    """OpenAI's usage."""
    count = len(done.token_ids)
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "total_tokens": len(prompt) + count,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


@asynccontextmanager
async def serving(number: int, incarnation: str, blocks: int, tool_turns: int) -> AsyncIterator[EmulatedEngine]:
    """One engine on a free port of loopback; its endpoint is its URL."""
    runner: web.AppRunner | None = None
    config = engine_config(number, incarnation)
    most = min(config.max_context, blocks * config.block_size)
    config = replace(config, num_blocks=blocks + 1, max_context=most, weight_version="", costs=COSTS)
    engine = EmulatedEngine(config)
    async with EmulatedBackend(engine) as backend:
        app = HttpEngine(backend, tool_turns).application()
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            engine.config = replace(config, endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}")
            yield engine
        finally:
            await runner.cleanup()


async def run(options: argparse.Namespace) -> None:
    """Serve and send heartbeats until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(options.server, pool=options.pool))
        incarnation = uuid.uuid4().hex[:8]
        engines = [
            await stack.enter_async_context(serving(number, incarnation, options.blocks, options.tool_turns))
            for number in range(options.engines)
        ]
        heartbeats = asyncio.create_task(send_snapshots(client, engines))
        stack.callback(heartbeats.cancel)
        await asyncio.sleep(HEARTBEAT_S)
        for engine in engines:
            print(engine.config.endpoint, flush=True)
        await stop.wait()


def main() -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.emulated_server", description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50061", metavar="HOST:PORT", help="control plane to tell")
    parser.add_argument("--pool", default="default")
    parser.add_argument("--engines", type=int, default=2, help="how many [2]")
    parser.add_argument("--blocks", type=int, default=384, help="usable KV blocks of each, of 16 tokens [384]")
    parser.add_argument("--tool-turns", type=int, default=2, help="tool results after which a chat ends [2]")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    asyncio.run(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
