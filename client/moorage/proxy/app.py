"""The routes, who may use them, and what they answer when something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, cast, get_args

from aiohttp import web

from moorage.errors import MoorageError
from moorage.proxy.errors import ProxyError, from_moorage, invalid
from moorage.proxy.forward import Cut, Forwarder, Gone, parsed
from moorage.proxy.headers import REQUEST_ID, ROUTING_KEY, SESSION, upstream_headers
from moorage.proxy.identity import BadRequest, checked_id
from moorage.proxy.placing import PREFIX as PLACE
from moorage.proxy.placing import Placer
from moorage.proxy.pool import PoolView
from moorage.proxy.sessions import SessionBook
from moorage.proxy.tokens import TokenGate
from moorage.proxy.upstream import Limit, Refused, Upstream

GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

_EndedAs = Literal["COMPLETED", "ABORTED", "FAILED", "PAUSED"]
_MODELS_S = 10.0

#: The second for clients behind vllm-router, which answers the first itself.
FINISH = ("/finish_session", "/moorage/finish_session")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """What clients reach.

    Attributes:
        active: requests under way that generate, or wait for a placement.
        quiet: set while there are none.
        draining: the process is about to end, and takes no more of them.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        placer: Placer,
        book: SessionBook,
        upstream: Upstream,
        pool: PoolView,
        gate: TokenGate | None,
        *,
        has_fallback: bool,
    ) -> None:
        self.active = 0
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.draining = False
        self._forwarder = forwarder
        self._placer = placer
        self._book = book
        self._upstream = upstream
        self._pool = pool
        self._gate = gate
        self._has_fallback = has_fallback

    def application(self, max_body: int) -> web.Application:
        """All routes. `max_body` bytes is the largest request."""
        app = web.Application(client_max_size=max_body, middlewares=[_as_openai])
        app.router.add_routes([web.post(path, self._generate) for path in GENERATE])
        app.router.add_routes([web.post(PLACE + path, self._place) for path in GENERATE])
        app.router.add_routes([web.post(path, self._finish) for path in FINISH])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._admitted(request, self._forwarder.handle)

    async def _place(self, request: web.Request) -> web.StreamResponse:
        return await self._admitted(request, self._placer.handle)

    async def _admitted(
        self, request: web.Request, handle: Callable[[web.Request, tuple[str, ...]], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        consumed = self._gate.consumed(request) if self._gate else ()
        if self.draining:
            raise ProxyError(
                503, "the proxy is about to end", kind="service_unavailable_error", code="draining", retry_after=1.0
            )
        self.active += 1
        self.quiet.clear()
        try:
            return await handle(request, consumed)
        finally:
            self.active -= 1
            if not self.active:
                self.quiet.set()

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        """POST /finish_session?session_id=ID[&outcome=COMPLETED|ABORTED|FAILED|PAUSED], or with a JSON body."""
        if self._gate:
            self._gate.consumed(request)
        content = await request.read()
        said = {**(parsed(content) if content else {}), **request.query}
        try:
            session_id = checked_id(str(said.get("session_id", "")), "session_id")
        except BadRequest as error:
            raise invalid(str(error)) from None
        outcome = str(said.get("outcome", "COMPLETED")).upper()
        if outcome not in get_args(_EndedAs):
            raise invalid(f"outcome: {outcome!r} is not one of {', '.join(get_args(_EndedAs))}")
        try:
            finished = await self._book.finish(session_id, cast(_EndedAs, outcome))
        except MoorageError as error:
            raise from_moorage(error) from error
        answer = {"session_id": session_id, "released": finished.released, "pending": finished.pending}
        return web.json_response(answer, status=202 if finished.pending else 200)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """As the first engine that answers has them: all engines of a pool serve one model."""
        consumed = self._gate.consumed(request) if self._gate else ()
        headers = upstream_headers(request.headers, "", "", consumed=("x-request-id", *consumed))
        for name in (SESSION, ROUTING_KEY, REQUEST_ID):
            headers.pop(name, None)
        for endpoint in self._pool.endpoints:
            try:
                async with (
                    Limit(_MODELS_S),
                    await self._upstream.send("GET", endpoint, request.rel_url.raw_path_qs, headers, None) as answer,
                ):
                    body = await answer.read()
                    return web.Response(status=answer.status, body=body, content_type=answer.content_type)
            except (Refused, ProxyError, TimeoutError):
                continue
        raise ProxyError(
            503, "no engine of the pool answers", kind="service_unavailable_error", code="no_engine", retry_after=1.0
        )

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """Whether requests are welcome: not while draining, nor while the control plane is away without fallback."""
        ready = not self.draining and (self._pool.answers or self._has_fallback)
        status = "draining" if self.draining else "ok" if ready else "moorage does not answer"
        content = {"status": status, "sessions": len(self._book), "requests": self.active}
        return web.json_response(content, status=200 if ready else 503)


@web.middleware
async def _as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's form."""
    try:
        return await handler(request)
    except ProxyError as error:
        response = error.response()
        if error.code == "draining":
            response.force_close()
        return response
    except web.HTTPException as error:
        failure = invalid(error.text or error.reason, status=error.status, code=error.reason.lower().replace(" ", "_"))
        response = failure.response()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except (Cut, Gone):
        # The connection is closed already; nobody reads this.
        return web.Response(status=502)
