"""What overrules the model: the brake of one instance (policy.md section 3 layer 1, section 4 notes 2, 3, 5).

Signals, sharpest first: the continuation shortfall (a turn that should have hit its previous context and did not), the
engine's own hit counters against a learnt reference (only where no session reports), preemptions, and requests that
wait for capacity. A dip must be confirmed and not be mending already; the brake acts once and then listens for a while,
since what it causes shows late; it is let go slowly, and never beyond the physical budget: past it there is a cliff,
not a slope (section 7).
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Seconds over which hit rates are taken.
WINDOW_S = 8.0
#: Factor of one braking, seconds until the next, and recovery per second.
_BITE, _LATCH_S, _RECOVERY = 0.88, 12.0, 0.008
_FLOOR = 0.4
#: Epochs in a row that must agree before hit rates or waiting requests brake.
_CONFIRM = 2
_CONFIRM_WAITING = 4
#: Fewer expected tokens than this in a window say nothing.
_LEAST_TOKENS = 256
#: Drop of the engine's raw hit rate below its reference that counts as overload.
_RAW_DROP = 0.25
#: How fast the reference h* follows a healthy rate, per epoch.
_LEARN = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """Cumulative counters of one instance at one epoch. None is unknown."""

    at_s: float
    expected: int
    found: int
    queries: int | None
    hits: int | None
    preemptions: int | None
    waiting: int | None


@dataclass(slots=True)
class Brake:
    """State of one instance's brake. ``factor`` multiplies the budget."""

    factor: float = 1.0
    latched_until_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    #: h*: what the continuation hit rate, and the engine's raw rate, are when all is well.
    healthy: float = 0.97
    healthy_raw: float | None = None
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

    continuation: float | None
    raw: float | None
    preempted: int


def read(samples: list[Sample]) -> Reading:
    """Rates over the window; counters that went backwards (a restart) say nothing."""
    first, last = samples[0], samples[-1]

    def rate(whole: int | None, part: int | None) -> float | None:
        if whole is None or part is None or whole < _LEAST_TOKENS or part < 0:
            return None
        return min(1.0, part / whole)

    def rise(a: int | None, b: int | None) -> int | None:
        return None if a is None or b is None or b < a else b - a

    before = samples[-2] if len(samples) > 1 else last
    return Reading(
        rate(rise(first.expected, last.expected), rise(first.found, last.found)),
        rate(rise(first.queries, last.queries), rise(first.hits, last.hits)),
        rise(before.preemptions, last.preemptions) or 0,
    )


def step(brake: Brake, sample: Sample, epoch_s: float, healthy_hit_rate: float) -> Brake:
    """The brake after one more epoch. ``healthy_hit_rate`` is the continuation hit rate below which it acts."""
    # The last sample stays whatever its age: epochs may be longer than the window.
    recent = [s for s in brake.samples[:-1] if s.at_s > sample.at_s - WINDOW_S - 1e-9]
    samples = [*recent, *brake.samples[-1:], sample]
    reading = read(samples)
    rate, raw = reading.continuation, reading.raw
    healthy, healthy_raw = brake.healthy, brake.healthy_raw
    pressure, low, mending, why = 0.0, 0, False, ""
    if rate is not None:
        pressure = max(0.0, healthy - rate)
        mending = brake.last_rate is not None and rate > brake.last_rate + 0.005
        if rate < healthy_hit_rate:
            low, why = (brake.low if mending else brake.low + 1), f"continuation hit rate {rate:.2f}"
        else:
            healthy += _LEARN * (rate - healthy)
    elif raw is not None and sample.expected == 0:
        reference = raw if healthy_raw is None else healthy_raw
        pressure = max(0.0, reference - raw)
        if pressure > _RAW_DROP:
            low, why = brake.low + 1, f"engine hit rate {raw:.2f} against {reference:.2f}"
        else:
            healthy_raw = reference + _LEARN * (raw - reference)
    waiting = brake.waiting + 1 if sample.waiting else 0
    acts = (low >= _CONFIRM and not mending) or reading.preempted > 0 or waiting >= _CONFIRM_WAITING
    if reading.preempted > 0:
        why = f"{reading.preempted} preemptions"
    elif waiting >= _CONFIRM_WAITING:
        why = f"{sample.waiting} requests wait for capacity"
    factor, latched = brake.factor, brake.latched_until_s
    if sample.at_s >= latched:
        if acts:
            factor, latched, low = max(_FLOOR, factor * _BITE), sample.at_s + _LATCH_S, 0
        else:
            factor, why = min(1.0, factor + _RECOVERY * epoch_s), brake.why if factor < 1.0 else ""
    else:
        why = brake.why
    return Brake(factor, latched, samples, healthy, healthy_raw, low, waiting, rate, pressure, why)


def move_cap(current: int | None, target: int, *, least: int, most: int) -> int:
    """The next session cap: towards ``target`` by at most 20 % (at least 1) per epoch (contract.md, *Cap step*)."""
    bounded = max(least, min(target, most) if most else target)
    if current is None:
        return bounded
    step = max(1, int(current * 0.2))
    return max(current - step, min(current + step, bounded))
