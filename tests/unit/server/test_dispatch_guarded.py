"""Calls of a stream are let in, limited and traced one by one, as unary calls are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import grpc

from moorage.v1 import scheduler_pb2 as pb
from tests.contract.stream_calls import info
from tests.contract.streams import Stream
from tests.unit.server.conftest import Open
from tests.unit.server.test_tracing import ADMIT, PARENT, TRACE, TRACEPARENT, rig

Code = grpc.StatusCode
TOKEN = "router-token-0123456789"
METADATA = (("authorization", f"Bearer {TOKEN}"),)


def write(path: Path, **changes: Any) -> str:
    """The credentials' file with one router in it, replaced as a whole."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([{"name": "r", "token": TOKEN, "roles": ["router"], **changes}]), encoding="utf-8")
    os.replace(fresh, path)
    return str(path)


async def test_each_call_is_bound_by_the_callers_lists(world: Open, tmp_path: Path) -> None:
    file = write(tmp_path / "t", pools=["default", "p"], classes=["rlvr"], tenants=["team-a"])
    async with world(auth={"tokens_file": file}) as w:
        stream = Stream(w.scheduler, METADATA)
        good = {"session_id": "s", "workload_class": "rlvr", "tenant": "team-a"}
        for change, reason in (
            ({"pool": "q"}, "POOL_FORBIDDEN"),
            ({"workload_class": "agentic"}, "CLASS_FORBIDDEN"),
            ({"tenant": ""}, "TENANT_FORBIDDEN"),
        ):
            error = (await stream.ask(pb.AdmitRequest(**{**good, **change}))).error
            assert (error.code, info(error).reason) == (Code.PERMISSION_DENIED.value[0], reason)
        for request in (
            pb.PlaceRequest(pool="q", session_id="s", lease_token="t"),
            pb.ReleaseRequest(pool="q", session_id="s", outcome=pb.OUTCOME_ABORTED),
            pb.ProgressReport(pool="q", session=pb.SessionProgress(session_id="s", lease_token="t")),
        ):
            assert info((await stream.ask(request)).error).reason == "POOL_FORBIDDEN"
        assert (await stream.ask(pb.AdmitRequest(**good))).admit.decision == pb.DECISION_HOLD
        await stream.close()


async def test_each_call_counts_against_the_callers_rate(world: Open, tmp_path: Path) -> None:
    file = write(tmp_path / "t", rate_limit={"calls_per_s": 0.1, "burst": 4})
    async with world(auth={"tokens_file": file}) as w:
        stream = Stream(w.scheduler, METADATA)
        place = pb.PlaceRequest(session_id="s", lease_token="t")
        errors = [(await stream.answer(number)).error for number in stream.send(*[place] * 5)]
        # The stream itself was the first call.
        assert [info(error).reason for error in errors] == [*["POOL_UNKNOWN"] * 3, *["RATE_LIMITED"] * 2]
        assert errors[-1].code == Code.RESOURCE_EXHAUSTED.value[0]
        assert await stream.close() is Code.OK


async def test_a_credential_that_changes_changes_the_stream(world: Open, tmp_path: Path) -> None:
    path = tmp_path / "t"
    async with world(auth={"tokens_file": write(path)}) as w:
        stream = Stream(w.scheduler, METADATA)
        place = pb.PlaceRequest(session_id="s", lease_token="t")
        assert info((await stream.ask(place)).error).reason == "POOL_UNKNOWN"
        write(path, pools=["q"])
        w.server._security._reload_callers()
        assert info((await stream.ask(place)).error).reason == "POOL_FORBIDDEN"
        write(path, roles=["viewer"])
        w.server._security._reload_callers()
        stream.send(place)
        assert await stream.ended() is Code.PERMISSION_DENIED


async def test_a_stream_is_not_for_everybody(world: Open, tmp_path: Path) -> None:
    async with world(auth={"tokens_file": write(tmp_path / "t", roles=["collector"])}) as w:
        assert await Stream(w.scheduler).ended() is Code.UNAUTHENTICATED
        assert await Stream(w.scheduler, METADATA).ended() is Code.PERMISSION_DENIED


async def test_each_call_has_a_span_in_the_streams_trace() -> None:
    async with rig() as r:
        stream = Stream(r.scheduler, TRACEPARENT)
        await stream.ask(pb.AdmitRequest(pool="p", session_id="s", workload_class="rlvr"))
        await stream.ask(pb.PlaceRequest(pool="p", session_id="t", lease_token="t"))
        await stream.close()
        (admit,), (place,) = r.spans(ADMIT), r.spans("moorage.v1.SchedulerService/Place")
        children = r.children(admit)
        assert r.spans("moorage.v1.SchedulerService/Dispatch") == []
    for span in (admit, place):
        assert (span.context.trace_id, span.parent and span.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
        assert (span.attributes or {})["moorage.pool"] == "p"
    assert (admit.attributes or {})["moorage.reason"] == "NO_INSTANCE"
    assert "script admit" in children
    # Unknown: the pool has no instance, the session never lived.
    assert (place.attributes or {})["rpc.grpc.status_code"] == Code.NOT_FOUND.value[0]
