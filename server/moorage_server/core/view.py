"""What a decision is made from: a pool as it was read from the ledger. Times are milliseconds on the store's clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from moorage_server.core.config import PoolConfig
from moorage_server.core.labels import Model

SERVING = "SERVING"
DRAINING = "DRAINING"
PAUSED = "PAUSED"
SLEEPING = "SLEEPING"
STOPPED = "STOPPED"

#: How long a failed session speaks against an instance of which nothing else is heard, milliseconds (_candidate.lua).
SUSPECTED_MS = 3_000

FRESH = "FRESH"
STALE = "STALE"
GONE = "GONE"

#: Where the knowledge of a prefix cache comes from: the engine's events, what was sent there, or nowhere.
EVENTS = "events"
PLACED = "placed"
UNINDEXED = "none"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a session asks for when it wants to enter. None means that the caller did not say."""

    session_id: str
    workload_class: str
    group_id: str = ""
    policy_version: int | None = None
    prompt_tokens: int | None = None
    expected_output_tokens: int | None = None
    max_context_tokens: int | None = None
    expected_turns: int | None = None
    #: A living session whose home is lost: goes ahead of all that never had one.
    homeless: bool = False
    #: Tokens of its prompt that instances are known to hold, by instance key: looked up, or left by the session itself.
    reusable: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def expected_tokens(self) -> int | None:
        """Final context that the caller expects; None where it did not say. What it allows at most says nothing."""
        if self.prompt_tokens is None or self.expected_output_tokens is None:
            return None
        expected = self.prompt_tokens + self.expected_output_tokens
        return expected if self.max_context_tokens is None else min(expected, self.max_context_tokens)

    @property
    def declared_tokens(self) -> int | None:
        """Final context that the caller expects, else the largest it allows; None where it said neither."""
        return self.max_context_tokens if self.expected_tokens is None else self.expected_tokens

    def moved(self, tokens: int) -> Ask:
        """What the session asks for once its home is lost: its whole context, ``tokens``, is its prompt now."""
        rest = None
        if self.prompt_tokens is not None and self.expected_output_tokens is not None:
            rest = max(0, self.prompt_tokens + self.expected_output_tokens - tokens)
        return replace(self, prompt_tokens=tokens, expected_output_tokens=rest, homeless=True)

    def encode(self) -> str:
        """The numbers, for the ledger: 'prompt,output,context,turns' with nothing for what is unknown."""
        numbers = (self.prompt_tokens, self.expected_output_tokens, self.max_context_tokens, self.expected_turns)
        return ",".join("" if n is None else str(n) for n in numbers)

    @classmethod
    def decode(
        cls,
        session_id: str,
        workload_class: str,
        text: str,
        *,
        group_id: str = "",
        policy_version: int | None = None,
    ) -> Ask:
        """The reverse of :meth:`encode`."""
        parts = [int(p) if p else None for p in text.split(",")] if text else []
        prompt, output, context, turns = (parts + [None] * 4)[:4]
        return cls(session_id, workload_class, group_id, policy_version, prompt, output, context, turns)


@dataclass(frozen=True, slots=True)
class PrefixIndex:
    """What is known of an instance's prefix cache: where from, how many blocks, and whether something was missed."""

    source: str = UNINDEXED
    blocks: int = 0
    updated_ms: int | None = None
    behind: bool = False


_NO_INDEX = PrefixIndex()


@dataclass(slots=True)
class Instance:
    """One instance (engine x rank x incarnation): what it reported and what is booked on it. None is unknown."""

    key: str
    instance_id: str
    dp_rank: int
    incarnation: str
    endpoint: str = ""
    state: str = SERVING
    seen_ms: int = 0
    #: Age that the observation had when it was received.
    observed_age_ms: int = 0
    cordoned: bool = False
    drain_asked: bool = False
    gone: bool = False
    block_size: int = 16
    total_blocks: int | None = None
    used_blocks: int | None = None
    waiting_capacity: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    prefill_tokens: int | None = None
    generation_tokens: int | None = None
    preemptions: int | None = None
    prefill_rate: float | None = None
    max_context: int | None = None
    running: int | None = None
    #: What it serves, and since when other weights are being loaded; None while none are.
    weight_version: str = ""
    policy_version: int | None = None
    updating_since_ms: int | None = None
    #: New sessions keep away until the update is over.
    update_holds: bool = False
    #: Times its weights or its cache changed under its sessions.
    epoch: int = 0
    #: It answers, has work, and does none of it.
    stalled: bool = False
    #: When a session failed there, if nothing was heard of it since: no snapshot, no turn, no completed session.
    failed_at_ms: int | None = None
    #: Booked.
    sessions: int = 0
    by_class: dict[str, int] = field(default_factory=dict)
    reserved_blocks: int = 0
    shared_blocks: int = 0
    groups: dict[str, int] = field(default_factory=dict)
    #: Class of each group's shared prefix.
    group_classes: Mapping[str, str] = field(default_factory=dict)
    backlog_blocks: int = 0
    #: Continuation hits by class: tokens expected and found in the cache, cumulative; and when the last were counted.
    hits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    hits_at_ms: int | None = None
    prefixes: PrefixIndex = _NO_INDEX
    #: Published by the controller; empty or None until its first epoch.
    need: tuple[int, ...] = ()
    added: str = ""
    budget: int | None = None
    cap: int | None = None
    class_caps: Mapping[str, int] = field(default_factory=dict)
    brake: float = 1.0
    pressure: float = 0.0
    signals: str = ""
    #: As received, for display.
    snapshot: bytes = b""

    @property
    def draining(self) -> bool:
        """Whether sessions are to leave, by the engine's word or an operator's."""
        return self.drain_asked or self.state == DRAINING

    @property
    def label(self) -> str:
        """The instance, for people."""
        return f"{self.instance_id} rank {self.dp_rank}" if self.dp_rank else self.instance_id

    @property
    def updating(self) -> bool:
        """Whether weights are being loaded into it."""
        return self.updating_since_ms is not None

    @property
    def open(self) -> bool:
        """Whether it takes new sessions at all."""
        return self.state == SERVING and not (self.update_holds or self.cordoned or self.draining)

    def capacity(self, config: PoolConfig) -> int | None:
        """C_w, the protected KV budget in blocks: usable blocks x headroom. None while unknown.

        An engine that reports no block at all has not sized its cache yet.
        """
        return max(1, int(self.total_blocks * config.headroom)) if self.total_blocks else None


