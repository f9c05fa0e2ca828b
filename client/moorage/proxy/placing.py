"""Placements for gateways that carry the requests themselves: Envoy asks where one goes, the answer is a header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aiohttp import web
from yarl import URL

from moorage.errors import MoorageError
from moorage.proxy.errors import ProxyError, from_moorage, invalid
from moorage.proxy.forward import parsed
from moorage.proxy.headers import SESSION, rank_header
from moorage.proxy.identity import BadRequest, Identifier
from moorage.proxy.pool import PoolView
from moorage.proxy.sessions import SessionBook
from moorage.proxy.upstream import base_url
from moorage.state import Turn

#: In front of the path of the request that shall be placed, as Envoy's ext_authz puts it there.
PREFIX = "/moorage/place"
#: Where gateways that follow the Endpoint Picker Protocol of the Gateway API Inference Extension send a request.
DESTINATION = "X-Gateway-Destination-Endpoint"


class Placer:
    """Answers where a request goes. The request itself is not seen again: nothing is known of its answer or its end.

    So a session needs a name, and is over when /finish_session says so, or after its class's idle time, counted from
    its last placement: that has to be longer than the longest answer.
    """

    def __init__(self, identifier: Identifier, book: SessionBook, pool: PoolView) -> None:
        self._identifier = identifier
        self._book = book
        self._pool = pool

    async def handle(self, request: web.Request, _: tuple[str, ...]) -> web.StreamResponse:
        """200 with the engine in headers. Raises ProxyError. Without a body, headers have to say it all."""
        content = await request.read()
        path = request.path.removeprefix(PREFIX)
        try:
            ticket = self._identifier.ticket(path, request.headers, parsed(content) if content else {})
        except BadRequest as error:
            raise invalid(str(error)) from None
        if not ticket.named:
            raise invalid(f"a request to be placed needs a session id, in header {SESSION} for example")
        # Its answer is still to come, so that nothing ends here.
        ticket = replace(ticket, ends=False)
        session = self._book.arrive(ticket)
        answered = False
        try:
            turn = await self._book.place(session, ticket, self._book.deadline())
            answered = True
        except MoorageError as error:
            raise from_moorage(error) from error
        finally:
            self._book.depart(session, ticket, "COMPLETED", answered=answered)
        return web.Response(headers=self._told(turn, ticket.session_id))

    def _told(self, turn: Turn, session_id: str) -> Mapping[str, str]:
        return {
            DESTINATION: destination(turn.endpoint),
            SESSION: session_id,
            "X-Moorage-Session": session_id,
            "X-Moorage-Instance": turn.placement.instance_id or turn.endpoint,
            **rank_header(turn, self._pool.ranked),
        }


def destination(endpoint: str) -> str:
    """HOST:PORT of an endpoint; ProxyError where that does not say all.

    Example:
        >>> destination("http://10.0.0.7:8000/"), destination("10.0.0.7:8000"), destination("http://[fd00::7]")
        ('10.0.0.7:8000', '10.0.0.7:8000', '[fd00::7]:80')
    """
    url = URL(base_url(endpoint))
    if url.raw_path not in ("", "/"):
        raise ProxyError(
            502, f"endpoint {endpoint} has a path, which HOST:PORT can not tell", kind="api_error", code="endpoint_path"
        )
    return f"{url.host_subcomponent}:{url.port}"
