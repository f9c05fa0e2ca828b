"""SchedulerService: validate, ask the desk, answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc
from moorage_server import limits
from moorage_server.api import validation
from moorage_server.api.times import to_duration, to_seconds, to_timestamp
from moorage_server.core.admission import Verdict
from moorage_server.core.config import OBSERVE
from moorage_server.core.prefixes import most_hashes
from moorage_server.core.view import Ask, Pool
from moorage_server.errors import InvalidField
from moorage_server.runtime import arrivals
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.desk import Desk
from moorage_server.runtime.prefixes import pack
from moorage_server.store import keys
from moorage_server.store.records import (
    OnHold,
    Placed,
    PrefixChange,
    Progress,
    Refused,
    Renewed,
    Request,
    Snapshot,
)

_STATES = {int(n): name.removeprefix("INSTANCE_STATE_") for name, n in pb.InstanceState.items()}
_PHASES = {int(pb.PHASE_RUNNING): "RUNNING", int(pb.PHASE_TOOL_WAIT): "TOOL_WAIT"}
#: Why a prefix update was not taken.
_PREFIX_REASONS = {
    "NO_INSTANCE": "the instance is not known: its snapshot comes first",
    "OTHER_INCARNATION": "incarnation {incarnation!r} has sent no snapshot yet",
    "OLD_INCARNATION": "incarnation {incarnation!r} is over: another one took the name",
    "NEW_STREAM": "the stream is not known, and does not begin with reset",
    "GAP": "sequence {sequence} does not follow the last one of this stream",
}
_OUTCOMES = {int(n): name.removeprefix("OUTCOME_") for name, n in pb.Outcome.items()}
#: A snapshot keeps its residents only until they were counted.
_NOT_KEPT = ("resident_sessions",)
#: A wait is answered a moment before its end, so that the answer is there before the caller's deadline.
_MARGIN_S = 0.05


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Thin: no policy and no I/O of its own."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def Admit(self, request: pb.AdmitRequest, context: Any) -> pb.AdmitResponse:
        """See scheduler.proto."""
        validation.admit(request)
        desk = self._control.desk(validation.pool_of(request))
        view = await desk.view()
        ask = _ask(request)
        ttl_s = to_seconds(request.lease_ttl) if request.HasField("lease_ttl") else view.config.lease_ttl_s
        arrival = arrivals.arrival(
            ask,
            view,
            request=identity(request),
            group_size=request.group_size,
            lease_ttl_ms=int(1000 * ttl_s),
            hashes=request.prefix_hashes,
        )
        result, verdict = await desk.admit(arrival, _wait_s(request, context))
        response = pb.AdmitResponse(workload_class=result.workload_class)
        if isinstance(result, Placed):
            response.decision = pb.DECISION_PLACE
            try:
                known = await desk.view_with(result)
            except asyncio.CancelledError:
                desk.abandon(arrival)
                raise
            _fill_placed(response, known, result)
            if view.config.mode == OBSERVE and verdict.reason:
                response.hold.CopyFrom(_would_hold(view, verdict))
        else:
            response.decision = pb.DECISION_HOLD if isinstance(result, OnHold) else pb.DECISION_REJECT
            response.hold.CopyFrom(hold_of(result))
        return response

    async def Place(self, request: pb.PlaceRequest, context: Any) -> pb.PlaceResponse:
        """See scheduler.proto."""
        validation.place(request)
        desk = self._control.desk(validation.pool_of(request))
        result = await desk.place(
            identity(request),
            request.session_id,
            request.lease_token,
            _known(request, "turn"),
            _known(request, "prompt_tokens"),
            _wait_s(request, context),
            request.prefix_hashes,
        )
        response = pb.PlaceResponse(workload_class=result.workload_class)
        if isinstance(result, Placed):
            response.decision = pb.DECISION_PLACE
            response.moved = result.moved
            _fill_placed(response, await desk.view_with(result), result)
        else:
            response.decision = pb.DECISION_HOLD
            response.hold.CopyFrom(hold_of(result))
        return response

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """See scheduler.proto."""
        validation.release(request)
        desk = self._control.desk(validation.pool_of(request))
        usage = request.usage
        result = await desk.release(
            identity(request),
            request.session_id,
            request.lease_token,
            _OUTCOMES[request.outcome],
            _known(usage, "context_tokens"),
        )
        response = pb.ReleaseResponse(released=not result.over)
        if result.duration_ms is not None:
            response.residency.duration.CopyFrom(to_duration(result.duration_ms / 1000.0))
            response.residency.block_seconds = (result.block_ms or 0) / 1000.0
            response.residency.peak_blocks = result.peak_blocks or 0
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
                good.append(_progress(report))
        renewed = iter(await self._control.store.progress(desk.pool, good) if good else ())
        tokens = iter([item.token for item in good])
        for ack in acks:
            if not ack.reason:
                _fill_ack(ack, next(renewed), next(tokens))
        response.sessions.extend(acks)
        for update in request.prefixes:
            response.prefixes.append(await self._take_prefixes(desk, update))
        config = (await desk.view()).config
        response.next_interval.CopyFrom(to_duration(config.heartbeat_interval_s))
        return response

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
                _known(item, "block_size"),
                kept.SerializeToString(),
                _age_ms(item),
                item.weight_version,
                policy_version_of(item.weight_version),
                _known(item, "cache_epoch"),
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


def identity(request: Any) -> Request:
    """Request id and a hash of everything else in the body; nothing to hash where there is no id."""
    if not request.request_id:
        return Request()
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("request_id")
    # Waiting longer does not make it another request.
    if "max_wait" in body.DESCRIPTOR.fields_by_name:
        body.ClearField("max_wait")
    digest = hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=12).hexdigest()
    return Request(request.request_id, f"{type(request).__name__}:{digest}")


def hold_of(result: OnHold | Refused) -> pb.Hold:
    """The wire's form of a hold."""
    hold = pb.Hold(reason=_reason(result.reason), detail=result.detail)
    if result.since_ms:
        hold.held_since.CopyFrom(to_timestamp(result.since_ms / 1000.0))
    if isinstance(result, OnHold):
        hold.retry_after.CopyFrom(to_duration(result.retry_ms / 1000.0))
        hold.position, hold.ahead = result.position, result.ahead
    return hold


