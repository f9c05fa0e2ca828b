"""What a request must satisfy before anything else looks at it: one function per message, by contract.md's limits.

Each function returns silently or raises InvalidField with all violations of the message; the functions for single items
of a Heartbeat return their InvalidField instead, because one bad item never spoils the others. What needs the pool's
state (bounds of a merged PoolConfig, a token that is not in force) is checked where that state is known.
"""

from __future__ import annotations

from typing import Final, Protocol

from moorage.v1 import inspector_pb2, operator_pb2, scheduler_pb2
from moorage_server import limits
from moorage_server.api import fields
from moorage_server.errors import InvalidField, Violation, shorten

DEFAULT_POOL: Final = "default"

_MAX_WAIT = "0 s to 10 min"
_LEASE_TTL = "1 s to 24 h"
_ITEMS = f"at most {limits.HEARTBEAT_ITEMS} instances, sessions and prefixes in all"

# The numbers of the enums' values that callers may send, with their names.
_OUTCOMES = {int(n): name for name, n in scheduler_pb2.Outcome.items() if n != scheduler_pb2.OUTCOME_UNSPECIFIED}
_INSTANCE_STATES = {int(n): name for name, n in scheduler_pb2.InstanceState.items()}
_PHASES = {int(n): name for name, n in scheduler_pb2.Phase.items()}
_PROGRESS_PHASES = {
    int(n): _PHASES[n]
    for n in (scheduler_pb2.PHASE_UNSPECIFIED, scheduler_pb2.PHASE_RUNNING, scheduler_pb2.PHASE_TOOL_WAIT)
}
_MODES = {int(n): name for name, n in operator_pb2.Mode.items()}
_INFERENCES = {int(n): name for name, n in operator_pb2.ClassInference.items()}

_CONFIG_FIELDS = frozenset(f.name for f in operator_pb2.PoolConfig.DESCRIPTOR.fields)
_CONFIG_DURATIONS = ("lease_ttl", "heartbeat_interval", "gone_after", "epoch_interval", "weight_update_timeout")
#: What a mask path into the map of classes begins with; the rest is the class's name, dots included.
CLASS_PATH: Final = "classes."

_SNAPSHOT_QUANTITIES = (
    "total_blocks",
    "used_blocks",
    "cached_blocks",
    "running",
    "waiting",
    "waiting_capacity",
    "max_context_tokens",
)
_SNAPSHOT_COUNTERS = (
    "sequence",
    "prefix_query_tokens_total",
    "prefix_hit_tokens_total",
    "prefill_tokens_total",
    "generation_tokens_total",
    "preemptions_total",
    "cache_epoch",
)


class _OfPool(Protocol):
    @property
    def pool(self) -> str: ...


class _OfInstance(_OfPool, Protocol):
    @property
    def instance_id(self) -> str: ...


class _Paged(_OfPool, Protocol):
    @property
    def page_size(self) -> int: ...
    @property
    def page_token(self) -> str: ...


def pool_of(request: _OfPool) -> str:
    """The pool that a request means: empty is "default"."""
    return request.pool or DEFAULT_POOL


def page_size_of(request: _Paged) -> int:
    """Most items that a List may return: 0 is 100."""
    return request.page_size or limits.PAGE_SIZE_DEFAULT


# SchedulerService


def admit(request: scheduler_pb2.AdmitRequest) -> None:
    """Checks an AdmitRequest."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.request_id(bad, request.request_id)
    fields.required_id(bad, "session_id", request.session_id)
    fields.optional_id(bad, "workload_class", request.workload_class)
    fields.optional_id(bad, "group_id", request.group_id)
    fields.optional_id(bad, "tenant", request.tenant)
    fields.quantity(bad, "prompt_tokens", request.prompt_tokens)
    fields.quantity(bad, "expected_output_tokens", request.expected_output_tokens)
    fields.quantity(bad, "max_context_tokens", request.max_context_tokens)
    fields.size(bad, "prefix_hashes", len(request.prefix_hashes), limits.PREFIX_HASHES, "hashes")
    if request.HasField("max_wait"):
        fields.duration(bad, "max_wait", request.max_wait, 0, limits.MAX_WAIT_S, _MAX_WAIT)
    if request.HasField("lease_ttl"):
        least, most = limits.LEASE_TTL_LEAST_S, limits.LEASE_TTL_MOST_S
        fields.duration(bad, "lease_ttl", request.lease_ttl, least, most, _LEASE_TTL)
    if request.labels:
        fields.labels(bad, request.labels)
    _raise_if(bad)


def place(request: scheduler_pb2.PlaceRequest) -> None:
    """Checks a PlaceRequest. The token is required."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.request_id(bad, request.request_id)
    fields.required_id(bad, "session_id", request.session_id)
    fields.token(bad, "lease_token", request.lease_token, required=True)
    fields.quantity(bad, "prompt_tokens", request.prompt_tokens)
    fields.size(bad, "prefix_hashes", len(request.prefix_hashes), limits.PREFIX_HASHES, "hashes")
    if request.HasField("max_wait"):
        fields.duration(bad, "max_wait", request.max_wait, 0, limits.MAX_WAIT_S, _MAX_WAIT)
    _raise_if(bad)


