"""What the controller remembers of one instance and believes of it: its brake, its pace, whether it stands still."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moorage_server.core import pressure
from moorage_server.core.config import PoolConfig
from moorage_server.core.pace import Pace
from moorage_server.core.pressure import Brake, Sample
from moorage_server.core.view import SERVING, Instance, Pool

#: Time constant of the allocation rate, seconds.
_RATE_S = 8.0
#: An instance whose forecast stays below this share of its budget is calm: what misses there is not crowded out.
_CALM = 0.5

#: What the policy listens to: name, value, age in seconds, and what it makes of it.
Signal = tuple[str, float | None, float | None, str]


@dataclass(slots=True)
class Watched:
    """The memory of one instance, in one incarnation."""

    incarnation: str
    brake: Brake = field(default_factory=Brake)
    #: Epoch of weights and cache that the brake's samples belong to.
    epoch: int = 0
    #: Blocks allocated per second, smoothed; None until two snapshots were seen.
    allocation: float | None = None
    tokens_seen: int | None = None
    seen_ms: int = 0
    #: Work done as last seen (prompt tokens looked up, computed, generated), and since when it stands there.
    done: tuple[int | None, ...] = ()
    done_ms: int = 0
    stalled: bool = False
    #: How the engine's pace depends on what runs, and the tokens it had generated when that was last looked at.
    pace: Pace = field(default_factory=Pace)
    generated: int | None = None
    running: int = 0

    def look(self, pool: Pool, instance: Instance, elapsed_s: float) -> None:
        """Takes one epoch in."""
        self._allocate(instance)
        self._stall(pool, instance)
        sample = Sample(
            pool.now_ms / 1000.0,
            dict(instance.hits),
            instance.prefix_query_tokens,
            instance.prefix_hit_tokens,
            instance.preemptions,
            instance.waiting_capacity,
        )
        if instance.updating or instance.state != SERVING or instance.epoch != self.epoch:
            self.brake, self.epoch = pressure.settle(self.brake, sample), instance.epoch
        else:
            healthy = pool.config.healthy_hit_rate
            self.brake = pressure.step(self.brake, sample, elapsed_s, healthy, calm=_calm(instance, pool.config))

    def _allocate(self, instance: Instance) -> None:
        """Updates a_w, the blocks that the engine allocates per second, from its counters."""
        if instance.prefill_tokens is None or instance.generation_tokens is None:
            return
        tokens = instance.prefill_tokens + instance.generation_tokens
        elapsed_s = (instance.seen_ms - self.seen_ms) / 1000.0
        if elapsed_s <= 0:
            return
        self._pace(instance, elapsed_s)
        if self.tokens_seen is not None and tokens >= self.tokens_seen:
            rate = (tokens - self.tokens_seen) / instance.block_size / elapsed_s
            weight = 1.0 - math.exp(-elapsed_s / _RATE_S)
            self.allocation = rate if self.allocation is None else self.allocation + weight * (rate - self.allocation)
        self.tokens_seen, self.seen_ms = tokens, instance.seen_ms

    def _pace(self, instance: Instance, elapsed_s: float) -> None:
        """Learns how fast it generates with how many running; a gauge that is not told says nothing."""
        if instance.generation_tokens is None or instance.running is None:
            # What is generated until both are told again is not the work of the time since the last look.
            self.generated = None
            return
        if self.generated is not None and instance.generation_tokens < self.generated:
            # It started anew, whatever its incarnation says.
            self.pace = Pace()
        elif self.generated is not None:
            rate = (instance.generation_tokens - self.generated) / elapsed_s
            self.pace.take((self.running + instance.running) / 2.0, rate, elapsed_s)
        self.generated, self.running = instance.generation_tokens, instance.running

    def _stall(self, pool: Pool, instance: Instance) -> None:
        """An engine can hang behind a front that still answers: requests run, and no counter moves. Counters may stand
        still for tens of seconds while a long prompt is computed, so only as long a time as makes silence count tells.
        """
        done = (instance.prefix_query_tokens, instance.prefill_tokens, instance.generation_tokens)
        busy = bool(instance.running) and instance.state == SERVING and not instance.updating
        if done != self.done or not busy or any(counter is None for counter in done):
            self.done, self.done_ms = done, instance.seen_ms
        self.stalled = instance.seen_ms - self.done_ms >= 1000.0 * pool.config.gone_after_s

    def signals(self, pool: Pool, instance: Instance, gap_s: float) -> tuple[Signal, ...]:
        """All that the policy listens to, live or not, and what the brake believes."""
        age_s = max(0.0, pool.age_s(instance))
        brake, reading = self.brake, pressure.read(self.brake.samples)

        def signal(name: str, value: float | None, detail: str) -> Signal:
            return name, value, None if value is None else age_s, detail

        by_engine = reading.raw is not None and reading.continuation is None and pressure.deaf(brake)
        reference = "" if brake.healthy_raw is None else f", healthy is {brake.healthy_raw:.2f}"
        gap = f"times a gap of {gap_s:.2f} s is kept free"
        return (
            *self._turns(pool, instance, reading),
            signal(
                "engine_hit_rate", reading.raw, ("in use" if by_engine else "used where no turn reports") + reference
            ),
            signal("preemptions", _number(instance.preemptions), "any new one brakes"),
            signal("waiting_for_capacity", _number(instance.waiting_capacity), "brakes when it persists"),
            signal("allocation_blocks_per_second", self.allocation, gap),
            signal("stalled", *self._standstill(instance)),
            ("gain", self.pace.gain(), 0.0, "share of its lone pace that one more session would add"),
            ("brake", brake.factor, 0.0, self._belief(pool, instance)),
        )

    def _turns(self, pool: Pool, instance: Instance, reading: pressure.Reading) -> list[Signal]:
        """The continuation hit rate: of all turns, and by class."""
        age_s = None if instance.hits_at_ms is None else max(0.0, (pool.now_ms - instance.hits_at_ms) / 1000.0)
        over = f"over {pressure.WINDOW_S:g} s"
        rows: list[Signal] = [("continuation_hit_rate", reading.continuation, age_s, f"{over}, of all turns")]
        for name, (expected, found) in sorted(reading.turns.items()):
            healthy = self.brake.healthy.get(name, pressure.HEALTHY)
            detail = f"{over}, {found} of {expected} tokens, healthy is {healthy:.2f}"
            rows.append((f"continuation_hit_rate.{name}", found / expected, age_s, detail))
        return rows

    def _standstill(self, instance: Instance) -> tuple[float | None, str]:
        if instance.running is None or None in self.done:
            return None, "requests or their tokens are not reported"
        return float(self.stalled), "requests run and no counter moves" if self.stalled else "no"

    def _belief(self, pool: Pool, instance: Instance) -> str:
        now_s = pool.now_ms / 1000.0
        if instance.updating:
            return "nothing brakes: weights are being loaded"
        if now_s < self.brake.quiet_until_s:
            return f"nothing brakes for {self.brake.quiet_until_s - now_s:.0f} s more: weights or cache changed"
        if self.brake.factor >= 1.0:
            return "released"
        left_s = self.brake.latched_until_s - now_s
        then = f"listens for {left_s:.0f} s more" if left_s > 0 else "being let go"
        return f"{self.brake.why}; {then}"


def of(watched: Watched | None, instance: Instance) -> Watched:
    """The memory of an instance; a new incarnation starts afresh."""
    if watched is None or watched.incarnation != instance.incarnation:
        return Watched(instance.incarnation, epoch=instance.epoch)
    return watched


def _number(value: int | None) -> float | None:
    return None if value is None else float(value)


def _calm(instance: Instance, config: PoolConfig) -> bool:
    budget = instance.budget or instance.capacity(config)
    return bool(budget and instance.need) and max(instance.need[:-1]) <= _CALM * (budget or 0)
