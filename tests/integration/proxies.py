"""Proxies in this process, and a client of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import grpc

from moorage.proxy.main import run
from moorage.proxy.settings import ProxySettings
from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import operator_pb2 as opb
from moorage.v1 import scheduler_pb2 as pb
from tests.integration.processes import PATIENCE_S, Server

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Answer:
    """An answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Its body, of an answer that is JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, the last `[DONE]` aside."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


class Caller:
    """A client of a proxy that knows nothing of moorage."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(PATIENCE_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()

    async def post(self, path: str = COMPLETIONS, session: str | None = None, /, **body: Any) -> Answer:
        """POSTs a body; `headers` are headers."""
        headers = {**({"X-Session-ID": session} if session else {}), **body.pop("headers", {})}
        content = {"model": "tiny", "prompt": "a b c d", **body} if path == COMPLETIONS else {"model": "tiny", **body}
        async with self.http.post(path, json=content, headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Answer:
        """GETs."""
        async with self.http.get(path) as response:
            return Answer(response.status, response.headers, await response.read())


@asynccontextmanager
async def proxied(server: str, pool: str = "default", **settings: Any) -> AsyncIterator[Caller]:
    """A proxy of its own, stopped at the end of the block, and a client of it."""
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    chosen = ProxySettings(listen="127.0.0.1:0", server=server, pool=pool, **{"grace": 0.2, **settings})
    task = asyncio.create_task(run(chosen, stop=stop, on_ready=address.set_result))
    await asyncio.wait([task, address], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        async with Caller(f"http://{await address}") as caller:
            yield caller
    finally:
        stop.set()
        await task


class Ledger:
    """What the control plane says of one pool."""

    def __init__(self, server: Server, pool: str) -> None:
        self._server, self.pool = server, pool

    def session(self, session_id: str) -> ipb.Session | None:
        """A session, None where there is none."""
        request = ipb.GetSessionRequest(pool=self.pool, session_id=session_id)
        try:
            return self._server.api.inspector.GetSession(request, timeout=PATIENCE_S).session
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise

    def sessions(self) -> list[ipb.Session]:
        """All sessions, held ones too."""
        request = ipb.ListSessionsRequest(pool=self.pool, page_size=100)
        return list(self._server.api.inspector.ListSessions(request, timeout=PATIENCE_S).sessions)

    def state(self) -> ipb.GetPoolResponse:
        """The pool."""
        return self._server.api.inspector.GetPool(ipb.GetPoolRequest(pool=self.pool), timeout=PATIENCE_S)

    def cap(self, sessions: int) -> None:
        """From now on each instance takes so many sessions."""
        config = opb.PoolConfig(policy="static", static_cap=sessions)
        request = opb.ConfigurePoolRequest(pool=self.pool, config=config)
        request.update_mask.paths.extend(["policy", "static_cap"])
        self._server.api.operator.ConfigurePool(request, timeout=PATIENCE_S)

    def has(self, session_id: str, phase: str) -> Callable[[], bool]:
        """A probe: whether the session is in a phase, such as TOOL_WAIT."""
        number = pb.Phase.Value(f"PHASE_{phase}")
        return lambda: any(s.session_id == session_id and s.phase == number for s in self.sessions())


async def soon(probe: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """The first true answer of `probe`, asked in a thread; AssertionError where there is none in time."""
    deadline = time.monotonic() + within_s
    while not (answer := await asyncio.to_thread(probe)):
        assert time.monotonic() < deadline, f"not within {within_s:g} s, last answer: {answer!r}"
        await asyncio.sleep(0.02)
    return answer
