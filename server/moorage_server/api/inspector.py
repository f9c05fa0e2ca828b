"""InspectorService: shows a pool's state, fresh from the store, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import inspector_pb2_grpc
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api import explain, paging, present, validation
from moorage_server.api.pools import known_pool
from moorage_server.api.times import to_timestamp
from moorage_server.errors import InvalidField, SessionUnknown
from moorage_server.runtime.control import ControlPlane
from moorage_server.store.records import SessionRecord

#: How often a watcher looks for new events, seconds, and how many it reads at once.
_WATCH_S, _WATCH_EVENTS = 0.25, 500
#: Resume token of a pool without events: everything from the beginning.
_OLDEST = "0"
_CLOSING = "closing"


class InspectorServicer(inspector_pb2_grpc.InspectorServiceServicer):
    """Thin: reads, converts, pages."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends all watches, each with a last event of kind "closing" that says where to resume."""
        self._closing.set()

    async def GetPool(self, request: ipb.GetPoolRequest, context: Any) -> ipb.GetPoolResponse:
        """See inspector.proto."""
        validation.get_pool(request)
        return present.pool(await known_pool(self._control, validation.pool_of(request)))

    async def ListInstances(self, request: ipb.ListInstancesRequest, context: Any) -> ipb.ListInstancesResponse:
        """See inspector.proto."""
        validation.list_instances(request)
        after = _instance_position(paging.decode(request.page_token))
        view = await known_pool(self._control, validation.pool_of(request))
        items = sorted(view.instances.values(), key=lambda i: (i.instance_id, i.dp_rank))
        rest = [i for i in items if after is None or (i.instance_id, i.dp_rank) > after]
        size = validation.page_size_of(request)
        page = rest[:size]
        token = paging.encode(f"{page[-1].dp_rank}|{page[-1].instance_id}") if len(rest) > size else ""
        return ipb.ListInstancesResponse(instances=[present.instance(view, i) for i in page], next_page_token=token)

    async def ListSessions(self, request: ipb.ListSessionsRequest, context: Any) -> ipb.ListSessionsResponse:
        """See inspector.proto. Filters apply to a page."""
        validation.list_sessions(request)
        after = paging.decode(request.page_token)
        pool = validation.pool_of(request)
        await known_pool(self._control, pool)
        size = validation.page_size_of(request)
        now_ms, following, records = await self._control.store.sessions(pool, after, size)
        response = ipb.ListSessionsResponse(next_page_token=paging.encode(following))
        for record in records:
            if _matches(request, record):
                response.sessions.append(_session(now_ms, record, explain.stored_hold(now_ms, record)))
        return response

    async def GetSession(self, request: ipb.GetSessionRequest, context: Any) -> ipb.GetSessionResponse:
        """See inspector.proto."""
        validation.get_session(request)
        pool = validation.pool_of(request)
        view = await known_pool(self._control, pool)
        store = self._control.store
        now_ms, record = await store.session(pool, request.session_id)
        if record is None:
            raise SessionUnknown(pool, request.session_id)
        hold = explain.current_hold(view, record)
        response = ipb.GetSessionResponse(session=_session(now_ms, record, hold), hold=hold)
        response.history.extend(present.history(await store.history(pool, request.session_id)))
        return response

    async def ListClasses(self, request: ipb.ListClassesRequest, context: Any) -> ipb.ListClassesResponse:
        """See inspector.proto."""
        validation.list_classes(request)
        after = paging.decode(request.page_token)
        view = await known_pool(self._control, validation.pool_of(request))
        rest = [name for name in present.class_names(view) if name > after]
        size = validation.page_size_of(request)
        token = paging.encode(rest[size - 1]) if len(rest) > size else ""
        classes = [present.workload_class(view, name) for name in rest[:size]]
        return ipb.ListClassesResponse(classes=classes, next_page_token=token)

    async def WatchEvents(
        self, request: ipb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[ipb.WatchEventsResponse]:
        """See inspector.proto."""
        validation.watch_events(request)
        pool = validation.pool_of(request)
        view = await known_pool(self._control, pool)
        at = request.resume_token or await self._newest(pool)
        last_ms = view.now_ms
        while not self._closing.is_set():
            events = await self._control.store.events(pool, at, _WATCH_EVENTS)
            for item in events:
                at, last_ms = item.token, int(item.fields.get("at", last_ms))
                yield present.event(item)
            if len(events) < _WATCH_EVENTS:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_S):
                        await self._closing.wait()
        yield ipb.WatchEventsResponse(resume_token=at, time=to_timestamp(last_ms / 1000.0), kind=_CLOSING)

    async def _newest(self, pool: str) -> str:
        newest = await self._control.store.events(pool, "$", 1)
        return newest[-1].token if newest else _OLDEST


def _session(now_ms: int, record: SessionRecord, hold: pb.Hold | None) -> ipb.Session:
    message = present.session(now_ms, record)
    if hold is not None:
        message.hold.CopyFrom(hold)
    return message


def _matches(request: ipb.ListSessionsRequest, record: SessionRecord) -> bool:
    row = record.fields
    if request.workload_class and row.get("class") != request.workload_class:
        return False
    if request.instance_id and present.instance_name(row.get("inst", "")) != request.instance_id:
        return False
    if request.phase and present.phase(record) != request.phase:
        return False
    return not request.HasField("held") or request.held == (row.get("st") == "held")


def _instance_position(text: str) -> tuple[str, int] | None:
    if not text:
        return None
    rank, mark, name = text.partition("|")
    if not (mark and rank.isascii() and rank.isdigit()):
        raise InvalidField("page_token", text, "a next_page_token of an earlier answer")
    return name, int(rank)
