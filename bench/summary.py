"""What a run amounts to: samples per minute, cache hits, mixture, waits."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.player import RunRecord, SessionRecord, TurnRecord


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one window of a run. A rate without anything to divide by is None."""

    start: float
    end: float
    completed: int
    completed_by_class: dict[str, int]
    samples_per_minute: float | None
    requests_per_minute: float | None
    prefill_tokens_per_second: float | None
    """Prompt tokens computed, of the turns that ended; None where an engine does not say what came from its cache."""
    decode_tokens_per_second: float | None
    hit_rate: float | None
    """Share of all prompt tokens that came from the cache."""
    continuation_hit_rate: float | None
    """Share of the previous turn's context, in whole blocks, that a continuation found in the cache."""
    mixture_deviation_points: float | None
    """Total variation between the completed samples' mixture and the target, in percentage points."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """How long sessions waited for admission, in seconds; those still waiting count with their wait so far."""

    sessions: int
    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures: over all of it, and over the steady window (None where there was none)."""

    overall: Figures
    steady: Figures | None
    outcomes: dict[str, int]
    holds: dict[str, Wait]
    sessions_per_engine: dict[str, float]
    """Mean number of sessions over the steady window, or over the run where there was none."""
    held: float
    """Mean number of sessions without a home, likewise."""


def summarise(run: RunRecord, warmup_s: float, block_size: int = 32) -> Summary:
    """Sum up a run. The steady window reaches from `warmup_s` to the start of the last session."""
    overall = figures(run, 0.0, run.end, block_size)
    steady = figures(run, warmup_s, run.last_start, block_size) if run.last_start > warmup_s else None
    window = steady or overall
    seen = [sample for sample in run.occupancy if window.start <= sample.time <= window.end] or run.occupancy
    engines = sorted({engine for sample in seen for engine in sample.by_engine})
    return Summary(
        overall=overall,
        steady=steady,
        outcomes=dict(Counter(session.outcome for session in run.sessions)),
        holds=holds(run),
        sessions_per_engine={name: _mean([sample.by_engine.get(name, 0) for sample in seen]) for name in engines},
        held=_mean([sample.held for sample in seen]),
    )


def figures(run: RunRecord, start: float, end: float, block_size: int) -> Figures:
    """Return the figures of the samples completed, and the turns ended, between two times."""
    completed = [s for s in run.sessions if s.outcome == "completed" and s.end is not None and start <= s.end <= end]
    by_class = Counter(session.workload_class for session in completed)
    turns = [t for session in run.sessions for t in session.turns if start <= t.end <= end]
    known = [(t.cached_tokens, t.prompt_tokens) for t in turns if t.cached_tokens is not None]
    ttfts = [turn.ttft_s for turn in turns]
    seconds = end - start
    return Figures(
        start=start,
        end=end,
        completed=len(completed),
        completed_by_class=dict(by_class),
        samples_per_minute=60.0 * len(completed) / seconds if seconds > 0 else None,
        requests_per_minute=60.0 * len(turns) / seconds if seconds > 0 else None,
        prefill_tokens_per_second=(
            sum(prompt - cached for cached, prompt in known) / seconds
            if seconds > 0 and len(known) == len(turns)
            else None
        ),
        decode_tokens_per_second=sum(t.output_tokens for t in turns) / seconds if seconds > 0 else None,
        hit_rate=_ratio(known),
        continuation_hit_rate=_ratio(_continuations(run.sessions, start, end, block_size)),
        mixture_deviation_points=mixture_deviation(by_class, run.target) if completed else None,
        ttft_p50_s=percentile(ttfts, 0.5) if ttfts else None,
        ttft_p95_s=percentile(ttfts, 0.95) if ttfts else None,
    )


def mixture_deviation(counts: Mapping[str, int], target: Mapping[str, float]) -> float:
    """Return the total variation between counted samples and a target, in percentage points."""
    total = sum(counts.values())
    names = set(counts) | set(target)
    return 50.0 * sum(abs(counts.get(name, 0) / total - target.get(name, 0.0)) for name in names)


def holds(run: RunRecord, since: float = 0.0) -> dict[str, Wait]:
    """Return the waits for admission by class, of the sessions whose wait was not over before `since`."""
    waits: dict[str, list[float]] = {}
    for session in run.sessions:
        until = session.admitted if session.admitted is not None else (session.end or run.end)
        if until >= since:
            waits.setdefault(session.workload_class, []).append(until - session.start)
    return {
        name: Wait(len(values), percentile(values, 0.5), percentile(values, 0.95), max(values))
        for name, values in sorted(waits.items())
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _continuations(
    sessions: Iterable[SessionRecord], start: float, end: float, block_size: int
) -> list[tuple[int, int]]:
    """Return (tokens found, tokens that should have been found) for the turns after the first."""
    pairs: list[tuple[int, int]] = []
    for session in sessions:
        for before, turn in pairwise(session.turns):
            if turn.cached_tokens is not None and start <= turn.end <= end:
                expected = _reusable(before, block_size)
                pairs.append((min(turn.cached_tokens, expected), expected))
    return pairs


def _reusable(turn: TurnRecord, block_size: int) -> int:
    # An engine never computes the KV of the last token it generates.
    return (turn.prompt_tokens + turn.output_tokens - 1) // block_size * block_size


def _ratio(pairs: Iterable[tuple[int, int]]) -> float | None:
    found, whole = 0, 0
    for part, total in pairs:
        found += part
        whole += total
    return found / whole if whole else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
