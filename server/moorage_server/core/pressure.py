"""What overrules the model: the brake of one instance (policy.md section 3 layer 1, section 4 notes 2, 3, 5, 8).

Signals, sharpest first: the continuation shortfall (turns that should have hit their previous context and did not, by
class against what the class hits when all is well), the engine's own hit counters against a learnt reference (only
where no session reports), preemptions, and requests that wait for capacity. Each may be missing. A dip must be
confirmed and not be mending already; the brake acts once and then listens for a while, since what it causes shows late;
it is let go slowly, and never beyond the physical budget: past it there is a cliff, not a slope (section 7). When
weights or cache changed, references are learnt anew and nothing brakes for a while.

The forecast's margin is what keeps an instance out of trouble; a brake that bites hard at each small miss wastes more
than the misses cost. It bites gently, and in full only where hits collapse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

#: Seconds over which hit rates are taken.
WINDOW_S = 8.0
#: Seconds without a reported turn after which the engine's own counters are listened to.
DEAF_S = 30.0
#: Seconds after an epoch of weights or cache in which nothing brakes: all sessions prefill again, at once.
SETTLE_S = 8.0
#: Share taken by one braking, seconds until the next, and recovery per second.
_BITE, _LATCH_S, _RECOVERY = 0.12, 12.0, 0.008
_FLOOR = 0.4
#: Part of it that is always taken; all of it this far below the healthy rate: past the knee misses cause misses.
_GENTLE, _COLLAPSE = 0.2, 0.3
#: Epochs in a row that must agree before hit rates or waiting requests brake.
_CONFIRM = 2
_CONFIRM_WAITING = 4
#: Fewer expected tokens than this in a window say nothing.
_LEAST_TOKENS = 256
#: h* of a class that was not heard yet, and how far below it is still well.
HEALTHY, _TOLERANCE = 0.97, 0.07
#: Drop of the engine's raw hit rate below its reference that counts as overload.
_RAW_DROP = 0.25
#: How fast the references h* follow a healthy rate, per epoch.
_LEARN = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """Cumulative counters of one instance at one epoch. None is unknown."""

    at_s: float
    #: Tokens expected and found by the turns of each class.
    turns: Mapping[str, tuple[int, int]]
    #: The engine's own count of tokens looked up and found.
    queries: int | None
    hits: int | None
    preemptions: int | None
    waiting: int | None


@dataclass(slots=True)
class Brake:
    """State of one instance's brake. ``factor`` multiplies the budget."""

    factor: float = 1.0
    latched_until_s: float = 0.0
    quiet_until_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    #: h*: what the continuation hit rate of each class, and the engine's raw rate, are when all is well.
    healthy: dict[str, float] = field(default_factory=dict)
    healthy_raw: float | None = None
    #: When a turn was last reported.
    heard_s: float | None = None
    low: int = 0
    waiting: int = 0
    last_rate: float | None = None
    #: G_w, for display.
    pressure: float = 0.0
    #: Why it last acted.
    why: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one window says. None is unknown."""

    turns: Mapping[str, tuple[int, int]]
    continuation: float | None
    raw: float | None
    preempted: int


def _rise(before: int | None, after: int | None) -> int | None:
    """Difference of a counter; one that went backwards (a restart) says nothing."""
    return None if before is None or after is None or after < before else after - before


def _rate(whole: int | None, part: int | None) -> float | None:
    if whole is None or part is None or whole < _LEAST_TOKENS:
        return None
    return min(1.0, part / whole)


def read(samples: list[Sample]) -> Reading:
    """Rates over the window."""
    first, last = samples[0], samples[-1]
    turns = {}
    for name, (expected, found) in last.turns.items():
        before = first.turns.get(name, (0, 0))
        whole, part = _rise(before[0], expected), _rise(before[1], found)
        if whole and part is not None:
            turns[name] = (whole, part)
    earlier = samples[-2] if len(samples) > 1 else last
    return Reading(
        turns,
        _rate(sum(whole for whole, _ in turns.values()), sum(part for _, part in turns.values())),
        _rate(_rise(first.queries, last.queries), _rise(first.hits, last.hits)),
        _rise(earlier.preemptions, last.preemptions) or 0,
    )


def deaf(brake: Brake) -> bool:
    """Whether no session has reported a turn for so long that the engine's own counters are listened to."""
    return brake.heard_s is None or brake.samples[-1].at_s - brake.heard_s > DEAF_S


def settle(brake: Brake, sample: Sample) -> Brake:
    """The brake after weights or cache changed: what was learnt of hits is void, what it holds back stays."""
    return Brake(
        brake.factor, brake.latched_until_s, sample.at_s + SETTLE_S, [sample], heard_s=brake.heard_s, why=brake.why
    )


