"""Who may call what: tokens, roles, limits of credentials, and their rotation, over real gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from moorage.v1 import inspector_pb2, operator_pb2
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.callers import COLLECTOR, METHOD_ROLES, OPERATOR, ROUTER, VIEWER, Rate, TokenBucket, roles_for
from moorage_server.runtime import security
from moorage_server.runtime.credentials import read_callers
from moorage_server.runtime.security import Security
from moorage_server.runtime.security_settings import AuthSettings
from moorage_server.runtime.settings import Settings
from moorage_server.runtime.settings_sources import SettingsError
from tests.unit.server.conftest import Open, until

Code = grpc.StatusCode

ROLES = (ROUTER, COLLECTOR, OPERATOR, VIEWER)
TOKENS = {role: f"{role}-token-0123456789" for role in ROLES}
#: What contract and issue say, method by method. A new RPC needs a line here, and one in METHOD_ROLES.
ALLOWED = {
    "Admit": {ROUTER, OPERATOR},
    "Place": {ROUTER, OPERATOR},
    "Release": {ROUTER, OPERATOR},
    "Heartbeat": {ROUTER, COLLECTOR, OPERATOR},
    "Dispatch": {ROUTER, OPERATOR},
    "GetPool": {ROUTER, VIEWER, OPERATOR},
    "ListInstances": {ROUTER, VIEWER, OPERATOR},
    "ListSessions": {ROUTER, VIEWER, OPERATOR},
    "GetSession": {ROUTER, VIEWER, OPERATOR},
    "ListClasses": {ROUTER, VIEWER, OPERATOR},
    "WatchEvents": {ROUTER, VIEWER, OPERATOR},
    "ConfigurePool": {OPERATOR},
    "CordonInstance": {OPERATOR},
    "UncordonInstance": {OPERATOR},
    "DrainInstance": {OPERATOR},
    "BeginWeightUpdate": {OPERATOR},
    "EndWeightUpdate": {OPERATOR},
    "EvictSession": {OPERATOR},
}
METHODS = [
    method
    for file in (pb.DESCRIPTOR, inspector_pb2.DESCRIPTOR, operator_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
]

Refused = Callable[[Any], Any]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def write(path: Path, *entries: dict[str, Any]) -> str:
    """The credentials' file, replaced as a whole."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(entries), encoding="utf-8")
    os.replace(fresh, path)
    return str(path)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A file with a token per role."""
    path = tmp_path / "tokens.yaml"
    write(path, *({"name": role, "token": token, "roles": [role]} for role, token in TOKENS.items()))
    return path


def full_name(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def outcome(channel: grpc.aio.Channel, method: Any, metadata: Any) -> grpc.StatusCode:
    """The status of an empty request."""
    request = message_factory.GetMessageClass(method.input_type)().SerializeToString()
    if method.server_streaming:
        stream = channel.unary_stream(full_name(method))(request, metadata=metadata, timeout=0.5)
        return await stream.code()
    call = channel.unary_unary(full_name(method))(request, metadata=metadata, timeout=5)
    return await call.code()


def test_every_method_has_its_roles() -> None:
    assert set(METHOD_ROLES) == {full_name(method) for method in METHODS}
    assert {name.rpartition("/")[2]: set(roles) for name, roles in METHOD_ROLES.items()} == ALLOWED
    assert roles_for("/moorage.v1.OperatorService/Unheard") == {OPERATOR}


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_calls_its_methods_and_no_others(world: Open, tokens: Path, role: str) -> None:
    async with world(auth={"tokens_file": str(tokens)}) as w:
        codes = {m.name: await outcome(w.channel, m, bearer(TOKENS[role])) for m in METHODS}
    denied = {name for name, code in codes.items() if code is Code.PERMISSION_DENIED}
    assert denied == {name for name, roles in ALLOWED.items() if role not in roles}
    assert Code.UNAUTHENTICATED not in codes.values()


async def test_nobody_calls_anything_without_a_credential(world: Open, tokens: Path, refusal: Refused) -> None:
    async with world(auth={"tokens_file": str(tokens)}) as w:
        for method in METHODS:
            assert await outcome(w.channel, method, None) is Code.UNAUTHENTICATED, method.name
        missing = await refusal(w.scheduler.Admit(pb.AdmitRequest(session_id="s")))
        assert (missing.code, missing.reason) == (Code.UNAUTHENTICATED, "CREDENTIAL_MISSING")
        for value in ("Bearer", "Bearer ", "Bearer wrong-token-0123456789", f"Basic {TOKENS[ROUTER]}", TOKENS[ROUTER]):
            wrong = await refusal(w.scheduler.Admit(pb.AdmitRequest(), metadata=(("authorization", value),)))
            assert (wrong.code, wrong.reason) == (Code.UNAUTHENTICATED, "CREDENTIAL_INVALID"), value
            assert "token-0" not in repr((wrong.details, wrong.metadata))
        twice = await refusal(w.scheduler.Admit(pb.AdmitRequest(), metadata=bearer(TOKENS[ROUTER]) * 2))
        assert twice.reason == "CREDENTIAL_INVALID"
        lower = await refusal(
            w.scheduler.Admit(pb.AdmitRequest(), metadata=(("authorization", f"bearer {TOKENS[ROUTER]}"),))
        )
        assert lower.reason == "INVALID_FIELD"


async def test_strangers_bytes_are_not_decoded(world: Open, tokens: Path) -> None:
    async with world(auth={"tokens_file": str(tokens)}) as w:
        call = w.channel.unary_unary("/moorage.v1.SchedulerService/Admit")
        assert await call(b"\xff" * 1000).code() is Code.UNAUTHENTICATED
        assert await call(b"\xff" * 1000, metadata=bearer(TOKENS[VIEWER])).code() is Code.PERMISSION_DENIED
        assert await call(b"\xff" * 1000, metadata=bearer(TOKENS[ROUTER])).code() is Code.INVALID_ARGUMENT


async def test_health_is_open_and_reflection_is_for_readers(world: Open, tokens: Path) -> None:
    async def reflect(metadata: Any) -> grpc.StatusCode:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(w.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=5)
        try:
            answers = [answer async for answer in call]
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert len(answers) == 1
        return Code.OK

    async with world(auth={"tokens_file": str(tokens)}) as w:
        health: Any = health_pb2_grpc.HealthStub(w.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert await reflect(None) is Code.UNAUTHENTICATED
        assert await reflect(bearer(TOKENS[COLLECTOR])) is Code.PERMISSION_DENIED
        assert await reflect(bearer(TOKENS[VIEWER])) is Code.OK


async def test_a_heartbeat_holds_what_the_role_may_report(world: Open, tokens: Path, refusal: Refused) -> None:
    snapshot, progress = pb.InstanceSnapshot(instance_id="i"), pb.SessionProgress(session_id="s", lease_token="t")
    parts = {"instances": [snapshot], "sessions": [progress], "prefixes": [pb.PrefixUpdate(instance_id="i")]}
    forbidden = {ROUTER: {"instances", "prefixes"}, COLLECTOR: {"sessions"}, OPERATOR: set()}
    async with world(auth={"tokens_file": str(tokens)}) as w:
        for role, fields in forbidden.items():
            for name, items in parts.items():
                call = w.scheduler.Heartbeat(pb.HeartbeatRequest(**{name: items}), metadata=bearer(TOKENS[role]))
                if name not in fields:
                    assert len(getattr(await call, name)) <= 1
                    continue
                refused = await refusal(call)
                assert (refused.code, refused.reason) == (Code.PERMISSION_DENIED, "ROLE_MISSING")
                assert (refused.metadata["field"], refused.metadata["roles"]) == (name, role)


async def test_a_credential_binds_pools_classes_and_tenants(world: Open, tmp_path: Path, refusal: Refused) -> None:
    limited = {"pools": ["default", "p"], "classes": ["rlvr"], "tenants": ["team-a"]}
    entry = {"name": "r", "token": TOKENS[ROUTER], "roles": [ROUTER], **limited}
    metadata = bearer(TOKENS[ROUTER])
    good = {"session_id": "s", "workload_class": "rlvr", "tenant": "team-a"}
    async with world(auth={"tokens_file": write(tmp_path / "t", entry)}) as w:
        for change, reason in (
            ({"pool": "q"}, "POOL_FORBIDDEN"),
            ({"workload_class": "agentic"}, "CLASS_FORBIDDEN"),
            ({"workload_class": ""}, "CLASS_FORBIDDEN"),
            ({"tenant": "team-b"}, "TENANT_FORBIDDEN"),
            ({"tenant": ""}, "TENANT_FORBIDDEN"),
        ):
            refused = await refusal(w.scheduler.Admit(pb.AdmitRequest(**{**good, **change}), metadata=metadata))
            assert (refused.code, refused.reason) == (Code.PERMISSION_DENIED, reason)
            assert refused.metadata["caller"] == "r"
        assert (await w.scheduler.Admit(pb.AdmitRequest(**good), metadata=metadata)).decision == pb.DECISION_HOLD
        for call, request in (
            (w.scheduler.Place, pb.PlaceRequest(pool="q", session_id="s", lease_token="t")),
            (w.scheduler.Release, pb.ReleaseRequest(pool="q", session_id="s", outcome=pb.OUTCOME_ABORTED)),
            (w.scheduler.Heartbeat, pb.HeartbeatRequest(pool="q")),
            (w.inspector.GetPool, inspector_pb2.GetPoolRequest(pool="q")),
        ):
            assert (await refusal(call(request, metadata=metadata))).reason == "POOL_FORBIDDEN"


async def test_a_caller_has_a_rate_of_its_own(world: Open, tmp_path: Path, refusal: Refused) -> None:
    slow = {"name": "slow", "token": TOKENS[VIEWER], "roles": [VIEWER], "rate_limit": {"calls_per_s": 0.1, "burst": 3}}
    other = {"name": "other", "token": TOKENS[OPERATOR], "roles": [VIEWER]}
    request = inspector_pb2.GetSessionRequest(session_id="s")
    async with world(auth={"tokens_file": write(tmp_path / "t", slow, other)}) as w:
        reasons = []
        for _ in range(5):
            refused = await refusal(w.inspector.GetSession(request, metadata=bearer(TOKENS[VIEWER])))
            reasons.append(refused.reason)
        assert reasons == [*["POOL_UNKNOWN"] * 3, *["RATE_LIMITED"] * 2]
        assert refused.code is Code.RESOURCE_EXHAUSTED
        assert 9_000 < int(refused.pushback) <= 10_000
        assert refused.metadata["calls_per_s"] == "0.1"
        free = await refusal(w.inspector.GetSession(request, metadata=bearer(TOKENS[OPERATOR])))
        assert free.reason == "POOL_UNKNOWN"


def test_a_bucket_fills_at_its_rate() -> None:
    bucket = TokenBucket(Rate(2.0, 3.0), now=0.0)
    assert [bucket.take(0.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert [bucket.take(0.5), bucket.take(0.5)] == [0.0, 0.5]
    assert [bucket.take(100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


async def test_tokens_are_replaced_while_it_runs(
    world: Open, tokens: Path, refusal: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "LOOK_EVERY_S", 0.02)
    request, fresh = inspector_pb2.GetPoolRequest(), "fresh-token-0123456789"

    async def reason(w: Any, token: str) -> str:
        return str((await refusal(w.inspector.GetPool(request, metadata=bearer(token)))).reason)

    async def works(w: Any, token: str) -> bool:
        return await reason(w, token) == "POOL_UNKNOWN"

    async with world(auth={"tokens_file": str(tokens)}) as w:
        assert await works(w, TOKENS[VIEWER])
        digest = hashlib.sha256(fresh.encode()).hexdigest()
        new = {"name": "v", "token_sha256": digest, "roles": [VIEWER]}
        write(tokens, {"name": "v", "token": TOKENS[VIEWER], "roles": [VIEWER]}, new)
        await until(lambda: works(w, fresh))
        assert await works(w, TOKENS[VIEWER])
        with capture_logs() as logs:
            write(tokens, {"name": "x", "token": fresh, "roles": ["king"]})
            await until(lambda: any(entry["event"].startswith("unusable files") for entry in logs))
            os.unlink(tokens)
            await until(lambda: sum(entry["event"].startswith("unusable files") for entry in logs) == 2)
        assert await works(w, fresh)
        assert fresh not in repr(logs)
        write(tokens, new)
        await until(lambda: works(w, fresh))
        await until(lambda: _is(reason(w, TOKENS[VIEWER]), "CREDENTIAL_INVALID"))
        assert await works(w, fresh)


async def _is(answer: Any, expected: str) -> bool:
    return bool(await answer == expected)


async def test_a_stream_ends_with_its_credential(world: Open, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "LOOK_EVERY_S", 0.02)
    operator = bearer(TOKENS[OPERATOR])
    async with world(auth={"tokens_file": str(tokens)}) as w, asyncio.timeout(20):
        await w.scheduler.Heartbeat(pb.HeartbeatRequest(instances=[_idle("i")]), metadata=operator)
        watch = w.inspector.WatchEvents(
            inspector_pb2.WatchEventsRequest(resume_token="0"), metadata=bearer(TOKENS[VIEWER])
        )
        assert (await watch.read()).resume_token
        write(tokens, {"name": "o", "token": TOKENS[OPERATOR], "roles": [OPERATOR]})
        assert await _code_at_the_end(w, watch, operator) is Code.UNAUTHENTICATED


async def _code_at_the_end(w: Any, watch: Any, operator: Any) -> grpc.StatusCode:
    """How the watch ends while something happens in its pool."""
    for number in itertools.count():
        await w.scheduler.Heartbeat(pb.HeartbeatRequest(instances=[_idle(f"j{number}")]), metadata=operator)
        try:
            assert await watch.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            return error.code()
    raise AssertionError


def _idle(name: str) -> pb.InstanceSnapshot:
    return pb.InstanceSnapshot(
        instance_id=name, incarnation="1", sequence=1, block_size=16, total_blocks=100, used_blocks=0
    )


async def test_refusals_are_logged_without_the_token_and_not_all_of_them(world: Open, tokens: Path) -> None:
    async with world(auth={"tokens_file": str(tokens)}) as w:
        call = w.channel.unary_unary("/moorage.v1.OperatorService/EvictSession")
        with capture_logs() as logs:
            for _ in range(20):
                await call(b"", metadata=bearer("guess-0123456789abcdef")).code()
    refused = [entry for entry in logs if entry["event"] == "refused"]
    assert 1 <= len(refused) <= 5
    assert (refused[0]["reason"], refused[0]["rpc"]) == ("CREDENTIAL_INVALID", "EvictSession")
    assert "guess" not in repr(logs)


async def test_decisions_name_the_caller(world: Open, tokens: Path) -> None:
    with capture_logs() as logs:
        structlog.contextvars.clear_contextvars()
        async with world(auth={"tokens_file": str(tokens)}) as w:
            await w.scheduler.Admit(pb.AdmitRequest(session_id="s"), metadata=bearer(TOKENS[ROUTER]))
    (decision,) = [entry for entry in logs if entry["event"] == "Admit"]
    assert decision["caller"] == ROUTER


GOOD = {"name": "a", "token": "0123456789abcdef", "roles": ["router"]}


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ({"a": 1}, "must be a list"),
        ([{**GOOD, "token": "hush"}], "0.token: "),
        ([{**GOOD, "token": 1234567890123456789}], "0.token: must be text; put it in quotes"),
        ([{**GOOD, "token": "hush hush hush hush"}], "0.token: must be printable ASCII without blanks"),
        ([{"name": "a", "token_sha256": "hush", "roles": ["router"]}], "0.token_sha256: must be 64 hexadecimal digits"),
        ([{"name": "a", "roles": ["router"]}], "0: needs exactly one of token, token_sha256, certificate"),
        ([{**GOOD, "certificate": "x"}], "0: needs exactly one of"),
        ([{**GOOD, "roles": []}], "0.roles: "),
        ([{**GOOD, "roles": ["king"]}], "0.roles.0: "),
        ([{**GOOD, "pools": []}], "0.pools: "),
        ([{**GOOD, "max_sessions": 3}], "0.max_sessions: Extra inputs are not permitted"),
        ([{**GOOD, "rate_limit": {"calls_per_s": 0}}], "0.rate_limit.calls_per_s: "),
        ([GOOD, GOOD], "1: the token is in another entry as well"),
        ([GOOD, {**GOOD, "token": "f" * 16, "roles": ["viewer"]}], "1: another entry of the name 'a' grants something"),
    ],
)
def test_an_unusable_file_is_told_without_its_tokens(tmp_path: Path, entries: Any, complaint: str) -> None:
    path = tmp_path / "t"
    path.write_text(json.dumps(entries))
    with pytest.raises(SettingsError) as caught:
        read_callers(AuthSettings(tokens_file=str(path)))
    assert complaint in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "0123456789" not in str(caught.value)


def test_a_certificate_that_no_client_is_asked_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(json.dumps([{"name": "c", "certificate": "collector.rl.svc", "roles": ["collector"]}]))
    for auth in (
        {"tokens_file": str(path)},
        {"certificates": {"collector.rl.svc": {"roles": ["collector"]}}},
    ):
        with pytest.raises(SettingsError, match=r"'collector.rl.svc', but .* tls.client_ca_file"):
            Security(Settings.model_validate({"auth": auth}))


def test_what_is_no_yaml_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for content in (b"- {name: a, token: 'hush", b"\xff hush", b"\x00hush"):
        path.write_bytes(content)
        with pytest.raises(SettingsError) as caught:
            read_callers(AuthSettings(tokens_file=str(path)))
        assert "hush" not in str(caught.value)
