"""Two scrapes of an SGLang server become snapshots: restarts, cache epochs and rates are told here, without any I/O."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from moorage.collect.counters import any_fell
from moorage.collect.sglang_loads import Load
from moorage.collect.sglang_page import PageReading, Rank
from moorage.collect.speed import PrefillSpeed
from moorage.collect.targets import Target
from moorage.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Boot:
    """One life of the engine. `startup` is how long its start took, once known."""

    incarnation: str
    startup: float | None


@dataclass(frozen=True, slots=True)
class Scrape:
    """A page, and the loads read with it, in the light of those before."""

    page: PageReading
    # By rank; those that could not be read are not there.
    loads: Mapping[int, Load]
    boot: Boot
    # Unix time in ns at which the page arrived, and a number that grows even if that clock steps back.
    observed_ns: int
    sequence: int
    # The last known `prefill_work` of each rank, and what follows from it. Work counts from one prefill step to the
    # next, so the speed is that of a busy engine, without the waiting in its queue.
    work: Mapping[int, tuple[float, float]]
    prefill: Mapping[int, PrefillSpeed]


def advance(previous: Scrape | None, page: PageReading, loads: Mapping[int, Load], observed_ns: int) -> Scrape:
    """Reads `page`, that arrived at `observed_ns`, and `loads` after `previous` (None for the first ones)."""
    boot = _boot(previous, page, loads, observed_ns)
    sequence = observed_ns if previous is None else max(observed_ns, previous.sequence + 1)
    same_life = previous is not None and previous.boot.incarnation == boot.incarnation
    work = dict(previous.work) if previous is not None and same_life else {}
    prefill = dict(previous.prefill) if previous is not None and same_life else {}
    for number, load in loads.items():
        if load.prefill_work is not None:
            before = work.get(number, (0.0, 0.0))
            prefill[number] = prefill.get(number, PrefillSpeed()).since(before, load.prefill_work)
            work[number] = load.prefill_work
    return Scrape(page, loads, boot, observed_ns, sequence, work, prefill)


def to_snapshots(
    scrape: Scrape, target: Target, weight_version: str | None
) -> tuple[scheduler_pb2.InstanceSnapshot, ...]:
    """One snapshot per rank. What is unknown is absent; whether the engine is paused or asleep always is."""
    return tuple(_snapshot(scrape, target, weight_version, number) for number in scrape.page.ranks)


def _snapshot(
    scrape: Scrape, target: Target, weight_version: str | None, number: int
) -> scheduler_pb2.InstanceSnapshot:
    rank = scrape.page.ranks[number]
    running, queued = _requests(rank, scrape.loads.get(number))
    observed_time = Timestamp()
    observed_time.FromNanoseconds(scrape.observed_ns)
    return scheduler_pb2.InstanceSnapshot(
        instance_id=target.instance_id,
        endpoint=target.endpoint,
        dp_rank=number,
        incarnation=scrape.boot.incarnation,
        sequence=scrape.sequence,
        observed_time=observed_time,
        state=scheduler_pb2.INSTANCE_STATE_UNSPECIFIED,
        block_size=rank.block_size,
        total_blocks=rank.total_blocks,
        used_blocks=rank.used_blocks,
        cached_blocks=rank.cached_blocks,
        running=running,
        waiting=None if queued is None or rank.in_grammar is None else queued + rank.in_grammar,
        waiting_capacity=queued,
        prefix_query_tokens_total=rank.prefix_query_tokens_total,
        prefix_hit_tokens_total=rank.prefix_hit_tokens_total,
        prefill_tokens_total=rank.prefill_tokens_total,
        generation_tokens_total=rank.generation_tokens_total,
        preemptions_total=rank.preemptions_total,
        prefill_tokens_per_second=scrape.prefill.get(number, PrefillSpeed()).tokens_per_second,
        weight_version=weight_version or "",
        cache_epoch=_cache_epoch(scrape, rank),
        max_context_tokens=rank.max_context_tokens,
    )


def _requests(rank: Rank, load: Load | None) -> tuple[int | None, int | None]:
    """Requests running and queued. The gauges may be 40 decode steps old, or 30 s when idle: the load goes first."""
    if load is None:
        return rank.running, rank.queued
    running = rank.running if load.running is None else load.running
    return running, rank.queued if load.queued is None else load.queued


def _cache_epoch(scrape: Scrape, rank: Rank) -> int:
    """A number that is another one after each event that cleared the prefix cache, or may have. It does not grow, but
    is the same for every collector that looks, whenever that one was started.

    Weight updates clear the cache unless told not to, which can not be seen: a cache taken for cold costs less than
    one taken for warm.
    """
    life = (scrape.boot.incarnation, scrape.page.flushes, rank.weight_loads)
    return int.from_bytes(hashlib.sha256(repr(life).encode()).digest()[:8]) >> 1


def _boot(previous: Scrape | None, page: PageReading, loads: Mapping[int, Load], observed_ns: int) -> Boot:
    """How long the start took names an incarnation, for every collector alike. Without it, or if counters fall under
    an unchanged one, the moment this collector first saw the new life has to do.
    """
    seen = f"seen-{observed_ns // 1_000_000}"
    if previous is None:
        return Boot(seen if page.startup is None else f"startup-{page.startup}", page.startup)
    known = previous.boot.startup
    if known is not None and page.startup is not None and known != page.startup:
        return Boot(f"startup-{page.startup}", page.startup)
    startup = known if page.startup is None else page.startup
    if _any_counter_fell(previous, page, loads) or (startup is None and _all_counters_vanished(previous.page, page)):
        return Boot(seen if startup is None else f"startup-{startup}-{seen}", startup)
    return Boot(previous.boot.incarnation, startup)


def _any_counter_fell(previous: Scrape, page: PageReading, loads: Mapping[int, Load]) -> bool:
    fell = any_fell(previous.page.ranks, page.ranks)
    worked = {number: load.prefill_work for number, load in loads.items() if load.prefill_work is not None}
    return fell or any(
        now < before
        for number in worked.keys() & previous.work.keys()
        for now, before in zip(worked[number], previous.work[number], strict=True)
    )


def _all_counters_vanished(before: PageReading, now: PageReading) -> bool:
    """An engine that has just started has not counted anything yet, and then shows no counters at all."""
    return _counted(before) and not _counted(now)


def _counted(page: PageReading) -> bool:
    return any(rank.prefill_tokens_total is not None for rank in page.ranks.values())
