"""From failures to statuses."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from moorage_server import errors
from moorage_server.api.errors import CODES, DETAILS_TRAILER, PUSHBACK_TRAILER, internal, status_of
from moorage_server.errors import (
    InstanceUnknown,
    InvalidField,
    LeaseStale,
    MoorageFailure,
    NotSupported,
    PoolUnknown,
    RequestIdReused,
    SessionUnknown,
    StoreUnavailable,
    Violation,
    WrongState,
    shorten,
)

FAILURES: list[tuple[MoorageFailure, str, grpc.StatusCode, dict[str, str]]] = [
    (
        InvalidField("f", 1, "at most 0"),
        "INVALID_FIELD",
        grpc.StatusCode.INVALID_ARGUMENT,
        {"field": "f", "value": "1", "limit": "at most 0"},
    ),
    (RequestIdReused("r"), "REQUEST_ID_REUSED", grpc.StatusCode.INVALID_ARGUMENT, {"request_id": "r"}),
    (SessionUnknown("p", "s"), "SESSION_UNKNOWN", grpc.StatusCode.NOT_FOUND, {"pool": "p", "session_id": "s"}),
    (PoolUnknown("p"), "POOL_UNKNOWN", grpc.StatusCode.NOT_FOUND, {"pool": "p"}),
    (
        InstanceUnknown("p", "i", 3),
        "INSTANCE_UNKNOWN",
        grpc.StatusCode.NOT_FOUND,
        {"pool": "p", "instance_id": "i", "dp_rank": "3"},
    ),
    (LeaseStale("p", "s"), "LEASE_STALE", grpc.StatusCode.ABORTED, {"pool": "p", "session_id": "s"}),
    (WrongState("no", {"state": "x"}), "WRONG_STATE", grpc.StatusCode.FAILED_PRECONDITION, {"state": "x"}),
    (StoreUnavailable(0.3), "STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE, {"retry_after_s": "0.3"}),
    (NotSupported("Begin"), "NOT_SUPPORTED", grpc.StatusCode.UNIMPLEMENTED, {"method": "Begin"}),
    (internal("c"), "INTERNAL", grpc.StatusCode.INTERNAL, {"correlation_id": "c"}),
]


def details_of(failure: MoorageFailure) -> tuple[status_pb2.Status, dict[str, Any]]:
    trailers = dict(status_of(failure).trailers)
    status = status_pb2.Status.FromString(trailers[DETAILS_TRAILER])
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                assert kind.__name__ not in found, "one of each kind"
                found[kind.__name__] = kind()
                packed.Unpack(found[kind.__name__])
    return status, found


@pytest.mark.parametrize(("failure", "reason", "code", "metadata"), FAILURES)
def test_every_failure_has_a_code_and_an_error_info(
    failure: MoorageFailure, reason: str, code: grpc.StatusCode, metadata: dict[str, str]
) -> None:
    result = status_of(failure)
    status, details = details_of(failure)
    assert result.code is code
    assert status.code == code.value[0]
    assert result.details == status.message == failure.message
    assert details["ErrorInfo"].domain == "moorage.v1"
    assert details["ErrorInfo"].reason == reason
    assert dict(details["ErrorInfo"].metadata) == metadata


def test_every_reason_has_a_code() -> None:
    reasons = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, str)}
    assert reasons == set(CODES)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]{0,62}", reason) for reason in reasons)


def test_an_unlisted_reason_is_internal() -> None:
    assert status_of(MoorageFailure("NEW", "m")).code is grpc.StatusCode.INTERNAL


def test_only_an_unavailable_store_pushes_back() -> None:
    for failure, *_ in FAILURES:
        pushed = PUSHBACK_TRAILER in dict(status_of(failure).trailers)
        assert pushed == isinstance(failure, StoreUnavailable)


@pytest.mark.parametrize(("seconds", "milliseconds"), [(0.3, "300"), (1.5, "1500"), (0.0001, "1"), (61, "61000")])
def test_pushback_and_retry_info_agree(seconds: float, milliseconds: str) -> None:
    failure = StoreUnavailable(seconds)
    assert dict(status_of(failure).trailers)[PUSHBACK_TRAILER] == milliseconds
    assert details_of(failure)[1]["RetryInfo"].retry_delay.ToMilliseconds() == int(milliseconds)


def test_bad_request_lists_all_violations_in_order() -> None:
    failure = InvalidField.collected([Violation.of("a", 1, "at most 0"), Violation.of("b", "x", "a UUID")])
    _, details = details_of(failure)
    listed = [(v.field, v.description) for v in details["BadRequest"].field_violations]
    assert listed == [("a", "must be at most 0, got '1'"), ("b", "must be a UUID, got 'x'")]
    assert details["ErrorInfo"].metadata["more"] == "1"
    assert str(failure) == "a: must be at most 0, got '1' (and 1 more)"


def test_trailers_stay_below_what_peers_accept() -> None:
    worst = [Violation.of("😀" * 200, "😀" * 200, "at most 2^40")] * 500
    failure = InvalidField.collected(worst)
    status, details = details_of(failure)
    assert status.ByteSize() <= 3_072 + 100
    assert 1 <= len(details["BadRequest"].field_violations) < 500
    # gRPC percent-encodes the message and writes binary trailers in base64.
    message = sum(3 if byte > 126 or byte < 32 else 1 for byte in failure.message.encode())
    assert message + status.ByteSize() * 4 / 3 < 8_192


def test_values_are_cut_to_64_characters() -> None:
    assert shorten("x" * 64) == "x" * 64
    assert shorten("x" * 65) == "x" * 61 + "..."
    assert InvalidField("f", "y" * 1_000, "short").metadata["value"] == "y" * 61 + "..."


def test_metadata_values_are_bounded() -> None:
    _, details = details_of(MoorageFailure("X", "m", {"k": "v" * 1_000}))
    assert len(details["ErrorInfo"].metadata["k"]) == 256


def test_an_instance_without_a_rank_has_no_rank_in_its_error() -> None:
    assert "dp_rank" not in InstanceUnknown("p", "i").metadata
