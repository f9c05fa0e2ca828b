"""One request: identified, admitted, placed, forwarded; its answer passed on, read and reported."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from moorage.errors import MoorageError
from moorage.messages import OutcomeLike
from moorage.proxy.errors import ProxyError, from_moorage, invalid
from moorage.proxy.headers import REQUEST_ID, downstream_headers, rank_header, upstream_headers
from moorage.proxy.identity import BadRequest, Identifier, Ticket
from moorage.proxy.log import line, logger
from moorage.proxy.pool import PoolView
from moorage.proxy.sessions import ProxySession, SessionBook
from moorage.proxy.upstream import Limit, Refused, Upstream, broken, too_slow
from moorage.proxy.usage import JsonTap, SseTap, Tap
from moorage.state import Turn

#: Where OpenAI's clients have to ask for the usage of a stream. A stream of responses always tells.
_OPTIONAL_USAGE = frozenset({"/v1/chat/completions", "/v1/completions"})


class Forwarder:
    """Handles the requests that generate."""

    def __init__(
        self, identifier: Identifier, book: SessionBook, upstream: Upstream, pool: PoolView, retries: int
    ) -> None:
        self._identifier = identifier
        self._book = book
        self._upstream = upstream
        self._pool = pool
        self._retries = retries

    async def handle(self, request: web.Request, consumed: tuple[str, ...]) -> web.StreamResponse:
        """Answers one. `consumed` are headers meant for the proxy. Raises ProxyError before the answer began."""
        content = await request.read()
        body = parsed(content)
        try:
            ticket = self._identifier.ticket(request.path, request.headers, body)
        except BadRequest as error:
            raise invalid(str(error)) from None
        content, hide_usage = _asking_for_usage(request.path, body, content)
        session = self._book.arrive(ticket)
        outcome: OutcomeLike = "FAILED"
        answered = False
        try:
            exchange = _Exchange(request, ticket, content, hide_usage, consumed)
            response = await self._exchange(exchange, session)
            answered = True
            # An engine that refuses the request is well; one that fails may not be.
            outcome = "COMPLETED" if response.status < 400 else "ABORTED" if response.status < 500 else "FAILED"
            return response
        except (asyncio.CancelledError, Gone):
            outcome = "ABORTED"
            raise
        finally:
            self._book.depart(session, ticket, outcome, answered=answered)

    async def _exchange(self, exchange: _Exchange, session: ProxySession) -> web.StreamResponse:
        deadline = self._book.deadline()
        for left in range(self._retries, -1, -1):
            try:
                turn = await self._book.place(session, exchange.ticket, deadline)
            except MoorageError as error:
                raise from_moorage(error) from error
            try:
                return await self._answer(exchange, session, turn)
            except Refused as error:
                logger.warning(line("engine_refused", session=session.session_id, error=error))
                self._book.refused(session, turn)
                if not left:
                    raise ProxyError(
                        502, f"no engine takes the connection: {error}", kind="api_error", code="engine_refused"
                    ) from error
        raise AssertionError("the last try returns or raises")

    async def _answer(self, exchange: _Exchange, session: ProxySession, turn: Turn) -> web.StreamResponse:
        """Sends the request and passes the answer on. Raises Refused, or ProxyError before the answer began."""
        timeouts, usage = self._upstream.timeouts, None
        headers = exchange.headers(session, turn, self._pool)
        response: web.StreamResponse | None = None
        answer: aiohttp.ClientResponse | None = None
        try:
            async with Limit(timeouts.total) as limit:
                limit.allow(_sum(timeouts.connect, timeouts.first_byte))
                answer = await self._upstream.send("POST", turn.endpoint, exchange.path, headers, exchange.content)
                limit.allow(None)
                tap = exchange.tap(answer)
                response = exchange.begin(answer, session, turn)
                with _writing():
                    await response.prepare(exchange.request)
                await _pass_on(answer, response, tap, limit, timeouts.idle)
                usage = tap.usage
            with _writing():
                await response.write_eof()
        except TimeoutError as error:
            raise _late(exchange.request, response, too_slow(turn.endpoint)) from error
        except aiohttp.ClientError as error:
            raise _late(exchange.request, response, broken(turn.endpoint, error)) from error
        finally:
            if answer is not None:
                answer.close()  # Nothing where it was read to its end: then the connection is kept.
            session.report(turn, usage)
        return response


class _Exchange:
    """A request on its way, the same for every engine that is tried."""

    def __init__(
        self, request: web.Request, ticket: Ticket, content: bytes, hide_usage: bool, consumed: tuple[str, ...]
    ) -> None:
        self.request = request
        self.ticket = ticket
        self.content = content
        self.path = request.rel_url.raw_path_qs
        self._hide_usage = hide_usage
        self._request_id = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
        self._headers = upstream_headers(request.headers, ticket.session_id, self._request_id, consumed=consumed)

    def headers(self, session: ProxySession, turn: Turn, pool: PoolView) -> Mapping[str, str]:
        """What the engine of `turn` gets."""
        return {**self._headers, **rank_header(turn, pool.ranked)}

    def begin(self, answer: aiohttp.ClientResponse, session: ProxySession, turn: Turn) -> web.StreamResponse:
        """The answer's head, for the client."""
        headers = downstream_headers(answer.headers, turn, session.session_id, self._request_id)
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        if answer.content_length is not None and not _is_stream(answer):
            response.content_length = answer.content_length
        return response

    def tap(self, answer: aiohttp.ClientResponse) -> Tap:
        """What reads the answer."""
        return SseTap(hide_usage=self._hide_usage) if _is_stream(answer) else JsonTap()


