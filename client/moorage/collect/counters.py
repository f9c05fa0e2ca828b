"""Counters that fall only when an engine starts anew: the sign of a restart that no start time tells."""

from collections.abc import Mapping

#: Fields of a rank that count since the engine's start.
COUNTERS = (
    "prefix_query_tokens_total",
    "prefix_hit_tokens_total",
    "prefill_tokens_total",
    "generation_tokens_total",
    "preemptions_total",
)


def any_fell(before: Mapping[int, object], now: Mapping[int, object]) -> bool:
    """Whether a counter of a rank that was there before is lower now. One that is unknown (None) says nothing."""
    return any(
        _less(getattr(rank, name), getattr(before[number], name))
        for number, rank in now.items()
        if number in before
        for name in COUNTERS
    )


def _less(now: int | None, before: int | None) -> bool:
    return now is not None and before is not None and now < before
