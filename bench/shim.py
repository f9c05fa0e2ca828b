"""A proxy between vllm-router's program scheduler and its engines, which keeps from them what they refuse.

The scheduler reads `vllm_xargs.agentic_context`, an object, from a request's body and passes it on; vLLM takes no
objects there. The proxy cuts it out of requests and hands answers back byte by byte, unread, which keeps it cheap: what
streams is most of the work. It speaks as much HTTP/1.1 as the router's client does: one request at a time on a
connection, bodies with a Content-Length.

`python -m bench.shim 8111=http://127.0.0.1:8101 8112=http://127.0.0.1:8102` serves on loopback until SIGTERM.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import uvloop

FIELD, CONTEXT = "vllm_xargs", "agentic_context"

HEAD_END = b"\r\n\r\n"


def strip(body: bytes) -> bytes:
    """Return a JSON body without the context of program scheduling, and untouched where it has none."""
    if f'"{CONTEXT}"'.encode() not in body:
        return body
    document = json.loads(body)
    extra = {name: value for name, value in document.pop(FIELD, {}).items() if name != CONTEXT}
    if extra:
        document[FIELD] = extra
    return json.dumps(document, separators=(",", ":")).encode()


class Requests:
    """Cuts a client's bytes into requests, rewritten as the engine may see them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the requests that are complete now; ValueError for a body in chunks."""
        self._rest += data
        complete: list[bytes] = []
        while (end := self._rest.find(HEAD_END)) >= 0:
            lines = self._rest[:end].split(b"\r\n")
            length = _body_length(lines)
            start = end + len(HEAD_END)
            if len(self._rest) < start + length:
                break
            body = strip(self._rest[start : start + length])
            self._rest = self._rest[start + length :]
            complete.append(_with_length(lines, len(body)) + body)
        return complete


def _body_length(lines: Sequence[bytes]) -> int:
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
        if name.lower() == b"transfer-encoding":
            raise ValueError("request bodies in chunks are not spoken here")
    return 0


def _with_length(lines: Sequence[bytes], length: int) -> bytes:
    kept = [line for line in lines if not line.lower().startswith(b"content-length:")]
    return b"\r\n".join([*kept, b"content-length: %d" % length]) + HEAD_END


class _Engine(asyncio.Protocol):
    """The connection to an engine: what it says goes to the client as it is."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.close()


class _Client(asyncio.Protocol):
    """A connection of the router, with one of its own to the engine."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._requests = Requests()
        self._ready: list[bytes] = []
        self._engine: asyncio.WriteTransport | None = None
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            engine, _ = await loop.create_connection(lambda: _Engine(self._transport), *self._address)
        except OSError:
            # The router sees a worker that closed its connection, as it would without the proxy.
            self._transport.close()
            return
        if self._transport.is_closing():
            engine.close()
            return
        self._engine = engine
        engine.writelines(self._ready)
        self._ready.clear()

    def data_received(self, data: bytes) -> None:
        try:
            complete = self._requests.feed(data)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            self._transport.close()
            return
        if self._engine is None:
            self._ready += complete
        elif complete:
            self._engine.writelines(complete)

    def connection_lost(self, error: Exception | None) -> None:
        # Closing aborts the request in the engine, as the router's own disconnect would.
        if self._engine is not None:
            self._engine.close()


async def serve(engines: Mapping[int, str]) -> None:
    """Serve each engine (its URL by the port on loopback to listen on) until cancelled."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        for port, url in engines.items():
            target = urlsplit(url)
            client = partial(_Client, target.hostname or "127.0.0.1", target.port or 80)
            server = await loop.create_server(client, "127.0.0.1", port)
            stack.callback(server.close)
        await asyncio.Event().wait()


def main() -> int:
    """Serve the engines named on the command line."""
    pairs = [argument.partition("=") for argument in sys.argv[1:]]
    if not pairs or not all(port.isdecimal() and url for port, _, url in pairs):
        print("usage: python -m bench.shim PORT=URL ...", file=sys.stderr)
        return 2
    uvloop.run(serve({int(port): url for port, _, url in pairs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