def release(request: scheduler_pb2.ReleaseRequest) -> None:
    """Checks a ReleaseRequest. Whether a token is needed depends on the session: a held one has none."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.request_id(bad, request.request_id)
    fields.required_id(bad, "session_id", request.session_id)
    fields.token(bad, "lease_token", request.lease_token, required=False)
    fields.enum(bad, "outcome", request.outcome, _OUTCOMES)
    for name in ("prompt_tokens", "cached_tokens", "output_tokens", "context_tokens"):
        fields.quantity(bad, f"usage.{name}", getattr(request.usage, name))
    _raise_if(bad)


def heartbeat(request: scheduler_pb2.HeartbeatRequest) -> None:
    """Checks what concerns a whole HeartbeatRequest; its items are checked one by one with the functions below."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    counts = {name: len(getattr(request, name)) for name in ("instances", "sessions", "prefixes")}
    if sum(counts.values()) > limits.HEARTBEAT_ITEMS:
        longest = max(counts, key=lambda name: counts[name])
        bad.append(Violation.of(longest, ", ".join(f"{n} {name}" for name, n in counts.items()), _ITEMS))
    _raise_if(bad)


def snapshot(item: scheduler_pb2.InstanceSnapshot) -> InvalidField | None:
    """What is wrong with one snapshot of a Heartbeat, None where nothing is."""
    bad: list[Violation] = []
    fields.required_id(bad, "instance_id", item.instance_id)
    fields.text(bad, "endpoint", item.endpoint, limits.ENDPOINT_BYTES)
    fields.optional_id(bad, "incarnation", item.incarnation)
    fields.optional_id(bad, "weight_version", item.weight_version)
    if item.HasField("observed_time"):
        fields.timestamp(bad, "observed_time", item.observed_time)
    fields.enum(bad, "state", item.state, _INSTANCE_STATES)
    if item.HasField("block_size") and not 1 <= item.block_size <= limits.QUANTITY:
        bad.append(Violation.of("block_size", item.block_size, "1 to 2^40"))
    for name in _SNAPSHOT_QUANTITIES:
        fields.quantity(bad, name, getattr(item, name))
    for name in _SNAPSHOT_COUNTERS:
        fields.counter(bad, name, getattr(item, name))
    fields.finite(bad, "prefill_tokens_per_second", item.prefill_tokens_per_second)
    residents = item.resident_sessions
    fields.size(bad, "resident_sessions", len(residents), limits.RESIDENT_SESSIONS, "sessions")
    for index, resident in enumerate(residents):
        if fields.is_id(resident.session_id) and resident.blocks <= limits.QUANTITY:
            continue
        fields.required_id(bad, f"resident_sessions[{index}].session_id", resident.session_id)
        fields.quantity(bad, f"resident_sessions[{index}].blocks", resident.blocks)
    return InvalidField.collected(bad) if bad else None


def progress(item: scheduler_pb2.SessionProgress) -> InvalidField | None:
    """What is wrong with one progress report of a Heartbeat, None where nothing is."""
    bad: list[Violation] = []
    fields.required_id(bad, "session_id", item.session_id)
    fields.token(bad, "lease_token", item.lease_token, required=True)
    fields.enum(bad, "phase", item.phase, _PROGRESS_PHASES)
    fields.quantity(bad, "context_tokens", item.context_tokens)
    fields.quantity(bad, "cached_tokens", item.cached_tokens)
    fields.quantity(bad, "output_tokens", item.output_tokens)
    return InvalidField.collected(bad) if bad else None


def progress_report(request: scheduler_pb2.ProgressReport) -> None:
    """Checks what concerns a report of a stream as a whole; the report itself is checked with :func:`progress`."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    _raise_if(bad)


def prefix_update(item: scheduler_pb2.PrefixUpdate) -> InvalidField | None:
    """What is wrong with one prefix update of a Heartbeat, None where nothing is."""
    bad: list[Violation] = []
    fields.required_id(bad, "instance_id", item.instance_id)
    fields.optional_id(bad, "incarnation", item.incarnation)
    fields.required_id(bad, "stream", item.stream)
    if not 1 <= item.sequence <= limits.COUNTER:
        bad.append(Violation.of("sequence", item.sequence, "1 to 2^63-1"))
    stored, removed = len(item.stored), len(item.removed)
    if stored + removed > limits.PREFIX_HASHES:
        longer = "removed" if removed > stored else "stored"
        limit = f"at most {limits.PREFIX_HASHES} hashes, stored and removed"
        bad.append(Violation.of(longer, f"{stored} stored, {removed} removed", limit))
    return InvalidField.collected(bad) if bad else None


# InspectorService


def get_pool(request: inspector_pb2.GetPoolRequest) -> None:
    """Checks a GetPoolRequest."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    _raise_if(bad)