async def _pass_on(
    answer: aiohttp.ClientResponse, response: web.StreamResponse, tap: Tap, limit: Limit, idle: float | None
) -> None:
    """To its end. A client that is slow makes `write` wait, and so the engine's connection fill up."""
    while True:
        limit.allow(idle)
        chunk = await answer.content.readany()
        limit.allow(None)
        if not chunk:
            break
        if passed := tap.feed(chunk):
            with _writing():
                await response.write(passed)
    if passed := tap.end():
        with _writing():
            await response.write(passed)


@contextmanager
def _writing() -> Iterator[None]:
    """Tells a client that went away from an engine that did: aiohttp's errors do not."""
    try:
        yield
    except ConnectionResetError as error:
        raise Gone from error


class Gone(Exception):
    """The client went away."""


class Cut(Exception):
    """The answer had begun: its connection is closed, which is all that can be said."""


def _late(request: web.Request, response: web.StreamResponse | None, error: ProxyError) -> Exception:
    """What to raise for a failure: before the answer began it has a status of its own."""
    if response is None or not response.prepared:
        return error
    logger.warning(line("answer_cut", path=request.path, error=error))
    if request.transport is not None:
        request.transport.close()
    return Cut(error.message)


def _is_stream(answer: aiohttp.ClientResponse) -> bool:
    return (
        answer.content_type == "text/event-stream" and answer.headers.get("Content-Encoding", "identity") == "identity"
    )


def _sum(connect: float, first_byte: float | None) -> float | None:
    return None if first_byte is None else connect + first_byte


def parsed(content: bytes) -> dict[str, Any]:
    """The body of a request. Raises ProxyError where it is not a JSON object."""
    try:
        if b"\0" in content[:4]:
            raise invalid("the body is not UTF-8")
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise invalid("the body is not JSON") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return body


def _asking_for_usage(path: str, body: dict[str, Any], content: bytes) -> tuple[bytes, bool]:
    """The body with the usage of a stream asked for, and whether the client did not ask."""
    if path not in _OPTIONAL_USAGE or body.get("stream") is not True:
        return content, False
    if "stream_options" not in body:
        # Put in front: what the client wrote stays as it wrote it, however long.
        start = content.index(b"{") + 1
        rest = content[start:]
        return b'%b"stream_options":{"include_usage":true},%b' % (content[:start], rest), True
    options = body["stream_options"]
    if not isinstance(options, Mapping):
        options = {}
    if options.get("include_usage") is True:
        return content, False
    return json.dumps({**body, "stream_options": {**options, "include_usage": True}}).encode(), True
