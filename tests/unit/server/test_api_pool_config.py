"""A pool's configuration between the wire and the core."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from moorage.v1 import operator_pb2 as opb
from moorage_server.api.pool_config import from_proto, merged, to_proto
from moorage_server.core.config import OBSERVE, ClassConfig, PoolConfig
from moorage_server.errors import InvalidField

FULL = PoolConfig(
    policy="session",
    mode=OBSERVE,
    classes=MappingProxyType(
        {
            "a": ClassConfig(2.5, 1_000, 0.25, True, ("x", "y"), 512),
            "b": ClassConfig(),
        }
    ),
    default_class="a",
    headroom=0.5,
    static_cap=7,
    min_sessions_per_instance=2,
    max_sessions_per_instance=9,
    lease_ttl_s=12.5,
    heartbeat_interval_s=0.5,
    gone_after_s=40.0,
    epoch_interval_s=0.25,
    forecast_margin=0.5,
    healthy_hit_rate=0.75,
    max_passes=3,
    max_policy_lag=0,
    class_inference="unlabelled",
)


def ask(mask: list[str] | None = None, **config: Any) -> opb.ConfigurePoolRequest:
    request = opb.ConfigurePoolRequest(config=opb.PoolConfig(**config))
    if mask is not None:
        request.update_mask.CopyFrom(FieldMask(paths=mask))
    return request


def test_every_field_survives_the_way_there_and_back() -> None:
    assert from_proto(to_proto(FULL)) == FULL
    assert from_proto(to_proto(PoolConfig())) == PoolConfig()


def test_absent_fields_take_their_defaults() -> None:
    assert from_proto(opb.PoolConfig()) == PoolConfig()


def test_unknown_stays_absent_on_the_wire() -> None:
    message = to_proto(PoolConfig(classes=MappingProxyType({"a": ClassConfig()})))
    assert not message.HasField("max_policy_lag")
    assert not message.classes["a"].HasField("target_share")
    assert not message.classes["a"].HasField("prior_residency")


def test_without_a_mask_the_whole_configuration_is_replaced() -> None:
    assert merged(FULL, ask(headroom=0.25)) == PoolConfig(headroom=0.25)


def test_a_mask_takes_its_fields_only() -> None:
    result = merged(FULL, ask(["headroom", "lease_ttl"], headroom=0.25, lease_ttl=Duration(seconds=3), static_cap=1))
    assert result.headroom == 0.25
    assert result.lease_ttl_s == 3.0
    assert result.static_cap == FULL.static_cap
    assert result.classes == FULL.classes


def test_a_masked_field_that_is_absent_returns_to_its_default() -> None:
    result = merged(FULL, ask(["max_policy_lag", "mode", "policy", "class_inference"]))
    assert result.max_policy_lag is None
    assert result.mode == PoolConfig().mode
    assert result.class_inference == "off"
    assert result.policy == PoolConfig().policy


def test_a_path_to_a_class_changes_that_class() -> None:
    result = merged(FULL, ask(["classes.b", "classes.new.one"], classes={"b": {"refused": True}, "new.one": {}}))
    assert set(result.classes) == {"a", "b", "new.one"}
    assert result.classes["b"].refused
    assert result.classes["a"] == FULL.classes["a"]


def test_a_path_to_an_absent_class_removes_it() -> None:
    assert set(merged(FULL, ask(["classes.b"])).classes) == {"a"}


def test_the_path_to_all_classes_replaces_them() -> None:
    assert set(merged(FULL, ask(["classes"], classes={"c": {}})).classes) == {"c"}


def seconds(value: float) -> Duration:
    nanos = round(value * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("policy", ["static", "session", "misa", "misa-t"], ["", "MISA", "none"]),
        ("headroom", [1e-9, 1.0], [0.0, -1.0, 1.0000001, math.nan, math.inf]),
        ("static_cap", [1, 65_536], [0, 65_537]),
        ("min_sessions_per_instance", [0, 65_536], [65_537]),
        ("max_sessions_per_instance", [0, 1, 65_536], [65_537]),
        ("lease_ttl", [seconds(1), seconds(86_400)], [seconds(0.999999999), seconds(86_400.000000001)]),
        ("heartbeat_interval", [seconds(0.05), seconds(9)], [seconds(0.049), seconds(61), seconds(0)]),
        ("gone_after", [seconds(3.1), seconds(3_600)], [seconds(3), seconds(3_601)]),
        ("epoch_interval", [seconds(0.1), seconds(60)], [seconds(0.09), seconds(61)]),
        ("forecast_margin", [0.0, 10.0], [-0.1, 10.1, math.nan]),
        ("healthy_hit_rate", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("max_passes", [0, 1_000_000], [1_000_001]),
        ("max_policy_lag", [0, 2**32 - 1], []),
    ],
)
def test_bounds(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        merged(PoolConfig(), ask(**{field: value}))
    for value in bad:
        with pytest.raises(InvalidField) as caught:
            merged(PoolConfig(), ask(**{field: value}))
        assert caught.value.metadata["field"] == f"config.{field}"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("target_share", [1e-9, 1e9], [0.0, -1.0, math.nan, math.inf]),
        ("prior_context_tokens", [1, 2**40], [0, 2**40 + 1]),
        ("prior_residency", [seconds(0.001), seconds(604_800)], [seconds(0), seconds(604_800.1)]),
    ],
)
def test_bounds_of_a_class(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        merged(PoolConfig(), ask(classes={"a": {field: value}}))
    for value in bad:
        with pytest.raises(InvalidField) as caught:
            merged(PoolConfig(), ask(classes={"a": {field: value}}))
        assert caught.value.metadata["field"] == f"config.classes.a.{field}"


def test_bounds_hold_for_the_result_of_a_merge() -> None:
    with pytest.raises(InvalidField) as caught:
        merged(FULL, ask(["max_sessions_per_instance"], max_sessions_per_instance=1))
    assert caught.value.metadata["field"] == "config.min_sessions_per_instance"


def test_one_alias_names_one_class() -> None:
    with pytest.raises(InvalidField, match=r"b has it already|a has it already"):
        merged(PoolConfig(), ask(classes={"a": {"aliases": ["x"]}, "b": {"aliases": ["x"]}}))


def test_all_values_out_of_bounds_come_in_one_error() -> None:
    with pytest.raises(InvalidField) as caught:
        merged(PoolConfig(), ask(headroom=2, static_cap=0))
    assert [v.field for v in caught.value.violations] == ["config.headroom", "config.static_cap"]


def test_masked_changes_do_not_add_up_past_the_limit() -> None:
    full = PoolConfig(classes=MappingProxyType({str(n): ClassConfig() for n in range(255)}))
    result = merged(full, ask(["classes.x"], classes={"x": {}}))
    assert len(result.classes) == 256
    with pytest.raises(InvalidField, match="at most 256 classes"):
        merged(result, ask(["classes.y"], classes={"y": {}}))
