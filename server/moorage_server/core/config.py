"""Configuration of a pool, as the policy reads it. Defaults live here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

STATIC = "static"
SESSION = "session"
MISA = "misa"
MISA_T = "misa-t"
POLICIES = (STATIC, SESSION, MISA, MISA_T)

ENFORCE = "enforce"
OBSERVE = "observe"
MODES = (ENFORCE, OBSERVE)

INFER_OFF = "off"
INFER_UNLABELLED = "unlabelled"
INFER_ALL = "all"
INFERENCES = (INFER_OFF, INFER_UNLABELLED, INFER_ALL)

#: Classes of one pool at most, those that callers make up included.
MOST_CLASSES = 256

#: Class of sessions that declare none, where the configuration names no default class.
UNLABELLED = "unlabelled"


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """One workload class.

    ``target_share`` is the class's weight in the trainer's mixture (rho_b, normalised over the classes that give one).
    The priors describe a session until evidence accrues; None falls back to what callers declare, then to the largest
    context an instance takes.
    """

    target_share: float | None = None
    prior_context_tokens: int | None = None
    prior_residency_s: float | None = None
    refused: bool = False
    aliases: tuple[str, ...] = ()
    #: Tokens that all prompts of the class begin with (its system prompt).
    shared_prefix_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How one pool decides. Times in seconds."""

    policy: str = MISA_T
    mode: str = ENFORCE
    classes: Mapping[str, ClassConfig] = field(default_factory=lambda: MappingProxyType({}))
    default_class: str = ""
    #: C_w = usable blocks x headroom (policy.md section 2).
    headroom: float = 1.0
    static_cap: int = 16
    min_sessions_per_instance: int = 1
    #: 0 means: no bound but the policy's.
    max_sessions_per_instance: int = 0
    lease_ttl_s: float = 60.0
    heartbeat_interval_s: float = 1.0
    gone_after_s: float = 30.0
    epoch_interval_s: float = 1.0
    #: Limit sessions by K_w and K_wb as section 3 has them, from reference footprints, and not by the forecast: the
    #: paper's version, for comparison.
    reference_caps: bool = False
    #: z of the forecast: standard deviations above the mean that must still fit (policy.md section 7), at most.
    forecast_margin: float = 1.25
    healthy_hit_rate: float = 0.9
    #: Sessions' worth of admissions that may pass a class whose head does not fit (policy.md section 7).
    max_passes: int = 12
    #: None means no limit.
    max_policy_lag: int | None = None
    hold_during_weight_update: bool = True
    #: A weight update that nobody ends is over after this long; so long leases run on while engines stand still.
    weight_update_timeout_s: float = 600.0
    #: Whose class may be told from behaviour instead of the label (see ``labels``).
    class_inference: str = INFER_OFF

    @property
    def stale_after_s(self) -> float:
        """An instance is fresh for three expected intervals (contract.md, *Alive*)."""
        return 3.0 * self.heartbeat_interval_s

    def class_in_force(self, declared: str) -> str:
        """The class that a session declared as ``declared`` is scheduled under (alias and default applied)."""
        return self.named(declared) or self.default_class or declared or UNLABELLED

    def named(self, declared: str) -> str | None:
        """The configured class that goes by the name or alias ``declared``; None where none does."""
        if declared in self.classes:
            return declared
        return next((name for name, c in self.classes.items() if declared and declared in c.aliases), None)

    def shared_prefix(self, workload_class: str) -> int:
        """Tokens that all prompts of a class are known to begin with."""
        configured = self.classes.get(workload_class)
        return 0 if configured is None else configured.shared_prefix_tokens or 0

    def target_mixture(self) -> dict[str, float]:
        """The trainer's mixture rho_b over the classes that have a share; empty where none has."""
        shares = {name: c.target_share for name, c in self.classes.items() if c.target_share is not None}
        # Scaled by the largest first: the sum of two legal shares may be no float.
        largest = max(shares.values(), default=0.0)
        if largest <= 0:
            return {}
        total = math.fsum(share / largest for share in shares.values())
        return {name: share / largest / total for name, share in shares.items()}


