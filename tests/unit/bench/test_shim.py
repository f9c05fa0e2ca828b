"""The shim: what it cuts out of a request, and that the rest passes as it is."""

import asyncio
import json

import httpx
import pytest

from bench import shim
from bench.control_plane import free_port


def request(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: e\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_the_context_is_cut_out_and_nothing_else() -> None:
    body = {"prompt": [1, 2], "vllm_xargs": {"agentic_context": {"program_id": "p"}, "kept": 1}, "stream": True}
    assert json.loads(shim.strip(json.dumps(body).encode())) == {
        "prompt": [1, 2],
        "vllm_xargs": {"kept": 1},
        "stream": True,
    }
    del body["vllm_xargs"]
    alone = {**body, "vllm_xargs": {"agentic_context": {}}}
    assert json.loads(shim.strip(json.dumps(alone).encode())) == body


def test_a_body_without_a_context_stays_as_it_is() -> None:
    body = b'{ "prompt" : "words", "vllm_xargs": {"kept": 1} }'
    assert shim.strip(body) is body


def test_requests_are_found_however_the_bytes_are_split() -> None:
    whole = request(b'{"vllm_xargs":{"agentic_context":{}},"n":1}') + b"GET /metrics HTTP/1.1\r\nhost: e\r\n\r\n"
    for size in (1, 7, len(whole)):
        requests = shim.Requests()
        found = [part for n in range(0, len(whole), size) for part in requests.feed(whole[n : n + size])]
        assert found == [
            b'POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 7\r\n\r\n{"n":1}',
            b"GET /metrics HTTP/1.1\r\nhost: e\r\ncontent-length: 0\r\n\r\n",
        ]


def test_a_body_in_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="chunks"):
        shim.Requests().feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")


def test_requests_and_answers_pass_and_a_closed_engine_closes_the_client() -> None:
    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        port = free_port()
        proxy = asyncio.create_task(shim.serve({port: f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}))
        await asyncio.sleep(0.1)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                for number in range(2):
                    body = {"n": number, "vllm_xargs": {"agentic_context": {"task_id": "t"}}}
                    assert (await client.post("/", json=body)).json() == {"n": number}
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(b"{}") * 2)
            async with asyncio.timeout(5.0):
                assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 2
            writer.close()
        finally:
            proxy.cancel()
            server.close()

    asyncio.run(main())
