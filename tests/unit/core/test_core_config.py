"""Configuration: bounds with the key that breaks them, aliases, and the mixture."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moorage_server.core.config import UNLABELLED, ClassConfig, PoolConfig, check
from tests.unit.core.builders import config, mixture

#: Key: values inside its bounds, values outside.
BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "policy": (["static", "session", "misa", "misa-t"], ["", "MISA", "misa_t"]),
    "mode": (["enforce", "observe"], ["", "ENFORCE"]),
    "headroom": ([1e-6, 0.9, 1.0], [0.0, -1.0, 1.01, math.nan, math.inf]),
    "static_cap": ([1, 65_536], [0, -1, 65_537]),
    "min_sessions_per_instance": ([0, 65_536], [-1, 65_537]),
    "max_sessions_per_instance": ([0, 1, 65_536], [-1, 65_537]),
    "lease_ttl_s": ([1.0, 86_400.0], [0.9, 86_401.0, math.nan]),
    "heartbeat_interval_s": ([0.05, 9.9], [0.04, 60.1, math.nan, math.inf]),
    "gone_after_s": ([3.1, 3600.0], [3.0, 3600.1, math.nan]),
    "epoch_interval_s": ([0.1, 60.0], [0.09, 61.0, math.nan]),
    "forecast_margin": ([0.0, 10.0], [-0.1, 10.1, math.nan]),
    "healthy_hit_rate": ([0.0, 1.0], [-0.1, 1.1, math.nan]),
    "max_passes": ([0, 1_000_000], [-1, 1_000_001]),
}
CLASS_BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "target_share": ([None, 1e-9, 48.6], [0.0, -1.0, math.nan, math.inf]),
    "prior_context_tokens": ([None, 1, 2**40], [0, -1, 2**40 + 1]),
    "shared_prefix_tokens": ([None, 0, 2**40], [-1, 2**40 + 1]),
    "prior_residency_s": ([None, 0.001, 604_800.0], [0.0, 604_801.0, math.nan]),
}


def broken(settings: PoolConfig) -> list[str]:
    return [problem.key for problem in check(settings)]


def test_the_defaults_are_sound() -> None:
    assert check(PoolConfig()) == []


@pytest.mark.parametrize("key", BOUNDS)
def test_bounds(key: str) -> None:
    inside, outside = BOUNDS[key]
    for value in inside:
        assert broken(config(**{key: value})) == []
    for value in outside:
        assert key in broken(config(**{key: value}))


@pytest.mark.parametrize("key", CLASS_BOUNDS)
def test_class_bounds(key: str) -> None:
    inside, outside = CLASS_BOUNDS[key]
    for value in inside:
        assert broken(config(classes={"a": ClassConfig(**{key: value})})) == []
    for value in outside:
        assert broken(config(classes={"a": ClassConfig(**{key: value})})) == [f"classes.a.{key}"]


def test_bounds_that_hang_together() -> None:
    assert broken(config(min_sessions_per_instance=5, max_sessions_per_instance=4)) == ["min_sessions_per_instance"]
    assert broken(config(min_sessions_per_instance=5, max_sessions_per_instance=5)) == []
    assert broken(config(heartbeat_interval_s=10.0, gone_after_s=30.0)) == ["gone_after_s"]


def test_all_problems_are_told_at_once_with_value_and_limit() -> None:
    problems = check(config(headroom=2.0, max_passes=-1))
    assert [str(p) for p in problems] == [
        "headroom = 2.0: must be above 0 and at most 1",
        "max_passes = -1: must be 0 to 1000000",
    ]


def test_a_name_belongs_to_one_class() -> None:
    classes = {"a": ClassConfig(aliases=("b", "x")), "b": ClassConfig(aliases=("x", "b"))}
    problems = check(config(classes=classes))
    assert [(p.key, p.value) for p in problems] == [
        ("classes.b.aliases", "b"),
        ("classes.b.aliases", "x"),
        ("classes.b.aliases", "b"),
    ]
    assert broken(config(classes={"a": ClassConfig(aliases=("x", "x"))})) == []


def test_the_class_in_force() -> None:
    classes = {"rlvr": ClassConfig(aliases=("math", "agentic")), "agentic": ClassConfig()}
    for settings, declared, expected in (
        (config(classes=classes), "rlvr", "rlvr"),
        (config(classes=classes), "math", "rlvr"),
        (config(classes=classes), "agentic", "agentic"),
        (config(classes=classes), "new", "new"),
        (config(classes=classes), "", UNLABELLED),
        (config(classes=classes, default_class="agentic"), "new", "agentic"),
        (config(classes=classes, default_class="agentic"), "", "agentic"),
        (config(), "{odd} :name", "{odd} :name"),
    ):
        assert settings.class_in_force(declared) == expected


def test_the_mixture_is_normalised_over_those_who_have_a_share() -> None:
    """policy.md section 5 gives 48.6 / 33.1 / 18.2, which make 99.9."""
    paper = config(classes={**mixture(agentic=48.6, rlvr=33.1, rlhf=18.2), "other": ClassConfig()})
    shares = paper.target_mixture()
    assert shares == pytest.approx({"agentic": 0.4865, "rlvr": 0.3313, "rlhf": 0.1822}, abs=1e-4)
    assert math.fsum(shares.values()) == pytest.approx(1.0)
    assert config(classes={"a": ClassConfig()}).target_mixture() == config().target_mixture() == {}


def test_staleness_is_three_intervals() -> None:
    assert config(heartbeat_interval_s=0.5).stale_after_s == 1.5