def step(brake: Brake, sample: Sample, epoch_s: float, healthy_hit_rate: float, *, calm: bool = False) -> Brake:
    """The brake after one more epoch.

    ``healthy_hit_rate`` is the continuation hit rate below which it acts. In a ``calm`` epoch (far from full) a rate
    that is low all the same is not overload but the class's nature, and is learnt.
    """
    # The last sample stays whatever its age: epochs may be longer than the window.
    recent = [s for s in brake.samples[:-1] if s.at_s > sample.at_s - WINDOW_S - 1e-9]
    after = replace(brake, samples=[*recent, *brake.samples[-1:], sample], pressure=0.0, low=0, last_rate=None)
    reading = read(after.samples)
    if reading.turns:
        after.heard_s = sample.at_s
    why = ""
    part = _GENTLE
    if reading.continuation is not None:
        part = min(1.0, max(part, (healthy_hit_rate - reading.continuation) / _COLLAPSE))
        why = _listen_to_turns(after, brake, reading, healthy_hit_rate, calm)
    elif reading.raw is not None and deaf(after):
        why = _listen_to_engine(after, brake, reading.raw)
        part = 1.0 if why else part
    after.waiting = brake.waiting + 1 if sample.waiting else 0
    if reading.preempted > 0:
        why = f"{reading.preempted} preemptions"
    elif after.waiting >= _CONFIRM_WAITING:
        why = f"{sample.waiting} requests wait for capacity"
    mending = reading.continuation is not None and _mends(brake, reading.continuation)
    acts = (after.low >= _CONFIRM and not mending) or reading.preempted > 0 or after.waiting >= _CONFIRM_WAITING
    return _act(after, sample.at_s, epoch_s, why if acts and sample.at_s >= brake.quiet_until_s else "", part)


def _mends(before: Brake, rate: float) -> bool:
    return before.last_rate is not None and rate > before.last_rate + 0.005


def _listen_to_turns(after: Brake, before: Brake, reading: Reading, healthy_hit_rate: float, calm: bool) -> str:
    """Takes the continuation shortfall in; returns what is wrong, if anything."""
    assert reading.continuation is not None
    healthy = {name: before.healthy.get(name, HEALTHY) for name in reading.turns}
    whole = sum(expected for expected, _ in reading.turns.values())
    short = sum(expected * healthy[name] - found for name, (expected, found) in reading.turns.items())
    least = sum(expected * min(healthy_hit_rate, healthy[n] - _TOLERANCE) for n, (expected, _) in reading.turns.items())
    after.pressure, after.last_rate = max(0.0, short / whole), reading.continuation
    low = sum(found for _, found in reading.turns.values()) < least
    if low:
        after.low = before.low if _mends(before, reading.continuation) else before.low + 1
    for name, (expected, found) in reading.turns.items():
        rate = min(1.0, found / expected)
        if calm or rate >= healthy[name] - _TOLERANCE:
            healthy[name] += _LEARN * (rate - healthy[name])
    after.healthy = {**before.healthy, **healthy}
    return f"continuation hit rate {reading.continuation:.2f}" if low else ""


def _listen_to_engine(after: Brake, before: Brake, raw: float) -> str:
    """Takes the engine's own hit rate in; returns what is wrong, if anything."""
    reference = raw if before.healthy_raw is None else before.healthy_raw
    after.pressure = max(0.0, reference - raw)
    if after.pressure > _RAW_DROP:
        after.low = before.low + 1
        return f"engine hit rate {raw:.2f} against {reference:.2f}"
    after.healthy_raw = reference + _LEARN * (raw - reference)
    return ""


def _act(brake: Brake, at_s: float, epoch_s: float, why: str, part: float) -> Brake:
    """Bites for ``why``, by ``part`` of a full bite, or lets go a little; neither while it listens to its last bite."""
    if at_s < brake.latched_until_s:
        return brake
    if why:
        factor = max(_FLOOR, brake.factor * (1.0 - _BITE * part))
        return replace(brake, factor=factor, latched_until_s=at_s + _LATCH_S, low=0, why=why)
    return replace(
        brake, factor=min(1.0, brake.factor + _RECOVERY * epoch_s), why=brake.why if brake.factor < 1.0 else ""
    )


def move_cap(current: int | None, target: int, *, least: int, most: int) -> int:
    """The next session cap: towards ``target`` by at most 20 % (at least 1) per epoch (contract.md, *Cap step*)."""
    bounded = max(least, min(target, most) if most else target)
    if current is None:
        return bounded
    step = max(1, int(current * 0.2))
    return max(current - step, min(current + step, bounded))
