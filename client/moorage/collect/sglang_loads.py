"""What SGLang's `/v1/loads` says: younger than the gauges of its metrics, and with the time spent on prefills."""

from collections.abc import Mapping
from dataclasses import dataclass

from moorage.collect.exposition import whole


@dataclass(frozen=True, slots=True)
class Load:
    """One data-parallel rank. What is not there is None."""

    running: int | None
    # In the queue; those whose grammar is being compiled are not.
    queued: int | None
    # Since start: prompt tokens computed, and the seconds spent on it.
    prefill_work: tuple[float, float] | None


def read_loads(answer: object) -> dict[int, Load]:
    """Loads by data-parallel rank; empty when there is nothing of the kind in `answer`.

    A rank without any capacity has not written its load yet: all its zeroes mean nothing, and it is left out.
    """
    loads = answer.get("loads") if isinstance(answer, dict) else None
    ranks = [load for load in loads if isinstance(load, dict)] if isinstance(loads, list) else []
    return {
        rank: _read_load(load)
        for load in ranks
        if (rank := _number(load, "dp_rank")) is not None and _number(load, "max_total_num_tokens")
    }


def _read_load(load: Mapping[str, object]) -> Load:
    tokens, busy = _number(load, "total_prefill_uncached_tokens"), _number(load, "total_prefill_busy_us")
    return Load(
        running=_number(load, "num_running_reqs"),
        queued=_number(load, "num_waiting_reqs"),
        prefill_work=None if tokens is None or busy is None else (float(tokens), busy / 1e6),
    )


def _number(load: Mapping[str, object], key: str) -> int | None:
    value = load.get(key)
    return whole(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
