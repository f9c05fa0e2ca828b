"""Which decisions are logged, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from moorage.v1 import operator_pb2 as opb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.decision_log import DecisionLog, Mode

SERVICE = "/moorage.v1.SchedulerService/"
HOME = pb.Placement(instance_id="i", dp_rank=1)
HOLD = pb.Hold(reason=pb.HOLD_REASON_KV_BUDGET)

PLACE = pb.PlaceRequest(pool="p", session_id="s", lease_token="hush")
STAYS = pb.PlaceResponse(decision=pb.DECISION_PLACE, placement=HOME)
MOVES = pb.PlaceResponse(decision=pb.DECISION_PLACE, placement=HOME, moved=True)
WAITS = pb.PlaceResponse(decision=pb.DECISION_HOLD, hold=HOLD)
ADMIT = pb.AdmitRequest(pool="p", session_id="s")
ADMITTED = pb.AdmitResponse(
    decision=pb.DECISION_PLACE, placement=HOME, workload_class="c", lease=pb.Lease(token="hush")
)
RELEASE = pb.ReleaseRequest(session_id="s", lease_token="hush", outcome=pb.OUTCOME_PAUSED)
RELEASED = pb.ReleaseResponse(released=True, residency=pb.Residency(block_seconds=1.23456))
HEARTBEAT = pb.HeartbeatRequest()
HEARD = pb.HeartbeatResponse(instances=[pb.InstanceAck(accepted=True)], sessions=[pb.SessionAck(known=False)])

EVERYTHING: list[tuple[str, Any, Any, bool]] = [
    (SERVICE + "Place", PLACE, STAYS, False),
    (SERVICE + "Place", PLACE, MOVES, True),
    (SERVICE + "Place", PLACE, WAITS, True),
    (SERVICE + "Admit", ADMIT, ADMITTED, True),
    (SERVICE + "Release", RELEASE, RELEASED, True),
    (SERVICE + "Release", RELEASE, pb.ReleaseResponse(), False),
    (SERVICE + "Heartbeat", HEARTBEAT, HEARD, False),
]


def logged(mode: Mode, method: str, request: Any, response: Any) -> list[Any]:
    with capture_logs() as events:
        DecisionLog(mode).observe(method, request, response, 1.23456)
    assert "hush" not in str(events)
    return events


@pytest.mark.parametrize(("method", "request_", "response", "changes"), EVERYTHING)
def test_modes(method: str, request_: Any, response: Any, changes: bool) -> None:
    assert len(logged("all", method, request_, response)) == 1
    assert len(logged("changes", method, request_, response)) == int(changes)
    assert logged("none", method, request_, response) == []


def test_an_admission_says_who_where_and_how_fast() -> None:
    assert logged("changes", SERVICE + "Admit", ADMIT, ADMITTED) == [
        {
            "event": "Admit",
            "log_level": "info",
            "pool": "p",
            "session": "s",
            "decision": "PLACE",
            "instance": "i",
            "dp_rank": 1,
            "workload_class": "c",
            "latency_ms": 1.235,
        }
    ]


def test_a_hold_says_why() -> None:
    (event,) = logged("changes", SERVICE + "Place", PLACE, WAITS)
    assert (event["decision"], event["reason"], event["moved"]) == ("HOLD", "KV_BUDGET", False)
    assert "instance" not in event


def test_a_release_says_what_it_cost() -> None:
    (event,) = logged("changes", SERVICE + "Release", RELEASE, RELEASED)
    assert (event["pool"], event["outcome"], event["released"], event["block_seconds"]) == (
        "default",
        "PAUSED",
        True,
        1.235,
    )


def test_a_heartbeat_is_counted() -> None:
    (event,) = logged("all", SERVICE + "Heartbeat", HEARTBEAT, HEARD)
    assert (event["instances"], event["sessions"], event["refused"]) == (1, 1, 1)


def test_operators_leave_a_trace() -> None:
    request = opb.EvictSessionRequest(pool="p", session_id="s", reason="stuck")
    (event,) = logged("changes", "/moorage.v1.OperatorService/EvictSession", request, opb.EvictSessionResponse())
    assert (event["event"], event["session_id"], event["reason"]) == ("EvictSession", "s", "stuck")


def test_reads_are_no_decisions() -> None:
    assert logged("all", "/moorage.v1.InspectorService/GetPool", ADMIT, object()) == []
