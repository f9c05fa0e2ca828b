"""One event per decision: what was asked, what was answered, why, and how long it took. Never a token or a prompt."""

from __future__ import annotations

from typing import Any, Literal

import structlog

from moorage.v1 import scheduler_pb2
from moorage_server.api.validation import pool_of

Mode = Literal["all", "changes", "none"]

_DECISIONS = {int(n): name.removeprefix("DECISION_") for name, n in scheduler_pb2.Decision.items()}
_REASONS = {int(n): name.removeprefix("HOLD_REASON_") for name, n in scheduler_pb2.HoldReason.items()}
_OUTCOMES = {int(n): name.removeprefix("OUTCOME_") for name, n in scheduler_pb2.Outcome.items()}

_OPERATOR = "/moorage.v1.OperatorService/"
#: Fields of operators' requests that say what was meant.
_OPERATOR_FIELDS = ("instance_id", "session_id", "weight_version", "reason")


class DecisionLog:
    """Logs decisions at level info: ``all``, ``none``, or ``changes``.

    ``changes`` leaves out what changes nothing: continuations that stay where they are, releases of what is over, and
    heartbeats.
    """

    def __init__(self, mode: Mode) -> None:
        self._all = mode == "all"
        self._off = mode == "none"
        # Bound once: a lazy logger would be assembled anew for every event.
        self._log = structlog.get_logger("moorage.decision").bind()

    def observe(self, method: str, request: Any, response: Any, latency_ms: float, caller: str | None = None) -> None:
        """Looks at one answered call and logs what ``mode`` asks for, with the caller's name where one is known."""
        if self._off:
            return
        facts = self._facts(method, request, response)
        if facts is not None:
            if caller is not None:
                facts["caller"] = caller
            event = method.rpartition("/")[2]
            self._log.info(event, pool=pool_of(request), latency_ms=round(latency_ms, 3), **facts)

    def _facts(self, method: str, request: Any, response: Any) -> dict[str, Any] | None:
        if isinstance(response, scheduler_pb2.PlaceResponse):
            stays = response.decision == scheduler_pb2.DECISION_PLACE and not response.moved
            return {**_decided(request, response), "moved": response.moved} if self._all or not stays else None
        if isinstance(response, scheduler_pb2.AdmitResponse):
            return {**_decided(request, response), "workload_class": response.workload_class}
        if isinstance(response, scheduler_pb2.ReleaseResponse):
            return _released(request, response) if self._all or response.released else None
        if isinstance(response, scheduler_pb2.HeartbeatResponse):
            return _heard(response) if self._all else None
        if isinstance(response, scheduler_pb2.SessionAck):
            return {"session": response.session_id, "known": response.known} if self._all else None
        if method.startswith(_OPERATOR):
            return {name: value for name in _OPERATOR_FIELDS if (value := getattr(request, name, ""))}
        return None


def _decided(request: Any, response: scheduler_pb2.AdmitResponse | scheduler_pb2.PlaceResponse) -> dict[str, Any]:
    facts: dict[str, Any] = {"session": request.session_id, "decision": _DECISIONS.get(response.decision)}
    if response.HasField("placement"):
        facts["instance"] = response.placement.instance_id
        facts["dp_rank"] = response.placement.dp_rank
    if response.HasField("hold"):
        facts["reason"] = _REASONS.get(response.hold.reason)
    return facts


def _released(request: scheduler_pb2.ReleaseRequest, response: scheduler_pb2.ReleaseResponse) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "session": request.session_id,
        "outcome": _OUTCOMES.get(request.outcome),
        "released": response.released,
    }
    if response.HasField("residency"):
        facts["block_seconds"] = round(response.residency.block_seconds, 3)
    return facts


def _heard(response: scheduler_pb2.HeartbeatResponse) -> dict[str, Any]:
    return {
        "instances": len(response.instances),
        "sessions": len(response.sessions),
        "prefixes": len(response.prefixes),
        "refused": sum(not i.accepted for i in response.instances)
        + sum(not s.known for s in response.sessions)
        + sum(not p.accepted for p in response.prefixes),
    }