def _reason(name: str) -> pb.HoldReason.ValueType:
    return pb.HoldReason.Value(f"HOLD_REASON_{name or 'UNSPECIFIED'}")


def _would_hold(view: Pool, verdict: Verdict) -> pb.Hold:
    hold = pb.Hold(reason=_reason(verdict.reason), detail=verdict.detail)
    hold.held_since.CopyFrom(to_timestamp(view.now_ms / 1000.0))
    return hold


def _ask(request: pb.AdmitRequest) -> Ask:
    return Ask(
        request.session_id,
        request.workload_class,
        request.group_id,
        _known(request, "policy_version"),
        _known(request, "prompt_tokens"),
        _known(request, "expected_output_tokens"),
        _known(request, "max_context_tokens"),
        _known(request, "expected_turns"),
    )


def _known(message: Any, name: str) -> Any:
    """A field with presence; None where the caller did not say."""
    return getattr(message, name) if message.HasField(name) else None


def _wait_s(request: pb.AdmitRequest | pb.PlaceRequest, context: Any) -> float:
    """How long the call may stay open: what it asks for, and not past its deadline."""
    if not request.HasField("max_wait"):
        return 0.0
    wait = to_seconds(request.max_wait)
    left = context.time_remaining()
    return wait if left is None else max(0.0, min(wait, left - _MARGIN_S))


def _fill_placed(response: pb.AdmitResponse | pb.PlaceResponse, view: Pool, placed: Placed) -> None:
    name, rank = keys.split_instance(placed.instance)
    instance = view.instances.get(placed.instance)
    placement, lease = response.placement, response.lease
    placement.instance_id, placement.dp_rank, placement.incarnation = name, rank, placed.incarnation
    placement.endpoint = instance.endpoint if instance is not None else ""
    placement.expected_cached_tokens = placed.cached_tokens or 0
    if instance is not None and instance.policy_version is not None:
        placement.policy_version = instance.policy_version
    lease.token = placed.token
    lease.ttl.CopyFrom(to_duration(placed.ttl_ms / 1000.0))
    lease.expire_time.CopyFrom(to_timestamp(placed.expires_ms / 1000.0))


def _fill_ack(ack: pb.SessionAck, renewed: Renewed, token: str) -> None:
    ack.known = renewed.status == "OK"
    if not ack.known:
        ack.reason = "LEASE_STALE" if renewed.status == "STALE" else "SESSION_UNKNOWN"
        return
    ack.lease.token = token
    ack.lease.ttl.CopyFrom(to_duration(renewed.ttl_ms / 1000.0))
    ack.lease.expire_time.CopyFrom(to_timestamp(renewed.expires_ms / 1000.0))


def _progress(item: pb.SessionProgress) -> Progress:
    return Progress(
        item.session_id,
        item.lease_token,
        _PHASES.get(item.phase, ""),
        _known(item, "turn"),
        _known(item, "context_tokens"),
        _known(item, "cached_tokens"),
        _known(item, "output_tokens"),
    )


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
