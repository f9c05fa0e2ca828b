"""From requests to what the desk is asked, and from its answers to responses: the same for unary calls and streams."""

from __future__ import annotations

import hashlib
from typing import Any

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.times import to_duration, to_seconds, to_timestamp
from moorage_server.core.admission import Verdict
from moorage_server.core.view import Ask, Pool
from moorage_server.runtime import arrivals
from moorage_server.runtime.arrivals import Arrival
from moorage_server.store import keys
from moorage_server.store.records import (
    Ending,
    OnHold,
    Placed,
    Progress,
    Refused,
    Released,
    Renewed,
    Request,
    Turn,
)

_PHASES = {int(pb.PHASE_RUNNING): "RUNNING", int(pb.PHASE_TOOL_WAIT): "TOOL_WAIT"}
_OUTCOMES = {int(n): name.removeprefix("OUTCOME_") for name, n in pb.Outcome.items()}
#: A wait is answered a moment before its end, so that the answer is there before the caller's deadline.
_MARGIN_S = 0.05
_NO_REQUEST = Request()


def identity(request: Any) -> Request:
    """Request id and a hash of everything else in the body; nothing to hash where there is no id."""
    if not request.request_id:
        return _NO_REQUEST
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("request_id")
    # Waiting longer does not make it another request.
    if "max_wait" in body.DESCRIPTOR.fields_by_name:
        body.ClearField("max_wait")
    digest = hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=12).hexdigest()
    return Request(request.request_id, f"{type(request).__name__}:{digest}")


def wait_s(request: pb.AdmitRequest | pb.PlaceRequest, context: Any) -> float:
    """How long the call may stay open: what it asks for, and not past its deadline."""
    if not request.HasField("max_wait"):
        return 0.0
    wait = to_seconds(request.max_wait)
    left = context.time_remaining()
    return wait if left is None else max(0.0, min(wait, left - _MARGIN_S))


def arrival_of(request: pb.AdmitRequest, view: Pool) -> Arrival:
    """The session that an Admit asks for."""
    ask = Ask(
        request.session_id,
        request.workload_class,
        request.group_id,
        _known(request, "policy_version"),
        _known(request, "prompt_tokens"),
        _known(request, "expected_output_tokens"),
        _known(request, "max_context_tokens"),
        _known(request, "expected_turns"),
    )
    ttl_s = to_seconds(request.lease_ttl) if request.HasField("lease_ttl") else view.config.lease_ttl_s
    return arrivals.arrival(
        ask,
        view,
        request=identity(request),
        group_size=request.group_size,
        lease_ttl_ms=int(1000 * ttl_s),
        hashes=request.prefix_hashes,
    )


def turn_of(request: pb.PlaceRequest) -> Turn:
    """The turn that a Place asks for."""
    return Turn(
        identity(request),
        request.session_id,
        request.lease_token,
        _known(request, "turn"),
        _known(request, "prompt_tokens"),
    )


def ending_of(request: pb.ReleaseRequest) -> Ending:
    """The end that a Release tells of."""
    return Ending(
        identity(request),
        request.session_id,
        request.lease_token,
        _OUTCOMES[request.outcome],
        _known(request.usage, "context_tokens"),
    )


def progress_of(item: pb.SessionProgress) -> Progress:
    """A progress report."""
    return Progress(
        item.session_id,
        item.lease_token,
        _PHASES.get(item.phase, ""),
        _known(item, "turn"),
        _known(item, "context_tokens"),
        _known(item, "cached_tokens"),
        _known(item, "output_tokens"),
    )


def fill_placed(response: pb.AdmitResponse | pb.PlaceResponse, view: Pool, placed: Placed) -> None:
    """Says where a session lives, and by which lease. ``view`` is one that knows the instance, if any does."""
    name, rank = keys.split_instance(placed.instance)
    instance = view.instances.get(placed.instance)
    response.decision = pb.DECISION_PLACE
    response.workload_class = placed.workload_class
    placement = response.placement
    placement.instance_id, placement.dp_rank, placement.incarnation = name, rank, placed.incarnation
    placement.expected_cached_tokens = placed.cached_tokens or 0
    if instance is not None:
        placement.endpoint = instance.endpoint
        if instance.policy_version is not None:
            placement.policy_version = instance.policy_version
    _fill_lease(response.lease, placed.token, placed.ttl_ms, placed.expires_ms)


def fill_held(response: pb.AdmitResponse | pb.PlaceResponse, result: OnHold | Refused) -> None:
    """Says why a session waits, or will never enter."""
    response.decision = pb.DECISION_HOLD if isinstance(result, OnHold) else pb.DECISION_REJECT
    response.workload_class = result.workload_class
    response.hold.CopyFrom(hold_of(result))


def hold_of(result: OnHold | Refused) -> pb.Hold:
    """The wire's form of a hold."""
    hold = pb.Hold(reason=_reason(result.reason), detail=result.detail)
    if result.since_ms:
        hold.held_since.CopyFrom(to_timestamp(result.since_ms / 1000.0))
    if isinstance(result, OnHold):
        hold.retry_after.CopyFrom(to_duration(result.retry_ms / 1000.0))
        hold.position, hold.ahead = result.position, result.ahead
    return hold


def would_hold(view: Pool, verdict: Verdict) -> pb.Hold:
    """In OBSERVE: the hold that ENFORCE would have answered."""
    hold = pb.Hold(reason=_reason(verdict.reason), detail=verdict.detail)
    hold.held_since.CopyFrom(to_timestamp(view.now_ms / 1000.0))
    return hold


def fill_released(response: pb.ReleaseResponse, result: Released) -> None:
    """Says what a session cost."""
    response.released = not result.over
    if result.duration_ms is not None:
        response.residency.duration.CopyFrom(to_duration(result.duration_ms / 1000.0))
        response.residency.block_seconds = (result.block_ms or 0) / 1000.0
        response.residency.peak_blocks = result.peak_blocks or 0


def fill_ack(ack: pb.SessionAck, renewed: Renewed, token: str) -> None:
    """Says what became of a progress report."""
    ack.known = renewed.status == "OK"
    if not ack.known:
        ack.reason = "LEASE_STALE" if renewed.status == "STALE" else "SESSION_UNKNOWN"
        return
    _fill_lease(ack.lease, token, renewed.ttl_ms, renewed.expires_ms)


def _fill_lease(lease: pb.Lease, token: str, ttl_ms: int, expires_ms: int) -> None:
    # Field by field: building the two messages and copying them is most of what an answer costs.
    lease.token = token
    lease.ttl.seconds, lease.ttl.nanos = ttl_ms // 1000, ttl_ms % 1000 * 1_000_000
    lease.expire_time.seconds, lease.expire_time.nanos = expires_ms // 1000, expires_ms % 1000 * 1_000_000


def _reason(name: str) -> pb.HoldReason.ValueType:
    return pb.HoldReason.Value(f"HOLD_REASON_{name or 'UNSPECIFIED'}")


def _known(message: Any, name: str) -> Any:
    """A field with presence; None where the caller did not say."""
    return getattr(message, name) if message.HasField(name) else None