@dataclass(frozen=True, slots=True)
class Published:
    """What the controller last found for a class; see ``estimates`` for the meaning."""

    reference_blocks: float
    residency_s: float
    growth: float
    evidence: float
    prior_tokens: float
    #: S_b at the edges of ``survival.EDGES``.
    survival: tuple[float, ...]
    gap_s: float | None = None
    hit_rate: float | None = None
    quota_blocks: float = 0.0


@dataclass(slots=True)
class Class:
    """Counters of one class; cumulative ones since the pool began."""

    active: int = 0
    held: int = 0
    released: int = 0
    completed: int = 0
    admitted: int = 0
    blocks: int = 0
    #: Block-time in block-milliseconds and session-time in milliseconds, as accrued at `accrued_ms`.
    block_ms: int = 0
    session_ms: int = 0
    accrued_ms: int = 0
    virtual_time: int = 0
    gap_ms: int = 0
    gaps: int = 0
    expected_hit_tokens: int = 0
    found_hit_tokens: int = 0
    #: Sessions that came from another class or went to one.
    relabelled: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A session that is over. ``final_tokens`` None where nobody said, ``declared`` NaN likewise."""

    workload_class: str
    outcome: str
    start_tokens: float
    final_tokens: float | None
    declared: float = math.nan


@dataclass(frozen=True, slots=True)
class Held:
    """A held session near the head of its class's queue."""

    ask: Ask
    reason: str
    since_ms: int
    present_ms: int


@dataclass(slots=True)
class Queue:
    """A class's queue: its whole length, and in order the first members that are there (waiting, or due to poll)."""

    length: int
    heads: list[Held]
    #: Whether there are more of them.
    more: bool = False


@dataclass(slots=True)
class Pool:
    """A pool, as read at `now_ms`."""

    name: str
    now_ms: int
    config: PoolConfig
    instances: dict[str, Instance] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    published: dict[str, Published] = field(default_factory=dict)
    queues: dict[str, Queue] = field(default_factory=dict)
    global_virtual_time: int = 0
    unlabelled: int = 0
    unknown_class: int = 0
    inferred: int = 0
    mislabelled: int = 0
    #: Profiles to judge arrivals by; None while nobody may be judged.
    labels: Model | None = None
    decisions: int = 0
    epochs: int = 0
    revision: int = 0
    named: bool = False
    #: Since when weights are being loaded into the whole pool, instances that come meanwhile included.
    updating_since_ms: int | None = None
    config_version: int = 0
    #: Server or store were away a moment ago: silence proves nothing.
    in_grace: bool = False
    decisions_per_second: float = 0.0

    def demand(self, name: str) -> int:
        """N_b: unfinished demand of a class, active plus held sessions."""
        c = self.classes.get(name)
        return 0 if c is None else c.active + c.held

    def copy(self) -> Pool:
        """A copy that a plan may book on without changing this one."""
        return replace(
            self,
            instances={
                k: replace(i, by_class=dict(i.by_class), groups=dict(i.groups)) for k, i in self.instances.items()
            },
            classes={k: replace(c) for k, c in self.classes.items()},
            queues={k: Queue(q.length, list(q.heads), q.more) for k, q in self.queues.items()},
        )

    def freshness(self, instance: Instance) -> str:
        """FRESH, STALE or GONE by the age of what is known (contract.md, *Alive*).

        An engine that stands still is STALE. After an outage of our own nobody is gone for being silent: nobody could
        report.
        """
        silent = self.silence_s(instance) >= self.config.gone_after_s and not self.in_grace
        if instance.gone or instance.state == STOPPED or silent:
            return GONE
        fresh = self.age_s(instance) <= self.config.stale_after_s and not instance.stalled
        return FRESH if fresh else STALE

    def suspects(self, instance: Instance) -> bool:
        """Whether a session failed there and nothing was heard of it since, for a moment.

        It may be gone, look empty, and attract all that come next. Soon its silence tells.
        """
        failed = instance.failed_at_ms
        return failed is not None and 0 <= self.now_ms - failed < SUSPECTED_MS

    def silence_s(self, instance: Instance) -> float:
        """Seconds since the instance was last heard of."""
        return (self.now_ms - instance.seen_ms) / 1000.0

    def age_s(self, instance: Instance) -> float:
        """Age of what is known of the instance, in seconds: its snapshot may have been old when it came."""
        return self.silence_s(instance) + instance.observed_age_ms / 1000.0

    @property
    def policy_version(self) -> int | None:
        """Newest policy version that any instance serves; None while unknown."""
        return max((i.policy_version for i in self.alive() if i.policy_version is not None), default=None)

    def alive(self) -> list[Instance]:
        """Instances that are not gone."""
        return [i for i in self.instances.values() if self.freshness(i) != GONE]