def list_instances(request: inspector_pb2.ListInstancesRequest) -> None:
    """Checks a ListInstancesRequest."""
    bad: list[Violation] = []
    _page(bad, request)
    _raise_if(bad)


def list_sessions(request: inspector_pb2.ListSessionsRequest) -> None:
    """Checks a ListSessionsRequest."""
    bad: list[Violation] = []
    _page(bad, request)
    fields.optional_id(bad, "workload_class", request.workload_class)
    fields.optional_id(bad, "instance_id", request.instance_id)
    fields.enum(bad, "phase", request.phase, _PHASES)
    _raise_if(bad)


def get_session(request: inspector_pb2.GetSessionRequest) -> None:
    """Checks a GetSessionRequest."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.required_id(bad, "session_id", request.session_id)
    _raise_if(bad)


def list_classes(request: inspector_pb2.ListClassesRequest) -> None:
    """Checks a ListClassesRequest."""
    bad: list[Violation] = []
    _page(bad, request)
    _raise_if(bad)


def watch_events(request: inspector_pb2.WatchEventsRequest) -> None:
    """Checks a WatchEventsRequest."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.resume_token(bad, request.resume_token)
    _raise_if(bad)


# OperatorService


def configure_pool(request: operator_pb2.ConfigurePoolRequest) -> None:
    """Checks the form of a ConfigurePoolRequest. Bounds hold for the configuration that results from it."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.request_id(bad, request.request_id)
    _pool_config(bad, request.config)
    paths = request.update_mask.paths
    fields.size(bad, "update_mask.paths", len(paths), limits.MASK_PATHS, "paths")
    for path in paths:
        if path.startswith(CLASS_PATH):
            fields.required_id(bad, f"update_mask.paths[{shorten(path)}]", path.removeprefix(CLASS_PATH))
        elif path not in _CONFIG_FIELDS:
            known = ", ".join(sorted(_CONFIG_FIELDS))
            bad.append(Violation.of("update_mask.paths", path, f"{CLASS_PATH}NAME or one of {known}"))
    _raise_if(bad)


def instance(request: _OfInstance) -> None:
    """Checks a CordonInstanceRequest, UncordonInstanceRequest or DrainInstanceRequest."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.required_id(bad, "instance_id", request.instance_id)
    _raise_if(bad)


def weight_update(request: operator_pb2.BeginWeightUpdateRequest | operator_pb2.EndWeightUpdateRequest) -> None:
    """Checks a BeginWeightUpdateRequest or EndWeightUpdateRequest; the end of one that failed names no version."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.optional_id(bad, "instance_id", request.instance_id)
    if isinstance(request, operator_pb2.BeginWeightUpdateRequest):
        fields.required_id(bad, "weight_version", request.weight_version)
    else:
        fields.optional_id(bad, "weight_version", request.weight_version)
    if request.HasField("dp_rank") and not request.instance_id:
        bad.append(Violation.of("dp_rank", request.dp_rank, "absent where no instance_id is given"))
    _raise_if(bad)


def evict_session(request: operator_pb2.EvictSessionRequest) -> None:
    """Checks an EvictSessionRequest."""
    bad: list[Violation] = []
    fields.optional_id(bad, "pool", request.pool)
    fields.required_id(bad, "session_id", request.session_id)
    fields.text(bad, "reason", request.reason, limits.REASON_BYTES)
    _raise_if(bad)


def _raise_if(bad: list[Violation]) -> None:
    if bad:
        raise InvalidField.collected(bad)


def _page(bad: list[Violation], request: _Paged) -> None:
    fields.optional_id(bad, "pool", request.pool)
    if not 0 <= request.page_size <= limits.PAGE_SIZE:
        bad.append(Violation.of("page_size", request.page_size, f"0 to {limits.PAGE_SIZE}"))
    fields.text(bad, "page_token", request.page_token, limits.PAGE_TOKEN_BYTES)


def _pool_config(bad: list[Violation], config: operator_pb2.PoolConfig) -> None:
    fields.enum(bad, "config.mode", config.mode, _MODES)
    fields.enum(bad, "config.class_inference", config.class_inference, _INFERENCES)
    fields.optional_id(bad, "config.default_class", config.default_class)
    for name in _CONFIG_DURATIONS:
        fields.well_formed_duration(bad, f"config.{name}", getattr(config, name))
    fields.size(bad, "config.classes", len(config.classes), limits.CLASSES, "classes")
    for name, workload_class in config.classes.items():
        key = f"config.classes[{shorten(name)}]"
        fields.required_id(bad, f"{key} name", name)
        fields.well_formed_duration(bad, f"{key}.prior_residency", workload_class.prior_residency)
        fields.size(bad, f"{key}.aliases", len(workload_class.aliases), limits.ALIASES, "aliases")
        for alias in workload_class.aliases:
            fields.required_id(bad, f"{key}.aliases", alias)
