"""A pool's configuration on the wire and in the core: the same fields, durations against seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moorage.v1 import operator_pb2
from moorage_server import limits
from moorage_server.api import fields
from moorage_server.api.times import to_duration, to_seconds
from moorage_server.api.validation import CLASS_PATH
from moorage_server.core import config as core
from moorage_server.errors import InvalidField, Violation

_PLAIN = (
    "policy",
    "default_class",
    "headroom",
    "static_cap",
    "min_sessions_per_instance",
    "max_sessions_per_instance",
    "reference_caps",
    "forecast_margin",
    "healthy_hit_rate",
    "max_passes",
    "max_policy_lag",
    "hold_during_weight_update",
)
_DURATIONS = ("lease_ttl", "heartbeat_interval", "gone_after", "epoch_interval", "weight_update_timeout")
_MODE_TO_CORE = {
    operator_pb2.MODE_UNSPECIFIED: core.ENFORCE,
    operator_pb2.MODE_ENFORCE: core.ENFORCE,
    operator_pb2.MODE_OBSERVE: core.OBSERVE,
}
_MODE_TO_PROTO: dict[str, operator_pb2.Mode.ValueType] = {
    core.ENFORCE: operator_pb2.MODE_ENFORCE,
    core.OBSERVE: operator_pb2.MODE_OBSERVE,
}
_INFERENCE_TO_CORE = {
    operator_pb2.CLASS_INFERENCE_UNSPECIFIED: core.INFER_OFF,
    operator_pb2.CLASS_INFERENCE_OFF: core.INFER_OFF,
    operator_pb2.CLASS_INFERENCE_UNLABELLED: core.INFER_UNLABELLED,
    operator_pb2.CLASS_INFERENCE_ALL: core.INFER_ALL,
}
_INFERENCE_TO_PROTO: dict[str, operator_pb2.ClassInference.ValueType] = {
    core.INFER_OFF: operator_pb2.CLASS_INFERENCE_OFF,
    core.INFER_UNLABELLED: operator_pb2.CLASS_INFERENCE_UNLABELLED,
    core.INFER_ALL: operator_pb2.CLASS_INFERENCE_ALL,
}


def mode_to_proto(mode: str) -> operator_pb2.Mode.ValueType:
    """The wire's name for a mode of the core."""
    return _MODE_TO_PROTO[mode]


def from_proto(config: operator_pb2.PoolConfig) -> core.PoolConfig:
    """The core's configuration; absent fields take their defaults. Bounds are not checked."""
    present = {field.name for field, _ in config.ListFields()}
    values: dict[str, Any] = {name: getattr(config, name) for name in _PLAIN if name in present}
    values |= {f"{name}_s": to_seconds(getattr(config, name)) for name in _DURATIONS if name in present}
    values["mode"] = _MODE_TO_CORE[config.mode]
    values["class_inference"] = _INFERENCE_TO_CORE[config.class_inference]
    values["classes"] = MappingProxyType({name: _class_from_proto(c) for name, c in config.classes.items()})
    return core.PoolConfig(**values)


def to_proto(config: core.PoolConfig) -> operator_pb2.PoolConfig:
    """The wire's form, every field that has a value filled in."""
    inference = _INFERENCE_TO_PROTO[config.class_inference]
    message = operator_pb2.PoolConfig(mode=_MODE_TO_PROTO[config.mode], class_inference=inference)
    for name in _PLAIN:
        if (value := getattr(config, name)) is not None:
            setattr(message, name, value)
    for name in _DURATIONS:
        getattr(message, name).CopyFrom(to_duration(getattr(config, f"{name}_s")))
    for name, workload_class in config.classes.items():
        message.classes[name].CopyFrom(_class_to_proto(workload_class))
    return message


def merged(current: core.PoolConfig, request: operator_pb2.ConfigurePoolRequest) -> core.PoolConfig:
    """The configuration that a ConfigurePool asks for, on top of the one in force.

    Without a mask the request's configuration replaces the current one. With one, each path takes its field from the
    request; where the request leaves it out, the field returns to its default, and a class named by its path goes.
    Raises InvalidField with every value that is out of its bounds.
    """
    wanted = from_proto(request.config)
    result = _masked(current, wanted, request.update_mask.paths) if request.update_mask.paths else wanted
    bad = [_violation(problem) for problem in core.check(result)]
    # Masked changes add up.
    fields.size(bad, "config.classes", len(result.classes), limits.CLASSES, "classes")
    if bad:
        raise InvalidField.collected(bad)
    return result


def _masked(current: core.PoolConfig, wanted: core.PoolConfig, paths: Sequence[str]) -> core.PoolConfig:
    values: dict[str, Any] = {}
    classes: dict[str, core.ClassConfig] = dict(wanted.classes if "classes" in paths else current.classes)
    for path in paths:
        if path.startswith(CLASS_PATH):
            _take_class(classes, wanted.classes, path.removeprefix(CLASS_PATH))
        elif path != "classes":
            name = f"{path}_s" if path in _DURATIONS else path
            values[name] = getattr(wanted, name)
    return replace(current, classes=MappingProxyType(classes), **values)


def _take_class(classes: dict[str, core.ClassConfig], wanted: Mapping[str, core.ClassConfig], name: str) -> None:
    if name in wanted:
        classes[name] = wanted[name]
    else:
        classes.pop(name, None)


def _violation(problem: core.ConfigProblem) -> Violation:
    # Times carry their unit in the core's names, and only they end in "_s".
    return Violation.of(f"config.{problem.key.removesuffix('_s')}", problem.value, problem.limit)


def _class_from_proto(message: operator_pb2.ClassConfig) -> core.ClassConfig:
    return core.ClassConfig(
        target_share=message.target_share if message.HasField("target_share") else None,
        prior_context_tokens=message.prior_context_tokens if message.HasField("prior_context_tokens") else None,
        prior_residency_s=to_seconds(message.prior_residency) if message.HasField("prior_residency") else None,
        refused=message.refused,
        aliases=tuple(message.aliases),
        shared_prefix_tokens=message.shared_prefix_tokens if message.HasField("shared_prefix_tokens") else None,
    )


def _class_to_proto(config: core.ClassConfig) -> operator_pb2.ClassConfig:
    message = operator_pb2.ClassConfig(
        target_share=config.target_share,
        prior_context_tokens=config.prior_context_tokens,
        refused=config.refused,
        aliases=config.aliases,
        shared_prefix_tokens=config.shared_prefix_tokens,
    )
    if config.prior_residency_s is not None:
        message.prior_residency.CopyFrom(to_duration(config.prior_residency_s))
    return message
