from __future__ import annotations

import pickle

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

import moorage
from moorage import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    Held,
    InvalidArgument,
    LeaseLost,
    MoorageError,
    NotFound,
    PermissionDenied,
    PoolUnknown,
    Rejected,
    ResourceExhausted,
    SessionUnknown,
    Unauthenticated,
    Unavailable,
)
from moorage.v1 import scheduler_pb2 as pb
from tests.unit.client.fake_scheduler import FakeScheduler, fail

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED", InvalidArgument),
        (Code.NOT_FOUND, "SESSION_UNKNOWN", SessionUnknown),
        (Code.NOT_FOUND, "POOL_UNKNOWN", PoolUnknown),
        (Code.NOT_FOUND, "INSTANCE_UNKNOWN", NotFound),
        (Code.ABORTED, "LEASE_STALE", LeaseLost),
        (Code.ABORTED, "SOMETHING_NEW", MoorageError),
        (Code.FAILED_PRECONDITION, "WRONG_STATE", FailedPrecondition),
        (Code.PERMISSION_DENIED, "TOKEN_SCOPE", PermissionDenied),
        (Code.UNAUTHENTICATED, "TOKEN_MISSING", Unauthenticated),
        (Code.RESOURCE_EXHAUSTED, "SERVER_BUSY", ResourceExhausted),
        (Code.UNAVAILABLE, "STORE_UNAVAILABLE", Unavailable),
        (Code.DEADLINE_EXCEEDED, "", DeadlineExceeded),
        (Code.CANCELLED, "", Unavailable),
        (Code.INTERNAL, "", MoorageError),
    ],
)
def test_a_failed_call_raises_the_class_of_its_reason_or_code(
    fake: FakeScheduler, sync_client: Client, code: grpc.StatusCode, reason: str, kind: type[MoorageError]
) -> None:
    fake.fail_next("Place", 1, code, reason)
    with pytest.raises(MoorageError) as caught:
        sync_client.place("s", lease_token="t")
    assert type(caught.value) is kind
    assert caught.value.code is code
    assert caught.value.reason == (reason or None)
    assert caught.value.metadata == ({"session_id": "s"} if reason else {})
    assert isinstance(caught.value.__cause__, grpc.RpcError)


async def test_details_are_read_by_both_clients(fake: FakeScheduler, client: AsyncClient, sync_client: Client) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="prompt_tokens", description="above 2^40")
    details = (
        error_details_pb2.BadRequest(field_violations=[violation]),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
    )
    fake.fail_next("Admit", 2, Code.INVALID_ARGUMENT, "FIELD_INVALID", *details)
    with pytest.raises(InvalidArgument) as from_aio:
        await client.admit("s")
    with pytest.raises(InvalidArgument) as from_sync:
        sync_client.admit("s")
    for caught in (from_aio, from_sync):
        assert caught.value.field_violations == (FieldViolation("prompt_tokens", "above 2^40"),)
        assert caught.value.retry_after == 1.5
        assert str(caught.value) == "failed as FIELD_INVALID [FIELD_INVALID]"


def test_pushback_stands_in_for_a_missing_retry_info(fake: FakeScheduler, sync_client: Client) -> None:
    fake.before["Release"].append(lambda request, context: fail(context, Code.UNAVAILABLE, "X", pushback="250"))
    with pytest.raises(Unavailable) as caught:
        sync_client.release("s", outcome="ABORTED")
    assert caught.value.retry_after == 0.25


def test_rubbish_in_the_details_is_no_failure_of_its_own(fake: FakeScheduler, sync_client: Client) -> None:
    def rubbish(request: object, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        context.abort(Code.NOT_FOUND, "gone")

    fake.before["Place"].append(rubbish)
    with pytest.raises(NotFound, match="gone") as caught:
        sync_client.place("s", lease_token="t")
    assert caught.value.reason is None


def test_a_foreign_domain_is_no_reason_of_ours(fake: FakeScheduler, sync_client: Client) -> None:
    foreign = error_details_pb2.ErrorInfo(reason="LEASE_STALE", domain="example.com")
    fake.fail_next("Place", 1, Code.ABORTED, "", foreign)
    with pytest.raises(MoorageError) as caught:
        sync_client.place("s", lease_token="t")
    assert type(caught.value) is MoorageError
    assert caught.value.reason is None


@pytest.mark.parametrize("kind", [Held, Rejected])
def test_refusals_carry_their_hold(kind: type[Held | Rejected]) -> None:
    hold = pb.Hold(reason=pb.HOLD_REASON_CLASS_CAP, retry_after=Duration(seconds=2), position=4, detail="4 before")
    error = kind("refused", hold=hold)
    assert (error.reason, error.retry_after, error.hold.position) == ("CLASS_CAP", 2.0, 4)
    assert kind("refused", hold=pb.Hold(reason=99)).reason == "99"  # type: ignore[arg-type]
    assert (kind("refused").reason, kind("refused").retry_after) == (None, None)


def test_errors_travel_between_processes() -> None:
    error = InvalidArgument(
        "bad", code=Code.INVALID_ARGUMENT, reason="R", retry_after=0.5, field_violations=[FieldViolation("f", "d")]
    )
    held = Held("held", hold=pb.Hold(position=3))
    for original in (error, held):
        copy = pickle.loads(pickle.dumps(original))
        assert type(copy) is type(original)
        assert copy.__dict__ == original.__dict__
        assert str(copy) == str(original)


def test_every_exported_name_loads() -> None:
    assert {name for name in moorage.__all__ if getattr(moorage, name, None) is None} == set()
    assert set(moorage.__all__) <= set(dir(moorage))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        moorage.Nonsense  # noqa: B018
