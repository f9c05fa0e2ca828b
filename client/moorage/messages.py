"""Requests, built from plain Python values. Seconds are floats; None and absent mean unknown, never zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict
from uuid import uuid4

from google.protobuf.duration_pb2 import Duration

from moorage.v1.scheduler_pb2 import (
    AdmitRequest,
    HeartbeatRequest,
    InstanceSnapshot,
    Outcome,
    Phase,
    PlaceRequest,
    PrefixUpdate,
    ReleaseRequest,
    SessionProgress,
    Usage,
)

#: How a session ended: a value of the enum, or its name without the prefix.
OutcomeLike: TypeAlias = "Outcome.ValueType | Literal['COMPLETED', 'ABORTED', 'FAILED', 'PAUSED']"

#: Where a living session is: a value of the enum, or its name without the prefix.
PhaseLike: TypeAlias = "Phase.ValueType | Literal['RUNNING', 'TOOL_WAIT']"


class AdmitFields(TypedDict, total=False):
    """What a session declares of itself when it asks to enter. All optional; what is declared sharpens the forecast.

    Fields:
        workload_class: class of the workload, such as "agentic".
        group_id: samples of one prompt share a group.
        group_size: number of samples in the group.
        policy_version: weights version that the rollout started with, or wants.
        prompt_tokens: tokens of the first prompt.
        expected_output_tokens: tokens that the session is expected to add in all its turns.
        expected_turns: number of turns expected.
        max_context_tokens: largest context that the session may reach, prompts and outputs.
        prefix_hashes: one 64-bit hash per full block of the prompt, chained from its start, as `prefix_hashes()` makes
            them; at most 16,384.
        lease_ttl: lease to grant, in seconds, 1 s to 24 h.
        tenant: for limits and labels.
        labels: free labels, at most 64 of at most 256 bytes.
    """

    workload_class: str | None
    group_id: str | None
    group_size: int | None
    policy_version: int | None
    prompt_tokens: int | None
    expected_output_tokens: int | None
    expected_turns: int | None
    max_context_tokens: int | None
    prefix_hashes: Sequence[int] | None
    lease_ttl: float | None
    tenant: str | None
    labels: Mapping[str, str] | None


def new_request_id() -> str:
    """A fresh id for a mutating request."""
    return str(uuid4())


def to_duration(seconds: float | None) -> Duration | None:
    """Seconds as a Duration; None stays absent."""
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def to_seconds(duration: Duration) -> float:
    """A Duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def to_outcome(outcome: OutcomeLike) -> Outcome.ValueType:
    """The enum's value. Raises ValueError for an unknown name."""
    return Outcome.Value(f"OUTCOME_{outcome}") if isinstance(outcome, str) else outcome


def to_phase(phase: PhaseLike) -> Phase.ValueType:
    """The enum's value. Raises ValueError for an unknown name."""
    return Phase.Value(f"PHASE_{phase}") if isinstance(phase, str) else phase


def admit_request(
    pool: str, session_id: str, fields: AdmitFields, *, max_wait: float = 0, request_id: str | None = None
) -> AdmitRequest:
    """An Admit. Raises ValueError or TypeError where a field is unknown or out of its type's range."""
    known: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    return AdmitRequest(
        pool=pool,
        request_id=request_id or new_request_id(),
        session_id=session_id,
        max_wait=to_duration(max_wait or None),
        lease_ttl=to_duration(known.pop("lease_ttl", None)),
        **known,
    )


def place_request(
    pool: str,
    session_id: str,
    *,
    lease_token: str,
    turn: int | None = None,
    prompt_tokens: int | None = None,
    prefix_hashes: Sequence[int] = (),
    max_wait: float = 0,
    request_id: str | None = None,
) -> PlaceRequest:
    """A Place."""
    return PlaceRequest(
        pool=pool,
        request_id=request_id or new_request_id(),
        session_id=session_id,
        lease_token=lease_token,
        turn=turn,
        prompt_tokens=prompt_tokens,
        prefix_hashes=prefix_hashes,
        max_wait=to_duration(max_wait or None),
    )


def release_request(
    pool: str,
    session_id: str,
    *,
    outcome: OutcomeLike,
    lease_token: str = "",
    usage: Usage | None = None,
    request_id: str | None = None,
) -> ReleaseRequest:
    """A Release."""
    return ReleaseRequest(
        pool=pool,
        request_id=request_id or new_request_id(),
        session_id=session_id,
        lease_token=lease_token,
        outcome=to_outcome(outcome),
        usage=usage,
    )


def heartbeat_request(
    pool: str,
    *,
    instances: Iterable[InstanceSnapshot] = (),
    sessions: Iterable[SessionProgress] = (),
    prefixes: Iterable[PrefixUpdate] = (),
) -> HeartbeatRequest:
    """A Heartbeat."""
    return HeartbeatRequest(pool=pool, instances=instances, sessions=sessions, prefixes=prefixes)
