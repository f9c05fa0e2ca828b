"""One page of vLLM's metrics, read for each of its engines (data-parallel ranks).

Names and meanings are those of vLLM 0.32 and 0.33. Whatever the page does not say is None, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moorage.collect.exposition import Page, whole
from moorage.collect.reader import EngineUnreadable

RUNNING = "vllm:num_requests_running"
USAGE = "vllm:kv_cache_usage_perc"

# `{"success":true}`: what a prefix-cache reset answers when it worked. A refused one is a byte longer.
RESET_DONE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Rank:
    """One engine of the page. Blocks and requests are gauges; `*_total` and `prefill_work` only grow while it lives."""

    block_size: int | None
    total_blocks: int | None
    used_blocks: int | None
    running: int | None
    waiting: int | None
    waiting_capacity: int | None
    prefix_query_tokens_total: int | None
    prefix_hit_tokens_total: int | None
    prefill_tokens_total: int | None
    generation_tokens_total: int | None
    preemptions_total: int | None
    # Of finished requests: tokens prefilled, and the seconds from each one's first step to its first token.
    prefill_work: tuple[float, float] | None
    awake: bool | None


@dataclass(frozen=True, slots=True)
class PageReading:
    """What a page says, without any history."""

    # Unix time at which the engine's process started.
    started: float | None
    # Operations since start that emptied the prefix cache, or may have. Shared by all ranks.
    clears: int
    # Grows whenever the weights, or their version, may have changed.
    weight_changes: int
    ranks: Mapping[int, Rank]
    # For people: what is missing, or does not fit together.
    remarks: frozenset[str]


def read_page(page: Page) -> PageReading:
    """Reads every engine on the page. Raises EngineUnreadable when there is none, or one is not numbered."""
    names = page.label_values(RUNNING, "engine") | page.label_values(USAGE, "engine")
    if not names:
        raise EngineUnreadable("no vllm: series with an engine label (other software, or --disable-log-stats)")
    if not all(name.isdecimal() for name in names):
        raise EngineUnreadable(f"engine labels are not ranks: {sorted(names)}")
    remarks: set[str] = set()
    ranks = {int(name): _read_rank(_Series(page, name, remarks), len(names)) for name in sorted(names, key=int)}
    started = page.value("process_start_time_seconds")
    if started is None:
        remarks.add("missing process_start_time_seconds: restarts show only as counters that fall")
    return PageReading(started, _clears(page), _weight_changes(page), ranks, frozenset(remarks))


@dataclass(frozen=True, slots=True)
class _Series:
    """The series of one engine; remarks on those that are missing."""

    page: Page
    engine: str
    remarks: set[str]

    def get(self, name: str, **labels: str) -> float | None:
        value = self.page.value(name, engine=self.engine, **labels)
        if value is None:
            self.remarks.add(f"missing {name}" + "".join(f"{{{key}={text}}}" for key, text in labels.items()))
        return value

    def whole(self, name: str, **labels: str) -> int | None:
        return whole(self.get(name, **labels))


def _read_rank(series: _Series, n_ranks: int) -> Rank:
    block_size, total_blocks = _capacity(series, n_ranks)
    usage = series.get(USAGE)
    awake = series.get("vllm:engine_sleep_state", sleep_state="awake")
    return Rank(
        block_size=block_size,
        total_blocks=total_blocks,
        used_blocks=whole(usage * total_blocks) if usage is not None and total_blocks is not None else None,
        running=series.whole(RUNNING),
        waiting=series.whole("vllm:num_requests_waiting"),
        waiting_capacity=series.whole("vllm:num_requests_waiting_by_reason", reason="capacity"),
        prefix_query_tokens_total=series.whole("vllm:prefix_cache_queries_total"),
        prefix_hit_tokens_total=_hits(series),
        prefill_tokens_total=series.whole("vllm:prompt_tokens_by_source_total", source="local_compute"),
        generation_tokens_total=series.whole("vllm:generation_tokens_total"),
        preemptions_total=series.whole("vllm:num_preemptions_total"),
        prefill_work=_prefill_work(series),
        awake=None if awake is None else awake > 0,
    )


def _hits(series: _Series) -> int | None:
    """Tokens found on the device, plus those that a KV connector supplied: neither had to be computed.

    The connector is only asked for what the device does not have, so the queries of the device count everything.
    """
    local = series.whole("vllm:prefix_cache_hits_total")
    external = series.page.value("vllm:external_prefix_cache_hits_total", engine=series.engine)
    return None if local is None else local + (whole(external) or 0)


def _prefill_work(series: _Series) -> tuple[float, float] | None:
    tokens = series.get("vllm:request_prefill_kv_computed_tokens_sum")
    seconds = series.get("vllm:request_prefill_time_seconds_sum")
    return None if tokens is None or seconds is None else (tokens, seconds)


def _capacity(series: _Series, n_ranks: int) -> tuple[int | None, int | None]:
    """Tokens per block, and usable blocks, of one engine.

    `num_gpu_blocks` is the sum over all engines of a data-parallel deployment, printed under each of them, whether or
    not they are all on this page; it may ignore an override; and times the block size it is wrong for hybrid models.
    The token capacity is per engine and right in all these cases, so it goes first.
    """
    config = series.page.labels("vllm:cache_config_info", engine=series.engine)
    if config is None:
        series.remarks.add("missing vllm:cache_config_info")
        return None, None
    block_size = _parsewhole(config, "effective_attention_block_size") or _parsewhole(config, "block_size")
    pool = _parsewhole(config, "num_gpu_blocks")
    by_pool = _parsewhole(config, "num_gpu_blocks_override") or (pool // n_ranks if pool else None)
    blocks = _blocks_of_tokens(config, block_size) or by_pool
    if by_pool is not None and blocks != by_pool:
        series.remarks.add(
            f"disagreement in vllm:cache_config_info: kv_cache_size_tokens means {blocks} blocks of {block_size}, "
            f"num_gpu_blocks {by_pool} per engine; the former is used"
        )
    for key, value in (("block_size", block_size), ("kv_cache_size_tokens and num_gpu_blocks", blocks)):
        if not value:
            series.remarks.add(f"missing in vllm:cache_config_info: {key}")
    # One block is the null block: never free, never used, and not in the usage gauge.
    return block_size, blocks - 1 if blocks else None


def _blocks_of_tokens(config: Mapping[str, str], block_size: int | None) -> int | None:
    """Blocks behind `kv_cache_size_tokens`, the null block included.

    The engine prints int(concurrency x max_model_len), where concurrency = blocks / ceil(max_model_len / block_size).
    Undoing that is exact also where max_model_len is not a whole number of blocks.
    """
    tokens = _parsewhole(config, "kv_cache_size_tokens")
    if not tokens or not block_size:
        return None
    try:
        concurrency = float(config.get("kv_cache_max_concurrency", ""))
    except ValueError:
        return tokens // block_size
    if not concurrency > 0:
        return tokens // block_size
    blocks_per_request = -(-round(tokens / concurrency) // block_size)
    return round(concurrency * blocks_per_request)


def _clears(page: Page) -> int:
    """Operations since start after which the prefix cache is empty, or may be.

    What clears only sometimes counts too, because a cache taken for cold costs less than one taken for warm: a pause
    whose caller chose to keep the cache, a sleep of level 0 and a release of the KV memory that failed look the same
    here as those that clear. Weight updates do not clear.
    """
    slept = sum(
        page.value("vllm:sleep_mode_operation_duration_seconds_count", operation=operation) or 0
        for operation in ("sleep", "release_kv_cache_memory")
    )
    return int(slept + _calls(page, "/pause") + _resets(page))


def _resets(page: Page) -> float:
    """Prefix-cache resets that succeeded. A refused one also answers 200, but with `{"success":false}`, a byte longer:
    n answers of together b bytes hold b - 16 n refusals. Where that makes no sense every call counts.
    """
    calls = page.value("http_response_size_bytes_count", handler="/reset_prefix_cache") or 0
    size = page.value("http_response_size_bytes_sum", handler="/reset_prefix_cache") or 0
    refused = size - RESET_DONE_BYTES * calls
    return calls - refused if 0 <= refused <= calls else calls


def _weight_changes(page: Page) -> int:
    finished = page.value("vllm:rl_weight_update_operation_duration_seconds_count", operation="finish") or 0
    return int(finished + _calls(page, "/update_weight_version") + _calls(page, "/collective_rpc"))


def _calls(page: Page, handler: str) -> float:
    return page.value("http_requests_total", handler=handler, method="POST", status="2xx") or 0


def _parsewhole(config: Mapping[str, str], key: str) -> int | None:
    """The labels hold Python's str() of each setting: a number, or `None`."""
    text = config.get(key, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
