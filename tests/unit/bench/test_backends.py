"""Backends: the emulated engine behind asyncio, and the protocol spoken to vLLM."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from bench import virtual_time
from bench.backends import EmulatedBackend, VllmBackend
from bench.emulator import EmulatedEngine, EngineConfig


def test_emulated_requests_stream_side_by_side() -> None:
    async def main() -> None:
        async with EmulatedBackend(EmulatedEngine()) as backend:
            seen: list[tuple[str, int]] = []

            def note(name: str) -> Callable[[int], None]:
                return lambda count: seen.append((name, count))

            answers = await asyncio.gather(*(backend.complete(name, [1, 2, 3], 3, note(name)) for name in "ab"))
            assert [len(answer.token_ids) for answer in answers] == [3, 3]
            assert seen == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]

    virtual_time.run(main())


def test_a_cancelled_request_leaves_the_engine() -> None:
    async def main() -> None:
        async with EmulatedBackend(EmulatedEngine()) as backend:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await backend.complete("r", list(range(100)), 5_000, lambda _: None)
            assert (backend.engine.running, backend.engine.pool.free) == (0, backend.engine.pool.total)
            assert len((await backend.complete("next", [1], 2, lambda _: None)).token_ids) == 2

    virtual_time.run(main())


def test_a_request_that_can_not_fit_is_refused_to_its_caller_only() -> None:
    async def main() -> None:
        async with EmulatedBackend(EmulatedEngine(EngineConfig())) as backend:
            with pytest.raises(ValueError, match="do not fit"):
                await backend.complete("r", [1], 9_000, lambda _: None)
            assert len((await backend.complete("next", [1], 2, lambda _: None)).token_ids) == 2

    virtual_time.run(main())


class Stream(httpx.AsyncByteStream):
    def __init__(self, events: list[object]) -> None:
        self._lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            yield line.encode()


def vllm(events: list[object], requests: list[httpx.Request], status: int = 200) -> VllmBackend:
    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(status, stream=Stream(events))

    return VllmBackend("http://engine:8000/", "tiny", transport=httpx.MockTransport(answer))


def token(*ids: int) -> dict[str, object]:
    return {"choices": [{"text": "", "token_ids": list(ids)}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}


async def test_vllm_gets_token_ids_and_an_exact_length() -> None:
    requests: list[httpx.Request] = []
    counts: list[int] = []
    async with vllm([token(7), token(8, 9), USAGE], requests) as backend:
        answer = await backend.complete("s/0", [1, 2, 3], 3, counts.append)
    assert (answer.token_ids, answer.cached_tokens, counts) == ([7, 8, 9], 2, [1, 3])
    body = json.loads(requests[0].content)
    assert requests[0].url == "http://engine:8000/v1/completions"
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (3, True, 1.0)
    assert body["stream_options"] == {"include_usage": True}
    assert "seed" not in body


async def test_cached_tokens_are_unknown_where_the_server_does_not_tell() -> None:
    async with vllm([token(7), {"choices": [], "usage": {"prompt_tokens": 3}}], []) as backend:
        assert (await backend.complete("r", [1], 1, lambda _: None)).cached_tokens is None


async def test_a_short_answer_an_error_event_and_a_bad_status_are_errors() -> None:
    async with vllm([token(7), USAGE], []) as backend:
        with pytest.raises(RuntimeError, match="1 of 2 tokens"):
            await backend.complete("r", [1], 2, lambda _: None)
    async with vllm([{"error": {"message": "engine died"}}], []) as backend:
        with pytest.raises(RuntimeError, match="engine died"):
            await backend.complete("r", [1], 2, lambda _: None)
    async with vllm([], [], status=400) as backend:
        with pytest.raises(httpx.HTTPStatusError):
            await backend.complete("r", [1], 2, lambda _: None)


async def test_a_refused_cache_reset_is_an_error() -> None:
    def backend(success: bool) -> VllmBackend:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"success": success}))
        return VllmBackend("http://engine", "tiny", transport=transport)

    async with backend(True) as willing:
        await willing.reset_prefix_cache()
    async with backend(False) as busy:
        with pytest.raises(RuntimeError, match="would not reset"):
            await busy.reset_prefix_cache()


def test_a_paused_engine_stands_still_and_goes_on() -> None:
    async def main() -> None:
        async with EmulatedBackend(EmulatedEngine()) as backend:
            counts: list[int] = []
            request = asyncio.create_task(backend.complete("r", [1, 2, 3], 500, counts.append))
            await asyncio.sleep(0.1)
            backend.pause()
            await asyncio.sleep(0.1)
            seen = len(counts)
            await asyncio.sleep(5.0)
            assert 0 < len(counts) == seen < 500
            backend.resume()
            assert len((await request).token_ids) == 500

    virtual_time.run(main())


def test_a_lost_engine_fails_its_requests_and_comes_back_empty() -> None:
    async def main() -> None:
        async with EmulatedBackend(EmulatedEngine()) as backend:
            prompt = list(range(320))
            request = asyncio.create_task(backend.complete("r", prompt, 5_000, lambda _: None))
            await asyncio.sleep(0.5)
            backend.lose()
            with pytest.raises(httpx.ReadError):
                await request
            with pytest.raises(httpx.ConnectError):
                await backend.complete("refused", prompt, 1, lambda _: None)
            backend.start_again(EmulatedEngine())
            assert (await backend.complete("again", prompt, 1, lambda _: None)).cached_tokens == 0

    virtual_time.run(main())