@dataclass(frozen=True, slots=True)
class ConfigProblem(ValueError):
    """A configuration value out of its bounds: ``key``, the ``value`` given, and the ``limit`` it breaks."""

    key: str
    value: object
    limit: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: must be {self.limit}"


def check(config: PoolConfig) -> list[ConfigProblem]:
    """All values of ``config`` that are out of bounds, with the key, the value and the limit."""
    problems: list[ConfigProblem] = []

    def need(ok: bool, key: str, value: object, limit: str) -> None:
        if not ok:
            problems.append(ConfigProblem(key, value, limit))

    need(config.policy in POLICIES, "policy", config.policy, "one of " + ", ".join(POLICIES))
    need(config.mode in MODES, "mode", config.mode, "one of " + ", ".join(MODES))
    inference = config.class_inference
    need(inference in INFERENCES, "class_inference", inference, "one of " + ", ".join(INFERENCES))
    need(0.0 < config.headroom <= 1.0, "headroom", config.headroom, "above 0 and at most 1")
    need(1 <= config.static_cap <= 65_536, "static_cap", config.static_cap, "1 to 65536")
    least, most = config.min_sessions_per_instance, config.max_sessions_per_instance
    need(0 <= least <= 65_536, "min_sessions_per_instance", least, "0 to 65536")
    need(0 <= most <= 65_536, "max_sessions_per_instance", most, "0 to 65536")
    need(most == 0 or least <= most, "min_sessions_per_instance", least, f"at most max_sessions_per_instance ({most})")
    need(1.0 <= config.lease_ttl_s <= 86_400.0, "lease_ttl_s", config.lease_ttl_s, "1 to 86400 seconds")
    interval = config.heartbeat_interval_s
    need(0.05 <= interval <= 60.0, "heartbeat_interval_s", interval, "0.05 to 60 seconds")
    gone = config.gone_after_s
    need(config.stale_after_s < gone <= 3600.0, "gone_after_s", gone, "more than three intervals, at most 3600 seconds")
    need(0.1 <= config.epoch_interval_s <= 60.0, "epoch_interval_s", config.epoch_interval_s, "0.1 to 60 seconds")
    need(0.0 <= config.forecast_margin <= 10.0, "forecast_margin", config.forecast_margin, "0 to 10")
    need(0.0 <= config.healthy_hit_rate <= 1.0, "healthy_hit_rate", config.healthy_hit_rate, "0 to 1")
    need(0 <= config.max_passes <= 1_000_000, "max_passes", config.max_passes, "0 to 1000000")
    timeout = config.weight_update_timeout_s
    need(1.0 <= timeout <= 86_400.0, "weight_update_timeout_s", timeout, "1 to 86400 seconds")
    names: dict[str, str] = {}
    for name, c in config.classes.items():
        key = f"classes.{name}"
        share = c.target_share
        need(
            share is None or (math.isfinite(share) and share > 0),
            f"{key}.target_share",
            share,
            "a finite number above 0",
        )
        tokens = c.prior_context_tokens
        need(tokens is None or 1 <= tokens <= 2**40, f"{key}.prior_context_tokens", tokens, "1 to 2^40")
        residency = c.prior_residency_s
        need(
            residency is None or 0.001 <= residency <= 604_800.0,
            f"{key}.prior_residency_s",
            residency,
            "0.001 to 604800 seconds",
        )
        prefix = c.shared_prefix_tokens
        need(prefix is None or 0 <= prefix <= 2**40, f"{key}.shared_prefix_tokens", prefix, "0 to 2^40")
        for alias in (name, *c.aliases):
            need(names.setdefault(alias, name) == name, f"{key}.aliases", alias, f"free: {names[alias]} has it already")
    return problems
