"""Requests for streams, what errors say, and looks at the ledger."""

from __future__ import annotations

from typing import Any

from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moorage.v1 import scheduler_pb2 as pb
from tests.contract.plane import POOL, Plane, seconds


def admit(sid: str, wait: float | None = None, **fields: Any) -> pb.AdmitRequest:
    request = pb.AdmitRequest(session_id=sid, **{"pool": POOL, "prompt_tokens": 160, "workload_class": "a", **fields})
    if wait is not None:
        request.max_wait.CopyFrom(seconds(wait))
    return request


def place(sid: str, token: str, **fields: Any) -> pb.PlaceRequest:
    return pb.PlaceRequest(session_id=sid, lease_token=token, **{"pool": POOL, **fields})


def release(sid: str, token: str = "", **fields: Any) -> pb.ReleaseRequest:
    values: dict[str, Any] = {"pool": POOL, "outcome": pb.OUTCOME_COMPLETED, **fields}
    return pb.ReleaseRequest(session_id=sid, lease_token=token, **values)


def report(sid: str, token: str, pool: str = POOL, **fields: Any) -> pb.ProgressReport:
    progress = pb.SessionProgress(session_id=sid, lease_token=token, phase=pb.PHASE_RUNNING, **fields)
    return pb.ProgressReport(pool=pool, session=progress)


def info(error: pb.CallError) -> error_details_pb2.ErrorInfo:
    """What an error says for machines."""
    found = error_details_pb2.ErrorInfo()
    assert any(d.Unpack(found) for d in status_pb2.Status.FromString(error.SerializeToString()).details)
    return found


async def is_held(plane: Plane, sid: str) -> bool:
    """Whether the session waits."""
    return sid in (await plane.books()).state("held")


async def held(plane: Plane, count: int) -> bool:
    """Whether so many wait."""
    return len((await plane.books()).state("held")) == count


async def lives(plane: Plane, sid: str) -> bool:
    """Whether the session has a home."""
    return sid in (await plane.books()).state("live")


async def is_gone(plane: Plane, sid: str) -> bool:
    """Whether nothing is left of the session."""
    return sid not in (await plane.books()).sessions
