"""What a player sends requests to: an emulated engine, or a real vLLM over HTTP."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.emulator import EmulatedEngine

MAX_LAG_S = 0.5
"""How far an emulated engine may lag behind the clock before it lets time go by."""

OnTokens = Callable[[int], None]
"""Called whenever tokens arrive, with the number received so far."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request."""

    token_ids: list[int]
    cached_tokens: int | None
    """Prompt tokens that came from the prefix cache; None where the engine does not say."""


class Backend(Protocol):
    """An engine that completes prompts given as token ids."""

    async def complete(
        self, request_id: str, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens
    ) -> Completion:
        """Generate exactly `output_tokens` tokens. Cancelling the call aborts the request."""
        ...


@dataclass(slots=True)
class _Stream:
    on_tokens: OnTokens
    done: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)


class EmulatedBackend:
    """Drives an emulated engine by the running loop's clock, real or virtual. Enter it to start the engine."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine = engine
        self._streams: dict[str, _Stream] = {}
        self._work = asyncio.Event()
        self._goes = asyncio.Event()
        self._goes.set()
        self._lost = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def complete(
        self, request_id: str, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens
    ) -> Completion:
        """See `Backend.complete`; httpx.ConnectError while the engine is lost."""
        if self._lost:
            raise httpx.ConnectError("connection refused")
        self.engine.submit(request_id, prompt, output_tokens)
        stream = _Stream(on_tokens, asyncio.get_running_loop().create_future())
        self._streams[request_id] = stream
        self._work.set()
        try:
            return await stream.done
        finally:
            if self._streams.pop(request_id, None) is not None:
                self.engine.abort(request_id)

    def pause(self) -> None:
        """Stand still, keeping what runs."""
        self._goes.clear()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._goes.set()

    def lose(self) -> None:
        """Die: whatever runs fails, and so does whatever comes."""
        self._lost = True
        for stream in self._streams.values():
            if not stream.done.done():
                stream.done.set_exception(httpx.ReadError("connection reset"))

    def start_again(self, engine: EmulatedEngine) -> None:
        """Come back as another incarnation, with nothing in its cache."""
        self.engine = engine
        self._lost = False

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        try:
            while True:
                if not self._goes.is_set():
                    await self._goes.wait()
                    now = loop.time()
                self._work.clear()
                due = self.engine.step(now)
                self._deliver()
                if due is None:
                    await self._work.wait()
                    now = loop.time()
                else:
                    await asyncio.sleep(max(0.0, due - loop.time()))
                    # A step that is found late ended on time: the loop's delays must not slow the engine down.
                    now = max(due, loop.time() - MAX_LAG_S)
        except Exception as error:
            # Without this its callers would wait for ever; the error itself comes out when the engine is left.
            for stream in self._streams.values():
                stream.done.set_exception(RuntimeError(f"the engine failed: {error}"))
            raise

    def _deliver(self) -> None:
        for output in self.engine.drain():
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.tokens.append(output.token)
            stream.on_tokens(len(stream.tokens))
            if output.finished:
                del self._streams[output.request_id]
                if not stream.done.done():
                    stream.done.set_result(Completion(stream.tokens, output.cached_tokens))


class VllmBackend:
    """A vLLM server. Prompts go as token ids and generated ids come back, so no tokenizer is needed.

    Cached tokens are reported by servers started with `--enable-prompt-tokens-details`.
    """

    def __init__(
        self, url: str, model: str, read_timeout_s: float = 300.0, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(read_timeout_s, connect=5.0, pool=None),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def metrics(self) -> list[Sample]:
        """Return what the server's metrics page shows."""
        response = await self._client.get("/metrics")
        response.raise_for_status()
        return [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache (development endpoint); RuntimeError where the server refuses."""
        response = await self._client.post("/reset_prefix_cache")
        response.raise_for_status()
        if not response.json().get("success", True):
            raise RuntimeError(f"{self.url} would not reset its prefix cache: requests are running")

    def request(
        self, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Return headers and body of a completion request."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {"X-Request-Id": request_id}, body

    async def complete(
        self, request_id: str, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens
    ) -> Completion:
        """See `Backend.complete`; httpx.HTTPError where the server fails, RuntimeError where its answer falls short."""
        headers, body = self.request(request_id, prompt, output_tokens)
        tokens: list[int] = []
        cached: int | None = None
        async with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.is_error:
                await response.aread()
                response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event: dict[str, Any] = json.loads(line[len("data: ") :])
                if "error" in event:
                    raise RuntimeError(f"{self.url}: {event['error']}")
                for choice in event.get("choices", ()):
                    tokens += choice.get("token_ids") or ()
                    on_tokens(len(tokens))
                cached = _cached_tokens(event, cached)
        if len(tokens) != output_tokens:
            raise RuntimeError(f"{self.url}: {len(tokens)} of {output_tokens} tokens")
        return Completion(tokens, cached)


def _cached_tokens(event: dict[str, Any], known: int | None) -> int | None:
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    value = details.get("cached_tokens", known)
    return None if value is None else int(value)
