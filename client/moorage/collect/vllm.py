"""Two scrapes of a vLLM server become snapshots: restarts, cache epochs and rates are told here, without any I/O."""

from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from moorage.collect.counters import any_fell
from moorage.collect.speed import PrefillSpeed
from moorage.collect.targets import Target
from moorage.collect.vllm_page import PageReading, Rank
from moorage.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Facts:
    """What the metrics do not say and other endpoints may. Holds for all ranks of the server."""

    paused: bool | None = None
    weight_version: str | None = None
    max_context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Boot:
    """One life of the engine. `epoch` is where its cache epochs begin: they differ from those of other lives."""

    incarnation: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Scrape:
    """A page in the light of the one before it."""

    page: PageReading
    boot: Boot
    # Unix time in ns at which the page arrived, and a number that grows even if that clock steps back.
    observed_ns: int
    sequence: int
    # Times the ranks fell asleep with no sleep operation counted (a call that did not come over HTTP).
    silent_sleeps: int
    # From finished requests, so it shows only when requests finish. A request's prefill time runs from its first step
    # to its first token and includes what shares those steps: the speed is what a prompt sees.
    prefill: dict[int, PrefillSpeed]

    @property
    def cache_epoch(self) -> int:
        """Grows whenever the prefix cache was, or may have been, cleared. The same for every collector that looks,
        unless the engine was put to sleep otherwise than over HTTP, or does not give its start time.
        """
        return self.boot.epoch + self.page.clears + self.silent_sleeps


def advance(previous: Scrape | None, page: PageReading, observed_ns: int) -> Scrape:
    """Reads `page`, that arrived at `observed_ns`, after `previous` (None for the first one)."""
    boot = _boot(previous, page, observed_ns)
    sequence = observed_ns if previous is None else max(observed_ns, previous.sequence + 1)
    if previous is None or previous.boot != boot:
        prefill = {number: PrefillSpeed().since((0.0, 0.0), rank.prefill_work) for number, rank in page.ranks.items()}
        return Scrape(page, boot, observed_ns, sequence, 0, prefill)
    silent_sleeps = previous.silent_sleeps + _fell_asleep_silently(previous.page, page)
    return Scrape(page, boot, observed_ns, sequence, silent_sleeps, _prefill_since(previous, page))


def to_snapshots(scrape: Scrape, target: Target, facts: Facts) -> tuple[scheduler_pb2.InstanceSnapshot, ...]:
    """One snapshot per rank. What is unknown is absent; how many unreferenced blocks are cached always is."""
    return tuple(_snapshot(scrape, target, facts, number, rank) for number, rank in scrape.page.ranks.items())


def _snapshot(scrape: Scrape, target: Target, facts: Facts, number: int, rank: Rank) -> scheduler_pb2.InstanceSnapshot:
    observed_time = Timestamp()
    observed_time.FromNanoseconds(scrape.observed_ns)
    speed = scrape.prefill[number].tokens_per_second
    return scheduler_pb2.InstanceSnapshot(
        instance_id=target.instance_id,
        endpoint=target.endpoint,
        dp_rank=number,
        incarnation=scrape.boot.incarnation,
        sequence=scrape.sequence,
        observed_time=observed_time,
        state=_state(rank, facts),
        block_size=rank.block_size,
        total_blocks=rank.total_blocks,
        used_blocks=rank.used_blocks,
        running=rank.running,
        waiting=rank.waiting,
        waiting_capacity=rank.waiting_capacity,
        prefix_query_tokens_total=rank.prefix_query_tokens_total,
        prefix_hit_tokens_total=rank.prefix_hit_tokens_total,
        prefill_tokens_total=rank.prefill_tokens_total,
        generation_tokens_total=rank.generation_tokens_total,
        preemptions_total=rank.preemptions_total,
        prefill_tokens_per_second=speed,
        weight_version=facts.weight_version or "",
        cache_epoch=scrape.cache_epoch,
        max_context_tokens=facts.max_context_tokens,
    )


def _state(rank: Rank, facts: Facts) -> "scheduler_pb2.InstanceState.ValueType":
    """Asleep goes first: an engine that sleeps also says that it is paused."""
    if rank.awake is False:
        return scheduler_pb2.INSTANCE_STATE_SLEEPING
    if facts.paused:
        return scheduler_pb2.INSTANCE_STATE_PAUSED
    if rank.awake is None:
        return scheduler_pb2.INSTANCE_STATE_UNSPECIFIED
    return scheduler_pb2.INSTANCE_STATE_SERVING


def _boot(previous: Scrape | None, page: PageReading, observed_ns: int) -> Boot:
    """The start time names an incarnation, for every collector alike. Without it, or if counters fall under an
    unchanged one, the moment this collector first saw the new life has to do.
    """
    seen = observed_ns // 1_000_000
    same_start = previous is not None and previous.page.started == page.started
    fell = previous is not None and any_fell(previous.page.ranks, page.ranks)
    if previous is not None and same_start and not fell:
        return previous.boot
    if page.started is None:
        return Boot(f"seen-{seen}", seen)
    if same_start:
        return Boot(f"start-{page.started:.2f}-seen-{seen}", seen)
    return Boot(f"start-{page.started:.2f}", round(page.started * 1000))


def _fell_asleep_silently(before: PageReading, now: PageReading) -> int:
    """1 if a rank that was awake sleeps and no operation that clears was counted meanwhile, else 0."""
    fell_asleep = any(
        rank.awake is False and number in before.ranks and before.ranks[number].awake is True
        for number, rank in now.ranks.items()
    )
    return int(fell_asleep and now.clears == before.clears)


def _prefill_since(previous: Scrape, page: PageReading) -> dict[int, PrefillSpeed]:
    speeds = dict(previous.prefill)
    for number, rank in page.ranks.items():
        known = previous.page.ranks.get(number)
        before = (0.0, 0.0) if known is None else known.prefill_work
        speeds[number] = speeds.get(number, PrefillSpeed()).since(before, rank.prefill_work)
    return speeds
