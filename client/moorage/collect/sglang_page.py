"""One page of SGLang's metrics, read for each of its data-parallel ranks.

Names and meanings are those of SGLang 0.5.23, as documented. Whatever the page does not say is None, never zero; with
one exception that follows from how the page is made: a labelled counter has no series until it counts for the first
time, so a counter of a family that is otherwise there stands at zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moorage.collect.exposition import Labels, Page, whole
from moorage.collect.reader import EngineUnreadable

RUNNING = "sglang:num_running_reqs"
KV_USED = "sglang:kv_used_tokens"
CAPACITY = "sglang:max_total_num_tokens"
EFFECTIVE = "sglang:prefill_effective_tokens_total"
REALTIME = "sglang:realtime_tokens_total"
RETRACTED = "sglang:num_retracted_requests_total"
HTTP_RESPONSES = "sglang:http_responses_total"
WEIGHT_LOAD = "sglang:weight_load_duration_seconds"
STARTUP = "sglang:startup_time_seconds"

HIT_MODES = frozenset({"device_hit", "host_hit", "storage_hit"})
EFFECTIVE_MODES = HIT_MODES | {"input"}
REALTIME_MODES = frozenset({"prefill_compute", "prefill_cache", "decode"})

# Which of the scheduler processes behind one data-parallel rank a series comes from.
PROCESS_LABELS = ("pp_rank", "tp_rank", "moe_ep_rank")


@dataclass(frozen=True, slots=True)
class Rank:
    """One data-parallel rank. Blocks and requests are gauges; `*_total` only grow while the engine lives."""

    block_size: int | None
    total_blocks: int | None
    used_blocks: int | None
    cached_blocks: int | None
    running: int | None
    queued: int | None
    # Waiting until their grammar is compiled, not for capacity.
    in_grammar: int | None
    prefix_query_tokens_total: int | None
    prefix_hit_tokens_total: int | None
    prefill_tokens_total: int | None
    generation_tokens_total: int | None
    preemptions_total: int | None
    max_context_tokens: int | None
    # Seconds that the last weight update of each source took: another number means another update.
    weight_loads: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PageReading:
    """What a page says, without any history."""

    # Seconds that loading the weights took at start: a number that no other start of the engine repeats.
    startup: float | None
    # Flushes of the prefix cache since start that were not refused. Shared by all ranks.
    flushes: int
    # Times since start that the version of the weights was set by itself.
    version_changes: int
    ranks: Mapping[int, Rank]
    # For people: what is missing, or does not fit together.
    remarks: frozenset[str]


def read_page(page: Page) -> PageReading:
    """Reads every data-parallel rank on the page. Raises EngineUnreadable when there is none, or one has no number."""
    schedulers = _schedulers(page)
    if not schedulers:
        raise EngineUnreadable("no sglang: series of a scheduler (other software, or no --enable-metrics)")
    remarks: set[str] = set()
    ranks = {number: _read_rank(_Series(page, schedulers[number], remarks)) for number in sorted(schedulers)}
    startup = _startup(page)
    if startup is None:
        remarks.add(f"missing {STARTUP}: restarts show only as counters that fall")
    return PageReading(
        startup, _successes(page, "/flush_cache"), _successes(page, "/update_weight_version"), ranks, frozenset(remarks)
    )


def _schedulers(page: Page) -> dict[int, Labels]:
    """For each data-parallel rank the labels of the one process that speaks for it: the first.

    With tensor or pipeline parallelism several processes report the same requests and the same cache, some of their
    series even when only one is meant to: summing them would count everything several times. Without data parallelism
    there is no `dp_rank`, and the rank is 0.
    """
    found: dict[int, Labels] = {}
    for name in (RUNNING, KV_USED, CAPACITY):
        for labels, _ in page.samples(name):
            number = labels.get("dp_rank", "0")
            if not number.isdecimal():
                raise EngineUnreadable(f"a dp_rank is not a number: {number!r}")
            rank = int(number)
            found[rank] = min(found.get(rank, labels), labels, key=_process)
    return found


def _process(labels: Labels) -> list[tuple[int, str]]:
    """Sorts processes by their ranks, as numbers."""
    return [(len(labels.get(name, "")), labels.get(name, "")) for name in PROCESS_LABELS]


@dataclass(frozen=True, slots=True)
class _Series:
    """The series of one scheduler; remarks on those that are missing or ambiguous."""

    page: Page
    scheduler: Labels
    remarks: set[str]

    def mine(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """All of this scheduler, without the breakdown by priority (the total is the one without a priority)."""
        same = ("dp_rank", *PROCESS_LABELS)
        return [
            (found, value)
            for found, value in self.page.samples(name, **labels)
            if not found.get("priority") and all(found.get(key) == self.scheduler.get(key) for key in same)
        ]

    def whole(self, name: str, **labels: str) -> int | None:
        """The one value; None where there is none, or several that differ. The same value under several `pid`s, which
        SGLang leaves on some gauges, is one value.
        """
        values = {value for _, value in self.mine(name, **labels)}
        value = whole(values.pop()) if len(values) == 1 else None
        if value is None:
            what = name + "".join(f"{{{key}={text}}}" for key, text in labels.items())
            self.remarks.add(f"several values of {what}" if values else f"missing {what}")
        return value

    def by_mode(self, name: str, known: frozenset[str]) -> dict[str, int | None]:
        """A counter for each of the `known` modes: empty where the whole family is missing. A mode that has not
        counted yet is zero, unless there is a mode that is not known: it may be a new name for it.
        """
        found = {labels.get("mode", "") for labels, _ in self.mine(name)}
        if not found:
            return {}
        if strange := sorted(found - known):
            self.remarks.add(f"unknown modes of {name}: {', '.join(strange)}")
        absent = None if strange else 0
        return {mode: self.whole(name, mode=mode) if mode in found else absent for mode in known}


def _read_rank(series: _Series) -> Rank:
    block_size, total_blocks = _capacity(series)
    running, queued = series.whole(RUNNING), series.whole("sglang:num_queue_reqs")
    effective = series.by_mode(EFFECTIVE, EFFECTIVE_MODES)
    realtime = series.by_mode(REALTIME, REALTIME_MODES)
    # Before its first request an engine has neither, and nothing is wrong with that.
    if effective or realtime or running:
        families = ((EFFECTIVE, effective), (REALTIME, realtime))
        series.remarks.update(f"missing {name}" for name, family in families if not family)
    return Rank(
        block_size=block_size,
        total_blocks=total_blocks,
        used_blocks=_used_blocks(series, block_size),
        cached_blocks=_blocks(series.whole("sglang:kv_evictable_tokens"), block_size),
        running=running,
        queued=queued,
        in_grammar=series.whole("sglang:num_grammar_queue_reqs"),
        prefix_query_tokens_total=_sum(effective, EFFECTIVE_MODES),
        prefix_hit_tokens_total=_sum(effective, HIT_MODES),
        prefill_tokens_total=realtime.get("prefill_compute"),
        generation_tokens_total=realtime.get("decode"),
        preemptions_total=_retractions(series),
        max_context_tokens=series.whole("sglang:context_len"),
        weight_loads=tuple(sorted((labels.get("source", ""), value) for labels, value in series.mine(WEIGHT_LOAD))),
    )


def _capacity(series: _Series) -> tuple[int | None, int | None]:
    """Tokens per page, and pages."""
    page_size = series.whole("sglang:page_size") or None
    pages = series.whole("sglang:num_pages") or None
    by_tokens = _blocks(series.whole(CAPACITY), page_size)
    if pages and by_tokens and pages != by_tokens:
        series.remarks.add(
            f"disagreement: {CAPACITY} means {by_tokens} pages of {page_size}, sglang:num_pages says {pages}; "
            "the latter is used"
        )
    return page_size, pages or by_tokens


def _used_blocks(series: _Series, block_size: int | None) -> int | None:
    """Pages that nobody else can have: in use by running requests, or held by the engine's own streaming sessions
    (which are in none of the other gauges, and have a series only where that is switched on).
    """
    used = series.whole(KV_USED)
    if used is None or not block_size:
        return None
    held = series.mine("sglang:streaming_session_held_tokens")
    tokens = used + ((series.whole("sglang:streaming_session_held_tokens") or 0) if held else 0)
    return -(-tokens // block_size)


def _blocks(tokens: int | None, block_size: int | None) -> int | None:
    return tokens // block_size if tokens is not None and block_size else None


def _sum(family: Mapping[str, int | None], modes: frozenset[str]) -> int | None:
    """None where the family is missing, or one of the modes is unknown."""
    values = [family.get(mode) for mode in modes]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(modes) else None


def _retractions(series: _Series) -> int | None:
    """The counter has no series until the first retraction. That this engine has it at all is seen by the gauge of the
    last report, whose value is of no use.
    """
    if not series.mine(RETRACTED) and series.mine("sglang:num_retracted_reqs"):
        return 0
    return series.whole(RETRACTED)


def _startup(page: Page) -> float | None:
    values = {value for _, value in page.samples(STARTUP, phase="load_weight") if value > 0}
    return values.pop() if len(values) == 1 else None


def _successes(page: Page, endpoint: str) -> int:
    """Calls that were answered with 200, whatever the method. A flush that is refused answers 400."""
    return int(sum(value for _, value in page.samples(HTTP_RESPONSES, endpoint=endpoint, status_code="200")))
