"""Which headers travel on, in both directions, and which the proxy sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict, CIMultiDictProxy

from moorage.state import Turn

SESSION = "X-Session-ID"
#: The same for SGLang and its gateway, which passes the other one on to nobody.
ROUTING_KEY = "X-SMG-Routing-Key"
REQUEST_ID = "X-Request-ID"
#: Read by vLLM and SGLang: the data-parallel rank that shall serve the request.
RANK = "X-data-parallel-rank"

#: Of one connection (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"}
)  # fmt: skip
#: What the proxy says itself. Requests are unpacked as they come in; answers are read as they pass, so the engine shall
#: not compress them.
_OWN_UPSTREAM = frozenset(
    {"host", "content-length", "content-encoding", "expect", "accept-encoding", "x-session-end", "x-moorage-token",
     SESSION.lower(), RANK.lower()}
)  # fmt: skip
_OWN_DOWNSTREAM = frozenset({"content-length", "date", "server", "x-moorage-instance", "x-moorage-session"})


def _end_to_end(headers: CIMultiDictProxy[str], drop: Iterable[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    dropped = _HOP_BY_HOP.union(drop, named)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def upstream_headers(
    headers: CIMultiDictProxy[str], session_id: str, request_id: str, *, consumed: Iterable[str] = ()
) -> CIMultiDict[str]:
    """What the engine gets. `consumed` are headers meant for the proxy, in lower case."""
    kept = _end_to_end(headers, {*_OWN_UPSTREAM, *consumed})
    kept[SESSION] = session_id
    kept.setdefault(ROUTING_KEY, session_id)
    kept[REQUEST_ID] = request_id
    kept["Accept-Encoding"] = "identity"
    return kept


def rank_header(turn: Turn, ranked: Iterable[str]) -> Mapping[str, str]:
    """The rank, of instances that have several.

    Rank 0 of an instance with others (`ranked`, by id) has to be named, or the engine spreads its requests.
    """
    placement = turn.placement
    if placement.dp_rank or placement.instance_id in ranked:
        return {RANK: str(placement.dp_rank)}
    return {}


def downstream_headers(
    headers: CIMultiDictProxy[str], turn: Turn, session_id: str, request_id: str
) -> CIMultiDict[str]:
    """What the client gets, the length of the body aside."""
    kept = _end_to_end(headers, _OWN_DOWNSTREAM)
    kept["X-Moorage-Session"] = session_id
    kept["X-Moorage-Instance"] = turn.placement.instance_id or turn.endpoint
    kept.setdefault(REQUEST_ID, request_id)
    return kept
