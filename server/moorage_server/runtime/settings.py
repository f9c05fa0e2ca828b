"""The configuration of a server: one YAML file, MOORAGE_* variables and flags, checked before anything starts.

Flags win over variables, variables over the file, the file over the defaults. A variable is named after its key:
``redis.url`` is MOORAGE_REDIS_URL, ``shutdown.grace_s`` is MOORAGE_SHUTDOWN_GRACE_S. ``MOORAGE_POOLS`` takes YAML.
The defaults of a pool are the core's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from moorage.credentials import is_loopback
from moorage_server import limits
from moorage_server.core import config as core
from moorage_server.runtime.redaction import mask_url
from moorage_server.runtime.redis_settings import RedisSettings
from moorage_server.runtime.section import Address, Id, Section, empty_as_nothing
from moorage_server.runtime.security_settings import AuthSettings, TlsSettings

_POOL = core.PoolConfig()
_CLASS = core.ClassConfig()


class LogSettings(Section):
    """What is logged, to stderr."""

    format: Literal["auto", "console", "json"] = Field(
        default="auto",
        description="console: for people; json: one object per line; auto: console on a terminal, else json.",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level printed."
    )
    decisions: Literal["all", "changes", "none"] = Field(
        default="changes",
        description="Which decisions are logged: `changes` leaves out continuations that stay where they are.",
    )


class LimitSettings(Section):
    """What one server process takes on."""

    max_message_bytes: int = Field(
        default=limits.MESSAGE_BYTES,
        ge=65_536,
        le=limits.MESSAGE_BYTES,
        description="Largest request or answer, in bytes.",
    )
    max_concurrent_rpcs: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Calls under way at once, waiting ones included; unset: no bound."
    )
    max_connection_age_s: float | None = Field(
        default=None,
        ge=1,
        le=604_800,
        description="Seconds after which clients reconnect, so that they spread over replicas.",
    )


class HealthSettings(Section):
    """How readiness follows the store."""

    check_interval_s: float = Field(default=1.0, ge=0.05, le=60, description="Seconds between two pings of the store.")
    check_timeout_s: float = Field(default=1.0, ge=0.05, le=60, description="Seconds that an answer may take.")
    listen: Address | None = Field(
        default=None,
        description="HOST:PORT of a health service in plain text, for probes; unset: only the main port's."
        " With several processes any of them answers.",
    )


class MetricsSettings(Section):
    """Metrics for Prometheus."""

    listen: Address | None = Field(
        default=None,
        description="HOST:PORT of the HTTP listener; unset: none. Each of several processes has its own page: the first"
        " at PORT, the next at PORT + 1, and so on.",
    )


class TracingSettings(Section):
    """OpenTelemetry traces; needs the extra `tracing`."""

    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+$",
        description="http(s)://HOST:PORT of a collector that takes OTLP over gRPC; unset: no traces.",
    )


class ShutdownSettings(Section):
    """What happens between SIGTERM and exit."""

    pre_stop_delay_s: float = Field(
        default=0.0,
        ge=0,
        le=300,
        description="Seconds between NOT_SERVING and the last new call, for load balancers to notice.",
    )
    grace_s: float = Field(default=10.0, ge=0, le=600, description="Seconds that calls under way may take to finish.")


class ClassSettings(Section):
    """One workload class."""

    target_share: float | None = Field(
        default=_CLASS.target_share,
        description="Weight in the trainer's target mixture (rho_b), above 0; shares are normalised.",
    )
    prior_context_tokens: int | None = Field(
        default=_CLASS.prior_context_tokens, description="Context of a session until evidence accrues, in tokens."
    )
    prior_residency_s: float | None = Field(
        default=_CLASS.prior_residency_s, description="Seconds from admission to release until evidence accrues."
    )
    refused: bool = Field(default=_CLASS.refused, description="Refuse the class.")
    aliases: tuple[Id, ...] = Field(
        default=_CLASS.aliases,
        max_length=limits.ALIASES,
        description="Other names under which callers declare the class.",
    )
    shared_prefix_tokens: int | None = Field(
        default=_CLASS.shared_prefix_tokens,
        description="Tokens that all prompts of the class begin with (its system prompt).",
    )


class PoolSettings(Section):
    """How one pool decides until ConfigurePool says otherwise."""

    policy: str = Field(default=_POOL.policy, description="static, session, misa or misa-t.")
    mode: str = Field(
        default=_POOL.mode,
        description="enforce or observe: `observe` places everything and records what `enforce` would have said.",
    )
    classes: Annotated[dict[Id, ClassSettings], BeforeValidator(empty_as_nothing)] = Field(
        default_factory=dict, max_length=limits.CLASSES, description="Workload classes by name."
    )
    default_class: str = Field(
        default=_POOL.default_class,
        description="Class of sessions that declare none or an unknown one; empty: they keep the name they gave.",
    )
    headroom: float = Field(
        default=_POOL.headroom,
        description="Share of an instance's usable blocks that may be booked, above 0 and at most 1.",
    )
    static_cap: int = Field(default=_POOL.static_cap, description="Sessions per instance under `static`.")
    min_sessions_per_instance: int = Field(
        default=_POOL.min_sessions_per_instance,
        description="Least session cap of an instance under the adaptive policies.",
    )
    max_sessions_per_instance: int = Field(
        default=_POOL.max_sessions_per_instance, description="Most sessions per instance; 0: no bound but the policy's."
    )
    lease_ttl_s: float = Field(
        default=_POOL.lease_ttl_s, description="Seconds of a lease where the caller asks for none, 1 to 86400."
    )
    heartbeat_interval_s: float = Field(
        default=_POOL.heartbeat_interval_s,
        description="Seconds between snapshots; an instance is stale after three of them.",
    )
    gone_after_s: float = Field(
        default=_POOL.gone_after_s, description="Seconds of silence after which an instance is gone."
    )
    epoch_interval_s: float = Field(default=_POOL.epoch_interval_s, description="Seconds of a controller epoch.")
    reference_caps: bool = Field(
        default=_POOL.reference_caps,
        description="Limit sessions by the paper's caps, from reference footprints, and not by the forecast.",
    )
    forecast_margin: float = Field(
        default=_POOL.forecast_margin,
        description="Standard deviations above the forecast mean that must still fit (z).",
    )
    healthy_hit_rate: float = Field(
        default=_POOL.healthy_hit_rate, description="Continuation hit rate below which the brake acts, 0 to 1."
    )
    max_passes: int = Field(
        default=_POOL.max_passes,
        description="Sessions' worth of admissions that may pass a class whose head does not fit.",
    )
    max_policy_lag: int | None = Field(
        default=_POOL.max_policy_lag,
        ge=0,
        le=2**32 - 1,
        description="Most versions a session may lag behind; unset: no limit.",
    )
    hold_during_weight_update: bool = Field(
        default=_POOL.hold_during_weight_update,
        description="Keep new sessions away from an instance while weights are loaded into it.",
    )
    weight_update_timeout_s: float = Field(
        default=_POOL.weight_update_timeout_s,
        description="Seconds after which a weight update that nobody ends is over, 1 to 86400.",
    )
    class_inference: str = Field(
        default=_POOL.class_inference,
        description="Whose class is told from behaviour: off, unlabelled (no label, or an unknown one) or all.",
    )

    def to_core(self) -> core.PoolConfig:
        """The core's form. Bounds are not checked here."""
        values: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields if name != "classes"}
        classes = {
            name: core.ClassConfig(**workload_class.model_dump()) for name, workload_class in self.classes.items()
        }
        return core.PoolConfig(classes=MappingProxyType(classes), **values)


