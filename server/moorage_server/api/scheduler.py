"""SchedulerService: validate, ask the desk, answer."""

from __future__ import annotations

import time
from typing import Any

from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc
from moorage_server import limits
from moorage_server.api import answers, calls, validation
from moorage_server.api.dispatch import DispatchStream
from moorage_server.api.times import to_duration
from moorage_server.core.prefixes import most_hashes
from moorage_server.errors import InvalidField
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.desk import Desk
from moorage_server.runtime.prefixes import pack
from moorage_server.store import keys
from moorage_server.store.records import (
    PrefixChange,
    Progress,
    Snapshot,
)

_STATES = {int(n): name.removeprefix("INSTANCE_STATE_") for name, n in pb.InstanceState.items()}
#: Why a prefix update was not taken.
_PREFIX_REASONS = {
    "NO_INSTANCE": "the instance is not known: its snapshot comes first",
    "OTHER_INCARNATION": "incarnation {incarnation!r} has sent no snapshot yet",
    "OLD_INCARNATION": "incarnation {incarnation!r} is over: another one took the name",
    "NEW_STREAM": "the stream is not known, and does not begin with reset",
    "GAP": "sequence {sequence} does not follow the last one of this stream",
}
#: A snapshot keeps its residents only until they were counted.
_NOT_KEPT = ("resident_sessions",)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Thin: no policy and no I/O of its own."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._streams: set[DispatchStream] = set()
        self._draining = False

    async def Admit(self, request: pb.AdmitRequest, context: Any) -> pb.AdmitResponse:
        """See scheduler.proto."""
        validation.admit(request)
        desk = self._control.desk(validation.pool_of(request))
        response, _ = await calls.admit(desk, request, answers.wait_s(request, context))
        return response

    async def Place(self, request: pb.PlaceRequest, context: Any) -> pb.PlaceResponse:
        """See scheduler.proto."""
        validation.place(request)
        desk = self._control.desk(validation.pool_of(request))
        turn, wait_s = answers.turn_of(request), answers.wait_s(request, context)
        result = await desk.place(*turn, wait_s, request.prefix_hashes)
        return await calls.placed(desk, result)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """See scheduler.proto."""
        validation.release(request)
        desk = self._control.desk(validation.pool_of(request))
        response = pb.ReleaseResponse()
        answers.fill_released(response, await desk.release(*answers.ending_of(request)))
        return response

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """See scheduler.proto. One bad item never spoils the others."""
        validation.heartbeat(request)
        desk = self._control.desk(validation.pool_of(request))
        response = pb.HeartbeatResponse()
        for item in request.instances:
            response.instances.append(await self._take_snapshot(desk.pool, item))
        if response.instances:
            desk.changed()
        good: list[Progress] = []
        acks: list[pb.SessionAck] = []
        for report in request.sessions:
            bad = validation.progress(report)
            acks.append(pb.SessionAck(session_id=report.session_id[:256], reason="" if bad is None else bad.message))
            if bad is None:
                good.append(answers.progress_of(report))
        renewed = iter(await self._control.store.progress(desk.pool, good) if good else ())
        tokens = iter([item.token for item in good])
        for ack in acks:
            if not ack.reason:
                answers.fill_ack(ack, next(renewed), next(tokens))
        response.sessions.extend(acks)
        for update in request.prefixes:
            response.prefixes.append(await self._take_prefixes(desk, update))
        config = (await desk.view()).config
        response.next_interval.CopyFrom(to_duration(config.heartbeat_interval_s))
        return response

    # The stubs know the form that yields answers; this one writes them.
    async def Dispatch(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """See scheduler.proto."""
        stream = DispatchStream(self._control, context, request_iterator.calls)
        self._streams.add(stream)
        if self._draining:
            stream.drain()
        try:
            await stream.run(request_iterator)
        finally:
            self._streams.discard(stream)

    def drain(self) -> None:
        """Ends streams in order: what they have read is answered."""
        self._draining = True
        for stream in self._streams:
            stream.drain()

    async def _take_snapshot(self, pool: str, item: pb.InstanceSnapshot) -> pb.InstanceAck:
        ack = pb.InstanceAck(instance_id=item.instance_id[:256], dp_rank=item.dp_rank)
        bad: InvalidField | None = validation.snapshot(item)
        if bad is not None:
            ack.reason = bad.message
            return ack
        kept = pb.InstanceSnapshot()
        kept.CopyFrom(item)
        for name in _NOT_KEPT:
            kept.ClearField(name)  # type: ignore[arg-type]
        status = await self._control.store.snapshot(
            pool,
            Snapshot(
                keys.instance_key(item.instance_id, item.dp_rank),
                item.incarnation,
                item.sequence,
                _state(item),
                item.block_size if item.HasField("block_size") else None,
                kept.SerializeToString(),
                _age_ms(item),
                item.weight_version,
                policy_version_of(item.weight_version),
                item.cache_epoch if item.HasField("cache_epoch") else None,
            ),
        )
        ack.accepted = status in ("OK", "NEW")
        if status == "OLD_SEQUENCE":
            ack.reason = f"sequence {item.sequence} is not above the last one of this incarnation"
        elif status == "OLD_INCARNATION":
            ack.reason = f"incarnation {item.incarnation!r} is over: another one took the name"
        return ack

    async def _take_prefixes(self, desk: Desk, item: pb.PrefixUpdate) -> pb.PrefixAck:
        ack = pb.PrefixAck(instance_id=item.instance_id[:256], dp_rank=item.dp_rank)
        bad: InvalidField | None = validation.prefix_update(item)
        if bad is not None:
            ack.reason = bad.message
            return ack
        key = keys.instance_key(item.instance_id, item.dp_rank)
        status = await self._control.store.prefix_update(
            desk.pool,
            PrefixChange(
                key,
                item.incarnation,
                item.stream,
                item.sequence,
                item.reset,
                item.behind,
                pack(item.stored),
                pack(item.removed),
            ),
            most_hashes((await desk.view()).instances.get(key)),
        )
        ack.accepted = status in ("OK", "REPEAT")
        if not ack.accepted:
            ack.reason = _PREFIX_REASONS[status].format(sequence=item.sequence, incarnation=item.incarnation)
            ack.resend = status != "OLD_INCARNATION"
        return ack


def _state(item: pb.InstanceSnapshot) -> str:
    return "SERVING" if item.state == pb.INSTANCE_STATE_UNSPECIFIED else _STATES[item.state]


def _age_ms(item: pb.InstanceSnapshot) -> int:
    """Age of what was observed when it came here; a clock ahead of ours counts as no age."""
    if not item.HasField("observed_time"):
        return 0
    observed = item.observed_time.seconds + item.observed_time.nanos / 1e9
    return max(0, int(1000 * (time.time() - observed)))


def policy_version_of(weight_version: str) -> int | None:
    """The trainer's number of a version, where its name is one."""
    if not (weight_version.isascii() and weight_version.isdecimal()):
        return None
    number = int(weight_version)
    return number if number <= limits.COUNTER else None
