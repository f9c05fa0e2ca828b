"""An engine that speaks OpenAI's API and does as its requests say, and heartbeats for such engines."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from aiohttp import web

from moorage.v1 import scheduler_pb2 as pb
from tests.integration.processes import Server

INTERVAL_S = 0.2
BLOCK = 16


class OpenAIEngine:
    """One token per word of the prompt. What a session sent before comes from the cache.

    Fields of a request beyond OpenAI's: `fake_status` fails it, `fake_pause` waits before every piece, in seconds,
    `fake_cut` breaks the connection after so many pieces, `fake_pad` makes each so much larger, in bytes.
    """

    def __init__(self, instance_id: str, rank: int = 0) -> None:
        self.instance_id = instance_id
        self.rank = rank
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.pieces = 0
        self.running = 0
        self.aborted = 0
        self.port = 0
        self._cached: dict[str, int] = {}
        self._runner: web.AppRunner | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens, on the port it had, unless it does already."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=64 << 20)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Nobody listens at its port any more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if status := body.get("fake_status"):
            return web.json_response({"error": {"message": "as told"}}, status=status, headers={"X-Engine": "here"})
        self.running += 1
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        usage = self._usage(request, body)
        pause, count = body.get("fake_pause", 0.0), usage["completion_tokens"]
        if not body.get("stream"):
            await asyncio.sleep(pause)
            return web.json_response({"choices": [{"text": "word " * count}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number in range(count):
            await asyncio.sleep(pause)
            if number == body.get("fake_cut"):
                assert request.transport is not None
                request.transport.abort()
                return response
            text = f"word{number}" + "x" * body.get("fake_pad", 0)
            await response.write(_event({"choices": [{"index": 0, "text": text}]}))
            self.pieces += 1
        if request.path == "/v1/responses":
            told = {"input_tokens": usage["prompt_tokens"], "output_tokens": count}
            await response.write(_event({"type": "response.completed", "response": {"usage": told}}))
        elif (body.get("stream_options") or {}).get("include_usage"):
            await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _usage(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt") or body.get("input") or " ".join(m["content"] for m in body["messages"])
        tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        count = body.get("max_tokens", 3)
        session = request.headers.get("X-Session-ID") or request.headers["X-SMG-Routing-Key"]
        cached = min(self._cached.get(session, 0), tokens)
        self._cached[session] = tokens + count
        return {
            "prompt_tokens": tokens,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@asynccontextmanager
async def beating(server: Server, pool: str, *engines: OpenAIEngine, blocks: int = 100_000) -> AsyncIterator[None]:
    """Heartbeats for the engines that listen, while the block lasts."""

    def beat() -> None:
        snapshots = [
            pb.InstanceSnapshot(
                instance_id=engine.instance_id,
                dp_rank=engine.rank,
                endpoint=engine.endpoint,
                incarnation="1",
                sequence=time.time_ns(),
                block_size=BLOCK,
                total_blocks=blocks,
                used_blocks=0,
                max_context_tokens=8192,
            )
            for engine in engines
            if engine._runner is not None
        ]
        with suppress(grpc.RpcError):
            server.api.scheduler.Heartbeat(pb.HeartbeatRequest(pool=pool, instances=snapshots), timeout=10)

    async def for_ever() -> None:
        while True:
            await asyncio.to_thread(beat)
            await asyncio.sleep(INTERVAL_S)

    for engine in engines:
        await engine.start()
    await asyncio.to_thread(beat)
    task = asyncio.create_task(for_ever())
    try:
        yield
    finally:
        task.cancel()
        for engine in engines:
            await engine.stop()


def free_address() -> str:
    """HOST:PORT where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
