"""Items of a Heartbeat, one by one: every limit, at the limit and one past it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api import validation

ID_AT_LIMIT = "é" * 128
ID_PAST_LIMIT = ID_AT_LIMIT + "x"
SECOND = 1_000_000_000


def snapshot_field(**changes: Any) -> str | None:
    failure = validation.snapshot(pb.InstanceSnapshot(**{"instance_id": "i", **changes}))
    return failure.metadata["field"] if failure else None


def test_snapshot_ids_and_texts() -> None:
    assert snapshot_field() is None
    assert snapshot_field(instance_id="") == "instance_id"
    assert snapshot_field(instance_id=ID_AT_LIMIT) is None
    assert snapshot_field(instance_id=ID_PAST_LIMIT) == "instance_id"
    assert snapshot_field(incarnation=ID_AT_LIMIT) is None
    assert snapshot_field(incarnation=ID_PAST_LIMIT) == "incarnation"
    assert snapshot_field(weight_version=ID_PAST_LIMIT) == "weight_version"
    assert snapshot_field(endpoint="e" * 2_048) is None
    assert snapshot_field(endpoint="e" * 2_049) == "endpoint"


@pytest.mark.parametrize(
    "field",
    ["total_blocks", "used_blocks", "cached_blocks", "running", "waiting", "waiting_capacity", "max_context_tokens"],
)
def test_snapshot_gauges_are_at_most_2_to_the_40(field: str) -> None:
    assert snapshot_field(**{field: 0}) is None
    assert snapshot_field(**{field: 2**40}) is None
    assert snapshot_field(**{field: 2**40 + 1}) == field


@pytest.mark.parametrize(
    "field",
    [
        "sequence",
        "prefix_query_tokens_total",
        "prefix_hit_tokens_total",
        "prefill_tokens_total",
        "generation_tokens_total",
        "preemptions_total",
        "cache_epoch",
    ],
)
def test_snapshot_counters_are_at_most_2_to_the_63_less_1(field: str) -> None:
    assert snapshot_field(**{field: 2**63 - 1}) is None
    assert snapshot_field(**{field: 2**63}) == field


def test_snapshot_block_size_is_unknown_or_at_least_1() -> None:
    assert snapshot_field(block_size=1) is None
    assert snapshot_field(block_size=2**40) is None
    assert snapshot_field(block_size=0) == "block_size"
    assert snapshot_field(block_size=2**40 + 1) == "block_size"


def test_snapshot_rate_is_finite() -> None:
    assert snapshot_field(prefill_tokens_per_second=0.0) is None
    for bad in (-1.0, math.nan, math.inf):
        assert snapshot_field(prefill_tokens_per_second=bad) == "prefill_tokens_per_second"


def test_snapshot_state_is_known() -> None:
    for state in range(6):
        assert snapshot_field(state=state) is None
    assert snapshot_field(state=6) == "state"


def test_snapshot_time_is_well_formed() -> None:
    assert snapshot_field(observed_time=Timestamp(seconds=253_402_300_799, nanos=SECOND - 1)) is None
    assert snapshot_field(observed_time=Timestamp(seconds=-62_135_596_800)) is None
    for bad in (
        Timestamp(seconds=253_402_300_800),
        Timestamp(seconds=-62_135_596_801),
        Timestamp(nanos=-1),
        Timestamp(nanos=SECOND),
    ):
        assert snapshot_field(observed_time=bad) == "observed_time"


def test_snapshot_residents() -> None:
    good = pb.ResidentSession(session_id="s", blocks=2**40)
    assert snapshot_field(resident_sessions=[good] * 16_384) is None
    assert snapshot_field(resident_sessions=[good] * 16_385) == "resident_sessions"
    assert snapshot_field(resident_sessions=[good, pb.ResidentSession()]) == "resident_sessions[1].session_id"
    too_many = pb.ResidentSession(session_id="s", blocks=2**40 + 1)
    assert snapshot_field(resident_sessions=[too_many]) == "resident_sessions[0].blocks"


def progress_field(**changes: Any) -> str | None:
    failure = validation.progress(pb.SessionProgress(**{"session_id": "s", "lease_token": "t", **changes}))
    return failure.metadata["field"] if failure else None


def test_progress_items() -> None:
    assert progress_field() is None
    assert progress_field(session_id="") == "session_id"
    assert progress_field(session_id=ID_PAST_LIMIT) == "session_id"
    assert progress_field(lease_token="") == "lease_token"
    for phase in (pb.PHASE_UNSPECIFIED, pb.PHASE_RUNNING, pb.PHASE_TOOL_WAIT):
        assert progress_field(phase=phase) is None
    for bad in (pb.PHASE_HELD, pb.PHASE_PLACED, pb.PHASE_PAUSED, 6):
        assert progress_field(phase=bad) == "phase"
    for field in ("context_tokens", "cached_tokens", "output_tokens"):
        assert progress_field(**{field: 2**40}) is None
        assert progress_field(**{field: 2**40 + 1}) == field


def prefix_field(**changes: Any) -> str | None:
    failure = validation.prefix_update(pb.PrefixUpdate(**{"instance_id": "i", "stream": "s", "sequence": 1, **changes}))
    return failure.metadata["field"] if failure else None


def test_prefix_updates() -> None:
    assert prefix_field() is None
    for field in ("instance_id", "stream"):
        assert prefix_field(**{field: ""}) == field
    for field in ("instance_id", "stream", "incarnation"):
        assert prefix_field(**{field: ID_AT_LIMIT}) is None
        assert prefix_field(**{field: ID_PAST_LIMIT}) == field
    assert prefix_field(sequence=2**63 - 1) is None
    for bad in (0, 2**63):
        assert prefix_field(sequence=bad) == "sequence"


def test_a_prefix_update_takes_16384_hashes_in_all() -> None:
    assert prefix_field(stored=range(16_384)) is None
    assert prefix_field(removed=range(16_384)) is None
    assert prefix_field(stored=range(16_000), removed=range(385)) == "stored"
    assert prefix_field(stored=range(385), removed=range(16_000)) == "removed"
