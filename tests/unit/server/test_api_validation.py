"""Every limit of the wire, at the limit and one past it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import operator_pb2 as opb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api import validation
from moorage_server.errors import InvalidField

ID_AT_LIMIT = "é" * 128
ID_PAST_LIMIT = ID_AT_LIMIT + "x"
SECOND = 1_000_000_000


def nanos(total: int) -> Duration:
    return Duration(seconds=total // SECOND, nanos=total % SECOND)


def admit(**changes: Any) -> pb.AdmitRequest:
    return pb.AdmitRequest(**{"session_id": "s", **changes})


def place(**changes: Any) -> pb.PlaceRequest:
    return pb.PlaceRequest(**{"session_id": "s", "lease_token": "t", **changes})


def release(**changes: Any) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(**{"session_id": "s", "outcome": pb.OUTCOME_COMPLETED, **changes})


def sessions(**changes: Any) -> ipb.ListSessionsRequest:
    return ipb.ListSessionsRequest(**changes)


def evict(**changes: Any) -> opb.EvictSessionRequest:
    return opb.EvictSessionRequest(**{"session_id": "s", **changes})


def configure(
    mask: list[str] | None = None, pool: str = "", request_id: str = "", **config: Any
) -> opb.ConfigurePoolRequest:
    request = opb.ConfigurePoolRequest(pool=pool, request_id=request_id, config=opb.PoolConfig(**config))
    if mask is not None:
        request.update_mask.CopyFrom(FieldMask(paths=mask))
    return request


def cordon(**changes: Any) -> opb.CordonInstanceRequest:
    return opb.CordonInstanceRequest(**{"instance_id": "i", **changes})


def begin(**changes: Any) -> opb.BeginWeightUpdateRequest:
    return opb.BeginWeightUpdateRequest(**{"weight_version": "v", **changes})


def watch(**changes: Any) -> ipb.WatchEventsRequest:
    return ipb.WatchEventsRequest(**changes)


def get_session(**changes: Any) -> ipb.GetSessionRequest:
    return ipb.GetSessionRequest(**{"session_id": "s", **changes})


Build = Callable[..., Any]
Check = Callable[[Any], None]

ADMIT: tuple[Build, Check] = (admit, validation.admit)
PLACE: tuple[Build, Check] = (place, validation.place)
RELEASE: tuple[Build, Check] = (release, validation.release)
HEARTBEAT: tuple[Build, Check] = (pb.HeartbeatRequest, validation.heartbeat)
GET_POOL: tuple[Build, Check] = (ipb.GetPoolRequest, validation.get_pool)
INSTANCES: tuple[Build, Check] = (ipb.ListInstancesRequest, validation.list_instances)
SESSIONS: tuple[Build, Check] = (sessions, validation.list_sessions)
GET_SESSION: tuple[Build, Check] = (get_session, validation.get_session)
CLASSES: tuple[Build, Check] = (ipb.ListClassesRequest, validation.list_classes)
WATCH: tuple[Build, Check] = (watch, validation.watch_events)
CONFIGURE: tuple[Build, Check] = (configure, validation.configure_pool)
CORDON: tuple[Build, Check] = (cordon, validation.instance)
WEIGHTS: tuple[Build, Check] = (begin, validation.weight_update)
EVICT: tuple[Build, Check] = (evict, validation.evict_session)

EVERY = [
    ADMIT,
    PLACE,
    RELEASE,
    HEARTBEAT,
    GET_POOL,
    INSTANCES,
    SESSIONS,
    GET_SESSION,
    CLASSES,
    WATCH,
    CONFIGURE,
    CORDON,
    WEIGHTS,
    EVICT,
]
WITH_SESSION = [ADMIT, PLACE, RELEASE, GET_SESSION, EVICT]
WITH_REQUEST_ID = [ADMIT, PLACE, RELEASE, CONFIGURE]
PAGED = [INSTANCES, SESSIONS, CLASSES]


def refused(kind: tuple[Build, Check], **changes: Any) -> InvalidField:
    build, check = kind
    with pytest.raises(InvalidField) as caught:
        check(build(**changes))
    return caught.value


def accepted(kind: tuple[Build, Check], **changes: Any) -> None:
    build, check = kind
    check(build(**changes))


@pytest.mark.parametrize("kind", EVERY)
def test_pool_is_optional_and_at_most_256_bytes(kind: tuple[Build, Check]) -> None:
    accepted(kind)
    accepted(kind, pool=ID_AT_LIMIT)
    failure = refused(kind, pool=ID_PAST_LIMIT)
    assert failure.metadata["field"] == "pool"
    assert failure.metadata["limit"] == "at most 256 bytes of UTF-8"


def test_empty_pool_means_default() -> None:
    assert validation.pool_of(admit()) == "default"
    assert validation.pool_of(admit(pool="p")) == "p"


@pytest.mark.parametrize("kind", WITH_SESSION)
def test_session_id_is_1_to_256_bytes(kind: tuple[Build, Check]) -> None:
    for good in ("x", ID_AT_LIMIT, "a b:{c}%\x00/é", "x" * 256):
        accepted(kind, session_id=good)
    for bad in ("", ID_PAST_LIMIT, "x" * 257, "😀" * 65):
        assert refused(kind, session_id=bad).metadata["field"] == "session_id"


@pytest.mark.parametrize("kind", WITH_REQUEST_ID)
def test_request_id_is_a_uuid_or_absent(kind: tuple[Build, Check]) -> None:
    for good in ("", str(uuid.uuid4()), str(uuid.uuid1()).upper()):
        accepted(kind, request_id=good)
    for bad in ("x", uuid.uuid4().hex, f"{{{uuid.uuid4()}}}", f"{uuid.uuid4()}\n", str(uuid.uuid4())[:-1]):
        assert refused(kind, request_id=bad).metadata["field"] == "request_id"


@pytest.mark.parametrize("field", ["workload_class", "group_id", "tenant"])
def test_optional_ids_of_admit(field: str) -> None:
    accepted(ADMIT, **{field: ID_AT_LIMIT})
    assert refused(ADMIT, **{field: ID_PAST_LIMIT}).metadata["field"] == field


@pytest.mark.parametrize(
    ("kind", "field"),
    [(ADMIT, f) for f in ("prompt_tokens", "expected_output_tokens", "max_context_tokens")]
    + [(PLACE, "prompt_tokens")],
)
def test_tokens_are_at_most_2_to_the_40(kind: tuple[Build, Check], field: str) -> None:
    accepted(kind, **{field: 0})
    accepted(kind, **{field: 2**40})
    assert refused(kind, **{field: 2**40 + 1}).metadata == {
        "field": field,
        "value": "1099511627777",
        "limit": "at most 2^40",
    }


@pytest.mark.parametrize("field", ["prompt_tokens", "cached_tokens", "output_tokens", "context_tokens"])
def test_usage_is_at_most_2_to_the_40(field: str) -> None:
    accepted(RELEASE, usage=pb.Usage(**{field: 2**40}))
    assert refused(RELEASE, usage=pb.Usage(**{field: 2**40 + 1})).metadata["field"] == f"usage.{field}"


@pytest.mark.parametrize("kind", [ADMIT, PLACE])
def test_at_most_16384_prefix_hashes(kind: tuple[Build, Check]) -> None:
    accepted(kind, prefix_hashes=range(16_384))
    failure = refused(kind, prefix_hashes=range(16_385))
    assert failure.metadata["field"] == "prefix_hashes"
    assert failure.metadata["value"] == "16385 hashes"


@pytest.mark.parametrize("kind", [ADMIT, PLACE])
def test_max_wait_is_0_to_10_minutes(kind: tuple[Build, Check]) -> None:
    accepted(kind, max_wait=nanos(0))
    accepted(kind, max_wait=nanos(600 * SECOND))
    for bad in (nanos(600 * SECOND + 1), Duration(nanos=-1), Duration(seconds=-1)):
        assert refused(kind, max_wait=bad).metadata["field"] == "max_wait"


def test_lease_ttl_is_1_second_to_24_hours() -> None:
    accepted(ADMIT, lease_ttl=nanos(SECOND))
    accepted(ADMIT, lease_ttl=nanos(86_400 * SECOND))
    for bad in (nanos(0), nanos(SECOND - 1), nanos(86_400 * SECOND + 1)):
        assert refused(ADMIT, lease_ttl=bad).metadata["field"] == "lease_ttl"
    assert refused(ADMIT, lease_ttl=nanos(86_400 * SECOND + 1)).metadata["value"] == "86400.000000001s"


@pytest.mark.parametrize(
    "malformed",
    [
        Duration(seconds=1, nanos=-1),
        Duration(seconds=-1, nanos=1),
        Duration(seconds=1, nanos=SECOND),
        Duration(seconds=315_576_000_001),
    ],
)
def test_malformed_durations_are_refused_everywhere(malformed: Duration) -> None:
    for kind, field in ((ADMIT, "max_wait"), (ADMIT, "lease_ttl"), (PLACE, "max_wait")):
        assert "well-formed" in refused(kind, **{field: malformed}).metadata["limit"]
    for field in ("lease_ttl", "heartbeat_interval", "gone_after", "epoch_interval"):
        assert refused(CONFIGURE, **{field: malformed}).metadata["field"] == f"config.{field}"
    prior = {"a": opb.ClassConfig(prior_residency=malformed)}
    assert refused(CONFIGURE, classes=prior).metadata["field"] == "config.classes[a].prior_residency"


def test_labels_are_at_most_64_of_256_bytes() -> None:
    accepted(ADMIT, labels={f"k{n}": "v" for n in range(64)})
    assert refused(ADMIT, labels={f"k{n}": "v" for n in range(65)}).metadata["value"] == "65 labels"
    accepted(ADMIT, labels={ID_AT_LIMIT: ID_AT_LIMIT, "empty": ""})
    assert refused(ADMIT, labels={"k": ID_PAST_LIMIT}).metadata["field"] == "labels[k]"
    assert refused(ADMIT, labels={ID_PAST_LIMIT: "v"}).metadata["field"] == "labels key"
    assert refused(ADMIT, labels={"": "v"}).metadata["field"] == "labels key"


def test_place_needs_a_token_and_never_repeats_it() -> None:
    assert refused(PLACE, lease_token="").metadata["field"] == "lease_token"
    accepted(PLACE, lease_token="t" * 256)
    failure = refused(PLACE, lease_token="secret" * 50)
    assert failure.metadata["value"] == "<300 bytes>"
    assert "secret" not in str(failure)


def test_release_needs_no_token_but_an_outcome() -> None:
    accepted(RELEASE, lease_token="")
    assert refused(RELEASE, lease_token="t" * 257).metadata["field"] == "lease_token"
    for outcome in (pb.OUTCOME_COMPLETED, pb.OUTCOME_ABORTED, pb.OUTCOME_FAILED, pb.OUTCOME_PAUSED):
        accepted(RELEASE, outcome=outcome)
    for bad in (pb.OUTCOME_UNSPECIFIED, 5):
        assert refused(RELEASE, outcome=bad).metadata["field"] == "outcome"


def test_all_violations_of_a_request_come_in_one_error() -> None:
    failure = refused(ADMIT, pool=ID_PAST_LIMIT, session_id="", request_id="x", prompt_tokens=2**41)
    assert [v.field for v in failure.violations] == ["pool", "request_id", "session_id", "prompt_tokens"]
    assert failure.metadata["more"] == "3"


def test_heartbeat_takes_1000_items_in_all() -> None:
    snapshots = [pb.InstanceSnapshot(instance_id="i")] * 400
    accepted(HEARTBEAT, instances=snapshots, sessions=[pb.SessionProgress()] * 600)
    failure = refused(HEARTBEAT, instances=snapshots, sessions=[pb.SessionProgress()] * 601)
    assert failure.metadata["field"] == "sessions"
    assert failure.metadata["value"] == "400 instances, 601 sessions, 0 prefixes"
    accepted(HEARTBEAT, instances=snapshots, prefixes=[pb.PrefixUpdate()] * 600)
    failure = refused(HEARTBEAT, instances=snapshots, prefixes=[pb.PrefixUpdate()] * 601)
    assert failure.metadata["field"] == "prefixes"
    assert failure.metadata["limit"] == "at most 1000 instances, sessions and prefixes in all"


def test_a_heartbeat_with_bad_items_is_itself_fine() -> None:
    accepted(HEARTBEAT, instances=[pb.InstanceSnapshot()], sessions=[pb.SessionProgress()])


@pytest.mark.parametrize("kind", PAGED)
def test_pages(kind: tuple[Build, Check]) -> None:
    for good in (0, 1, 1_000):
        accepted(kind, page_size=good)
    for bad in (-1, 1_001):
        assert refused(kind, page_size=bad).metadata["field"] == "page_size"
    accepted(kind, page_token="t" * 4_096)
    assert refused(kind, page_token="t" * 4_097).metadata["field"] == "page_token"


def test_page_size_defaults_to_100() -> None:
    assert validation.page_size_of(ipb.ListSessionsRequest()) == 100
    assert validation.page_size_of(ipb.ListSessionsRequest(page_size=7)) == 7


def test_filters_of_list_sessions() -> None:
    for field in ("workload_class", "instance_id"):
        accepted(SESSIONS, **{field: ID_AT_LIMIT})
        assert refused(SESSIONS, **{field: ID_PAST_LIMIT}).metadata["field"] == field
    for phase in range(6):
        accepted(SESSIONS, phase=phase)
    assert refused(SESSIONS, phase=6).metadata["field"] == "phase"


def test_resume_token_is_one_that_an_event_had() -> None:
    for good in ("", "0", "1-0", f"{2**64 - 1}-{2**64 - 1}"):
        accepted(WATCH, resume_token=good)
    for bad in ("$", "-", "+", "1", "1-", "1-0-0", "(1-0", f"{2**64}-0", "٣-0", "9" * 300):
        assert refused(WATCH, resume_token=bad).metadata["field"] == "resume_token"


def test_operator_requests() -> None:
    accepted(CORDON, instance_id=ID_AT_LIMIT, dp_rank=0)
    for bad in ("", ID_PAST_LIMIT):
        assert refused(CORDON, instance_id=bad).metadata["field"] == "instance_id"
        assert refused(WEIGHTS, weight_version=bad).metadata["field"] == "weight_version"
    accepted(EVICT, reason="r" * 1_024)
    assert refused(EVICT, reason="r" * 1_025).metadata["field"] == "reason"


def test_update_mask_names_fields_or_classes() -> None:
    accepted(CONFIGURE, mask=[])
    accepted(CONFIGURE, mask=[f.name for f in opb.PoolConfig.DESCRIPTOR.fields] + ["classes.a.b {c}"])
    accepted(CONFIGURE, mask=["policy"] * 512)
    assert refused(CONFIGURE, mask=["policy"] * 513).metadata["field"] == "update_mask.paths"
    for bad in ("", "*", "polcy", "config.policy", "leaseTtl", "classes[a]"):
        assert refused(CONFIGURE, mask=[bad]).metadata["field"] == "update_mask.paths"
    accepted(CONFIGURE, mask=["classes." + ID_AT_LIMIT])
    for bad in ("classes.", "classes." + ID_PAST_LIMIT):
        assert refused(CONFIGURE, mask=[bad]).metadata["field"].startswith("update_mask.paths[classes.")


def test_form_of_a_pool_config() -> None:
    for mode in range(3):
        accepted(CONFIGURE, mode=mode)
    assert refused(CONFIGURE, mode=3).metadata["field"] == "config.mode"
    accepted(CONFIGURE, default_class=ID_AT_LIMIT)
    assert refused(CONFIGURE, default_class=ID_PAST_LIMIT).metadata["field"] == "config.default_class"
    accepted(CONFIGURE, classes={str(n): opb.ClassConfig() for n in range(256)})
    assert (
        refused(CONFIGURE, classes={str(n): opb.ClassConfig() for n in range(257)}).metadata["field"]
        == "config.classes"
    )
    assert refused(CONFIGURE, classes={"": opb.ClassConfig()}).metadata["field"] == "config.classes[] name"
    accepted(CONFIGURE, classes={"a": opb.ClassConfig(aliases=["x"] * 64)})
    for aliases in (["x"] * 65, [""], [ID_PAST_LIMIT]):
        failure = refused(CONFIGURE, classes={"a": opb.ClassConfig(aliases=aliases)})
        assert failure.metadata["field"] == "config.classes[a].aliases"