class Settings(Section):
    """A server's configuration."""

    listen: Address = Field(default="127.0.0.1:50061", description="HOST:PORT to listen on; port 0 takes a free one.")
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that share the address (SO_REUSEPORT), at most one per core; more than one needs"
        " redis.url. Connections are dealt out to them, evenly on Linux only.",
    )
    reflection: bool | None = Field(
        default=None, description="Offer gRPC reflection; unset: only where the server listens on loopback."
    )
    insecure_listen: bool = Field(
        default=False, description="Listen beyond loopback though neither tokens nor certificates tell callers apart."
    )
    tls: TlsSettings = Field(default_factory=TlsSettings, description="Certificates.")
    auth: AuthSettings = Field(default_factory=AuthSettings, description="Who may call, and what.")
    redis: RedisSettings = Field(default_factory=RedisSettings, description="Where the ledger lives.")
    log: LogSettings = Field(default_factory=LogSettings, description="What is logged.")
    limits: LimitSettings = Field(default_factory=LimitSettings, description="What one server process takes on.")
    health: HealthSettings = Field(default_factory=HealthSettings, description="How readiness follows the store.")
    metrics: MetricsSettings = Field(default_factory=MetricsSettings, description="Metrics for Prometheus.")
    tracing: TracingSettings = Field(default_factory=TracingSettings, description="OpenTelemetry traces.")
    shutdown: ShutdownSettings = Field(
        default_factory=ShutdownSettings, description="What happens between SIGTERM and exit."
    )
    pools: Annotated[dict[Id, PoolSettings], BeforeValidator(empty_as_nothing)] = Field(
        default_factory=dict,
        description="Pools by name; others come into being, with the defaults, when an instance registers.",
    )

    @property
    def embedded(self) -> bool:
        """Whether the ledger lives in this process: asked for, or nothing else was."""
        return self.redis.url is None and not self.redis.sentinels

    @property
    def redis_url(self) -> str | None:
        """The store's URL, password included: for connecting only."""
        return None if self.redis.url is None else self.redis.url.get_secret_value()

    @property
    def sentinels(self) -> list[tuple[str, int]]:
        """Host and port of each sentinel."""
        split = (address.rpartition(":") for address in self.redis.sentinels)
        return [(host.strip("[]"), int(port)) for host, _, port in split]

    @property
    def store(self) -> str:
        """The store, for people: no password."""
        if self.embedded:
            return "embedded"
        url = mask_url(self.redis_url or "")
        if self.redis.sentinels:
            return f"{self.redis.master_name} at sentinels {', '.join(map(mask_url, self.redis.sentinels))}"
        return f"cluster {url}" if self.redis.cluster else url

    @property
    def reflects(self) -> bool:
        """Whether reflection is on."""
        return self.on_loopback if self.reflection is None else self.reflection

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.listen)

    @property
    def exposed(self) -> bool:
        """Whether whoever reaches the server may do everything, and nobody said that this is meant."""
        return not (self.on_loopback or self.auth.on or self.tls.mutual or self.insecure_listen)

    def pool_configs(self) -> Mapping[str, core.PoolConfig]:
        """The configured pools in the core's form."""
        return {name: pool.to_core() for name, pool in self.pools.items()}
