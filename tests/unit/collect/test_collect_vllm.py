"""The pure part, on recordings of a real engine. Expected values are worked out by hand from the recorded lines."""

import re
from dataclasses import replace

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from moorage.collect.exposition import parse_page
from moorage.collect.reader import EngineUnreadable
from moorage.collect.speed import PrefillSpeed
from moorage.collect.targets import Target
from moorage.collect.vllm import Facts, Scrape, advance, to_snapshots
from moorage.collect.vllm_page import read_page
from moorage.v1 import scheduler_pb2
from moorage.v1.scheduler_pb2 import InstanceSnapshot
from tests.unit.collect.fakes import page_of, recording

TARGET = Target("engine-a", "http://10.0.0.7:8000")
SECOND = 1_000_000_000
START = 1_796_013_700 * SECOND


def follow(*pages: str, facts: Facts | None = None) -> list[InstanceSnapshot]:
    """Snapshots of rank 0 after each of `pages`, scraped one second apart."""
    scrape: Scrape | None = None
    snapshots = []
    for number, page in enumerate(pages):
        scrape = advance(scrape, page_of(page), START + number * SECOND)
        snapshots.append(to_snapshots(scrape, TARGET, facts or Facts())[0])
    return snapshots


def recordings(*numbers: str) -> list[InstanceSnapshot]:
    return follow(*(recording(f"lifecycle_{number}") for number in numbers))


def without(text: str, name: str) -> str:
    return "\n".join(line for line in text.splitlines() if name not in line)


def test_fresh_engine() -> None:
    [snapshot] = recordings("00")
    assert snapshot == InstanceSnapshot(
        instance_id="engine-a",
        endpoint="http://10.0.0.7:8000",
        dp_rank=0,
        incarnation="start-1796013664.68",
        sequence=START,
        observed_time=Timestamp(seconds=1_796_013_700),
        state=scheduler_pb2.INSTANCE_STATE_SERVING,
        block_size=32,
        total_blocks=767,
        used_blocks=0,
        running=0,
        waiting=0,
        waiting_capacity=0,
        prefix_query_tokens_total=3,
        prefix_hit_tokens_total=0,
        prefill_tokens_total=3,
        generation_tokens_total=8,
        preemptions_total=0,
        cache_epoch=1_796_013_664_680,
    )


def test_what_the_engine_does_not_tell_is_absent() -> None:
    [snapshot] = recordings("00")
    for name in ("cached_blocks", "prefill_tokens_per_second", "max_context_tokens"):
        assert not snapshot.HasField(name)
    assert snapshot.weight_version == ""


def test_requests_and_one_repeat() -> None:
    first, second = recordings("00", "01")
    assert second.prefix_query_tokens_total - first.prefix_query_tokens_total == 4 * 1500
    assert second.prefix_hit_tokens_total - first.prefix_hit_tokens_total == 46 * 32
    assert second.prefill_tokens_total - first.prefill_tokens_total == 4 * 1500 - 46 * 32
    assert second.generation_tokens_total - first.generation_tokens_total == 4 * 20
    # 4531 tokens in 0.23025980 s since start.
    assert second.prefill_tokens_per_second == pytest.approx(19_677.8, abs=0.1)
    assert second.incarnation == first.incarnation
    assert second.sequence > first.sequence


def test_window_under_load() -> None:
    first, second = follow(recording("load_00"), recording("load_01"))
    queries = second.prefix_query_tokens_total - first.prefix_query_tokens_total
    hits = second.prefix_hit_tokens_total - first.prefix_hit_tokens_total
    assert (queries, hits) == (124_793, 116_224)
    assert hits / queries == pytest.approx(0.9313, abs=0.0001)
    assert second.generation_tokens_total - first.generation_tokens_total == 2_761
    assert second.prefill_tokens_total - first.prefill_tokens_total == 8_569
    assert (first.running, second.running) == (6, 5)
    assert (first.used_blocks, second.used_blocks) == (129, 126)
    assert (first.preemptions_total, second.preemptions_total) == (85, 85)
    # Since start 1,209,393 tokens in 169.694 s, weighing as 10 s; in the window 8,761 in 1.5461 s.
    assert first.prefill_tokens_per_second == pytest.approx(7_126.9, abs=0.1)
    assert second.prefill_tokens_per_second == pytest.approx((71_269 + 8_761) / 11.5461, abs=0.1)


def test_running_and_overload() -> None:
    running, overload, after = recordings("04", "10", "11")
    assert (running.running, running.waiting, running.used_blocks) == (3, 0, 186)
    assert (overload.running, overload.waiting, overload.waiting_capacity, overload.used_blocks) == (3, 3, 3, 576)
    assert after.preemptions_total - overload.preemptions_total == 1


def test_reset_of_an_idle_cache_changes_the_epoch_and_no_counter() -> None:
    before, after, repeat = recordings("01", "02", "03")
    assert after.cache_epoch != before.cache_epoch
    assert repeat.cache_epoch == after.cache_epoch
    assert after.prefix_hit_tokens_total == before.prefix_hit_tokens_total == repeat.prefix_hit_tokens_total
    assert after.incarnation == before.incarnation


def test_a_refused_reset_does_not_change_the_epoch() -> None:
    whole = recording("lifecycle_04")
    answered = 'http_response_size_bytes_{}{{handler="/reset_prefix_cache"}} {}'
    refused = whole.replace(answered.format("count", "1.0"), answered.format("count", "2.0"))
    refused = refused.replace(answered.format("sum", "16.0"), answered.format("sum", "33.0"))
    assert refused != whole
    before, after = follow(whole, refused)
    assert after.cache_epoch == before.cache_epoch


def test_where_the_answers_of_resets_make_no_sense_each_call_counts() -> None:
    text = recording("lifecycle_02")
    odd = text.replace(
        'http_response_size_bytes_sum{handler="/reset_prefix_cache"} 16.0',
        'http_response_size_bytes_sum{handler="/reset_prefix_cache"} 0.0',
    )
    before, after = follow(recording("lifecycle_01"), odd)
    assert after.cache_epoch == before.cache_epoch + 1


def test_a_pause_may_have_cleared_the_cache() -> None:
    # The reset before the pause was refused (it counts 0), and no metric tells that this pause kept the cache.
    before, paused, resumed = recordings("04", "05", "06")
    assert paused.cache_epoch == before.cache_epoch + 1
    assert resumed.cache_epoch == paused.cache_epoch


def test_sleep_and_wake() -> None:
    before, asleep, awake = recordings("06", "07", "08")
    serving, sleeping = scheduler_pb2.INSTANCE_STATE_SERVING, scheduler_pb2.INSTANCE_STATE_SLEEPING
    assert [before.state, asleep.state, awake.state] == [serving, sleeping, serving]
    assert asleep.cache_epoch == before.cache_epoch + 1
    assert awake.cache_epoch == asleep.cache_epoch
    assert awake.incarnation == before.incarnation


def test_a_nap_between_two_scrapes_changes_the_epoch() -> None:
    before, awake = recordings("06", "08")
    assert awake.state == scheduler_pb2.INSTANCE_STATE_SERVING
    assert awake.cache_epoch == before.cache_epoch + 1


def test_sleep_without_a_counted_operation_changes_the_epoch_once() -> None:
    pages = [without(recording(f"lifecycle_{number}"), "sleep_mode_operation") for number in ("06", "07", "07", "08")]
    epochs = [snapshot.cache_epoch for snapshot in follow(*pages)]
    assert [epoch - epochs[0] for epoch in epochs] == [0, 1, 1, 1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_sleep_state_is_read_from_the_awake_series_wherever_it_stands(order: tuple[int, ...]) -> None:
    for number, state in (("06", "SERVING"), ("07", "SLEEPING")):
        lines = recording(f"lifecycle_{number}").splitlines()
        places = [at for at, line in enumerate(lines) if line.startswith("vllm:engine_sleep_state{")]
        series = [lines[at] for at in places]
        for at, which in zip(places, order, strict=True):
            lines[at] = series[which]
        [snapshot] = follow("\n".join(lines))
        assert scheduler_pb2.InstanceState.Name(snapshot.state) == f"INSTANCE_STATE_{state}"


def test_released_kv_memory_is_sleep_too() -> None:
    text = recording("lifecycle_07").replace(
        'sleep_state="weights_offloaded"} 1.0', 'sleep_state="weights_offloaded"} 0.0'
    )
    assert follow(text)[0].state == scheduler_pb2.INSTANCE_STATE_SLEEPING


def test_paused_comes_from_the_facts_and_sleep_goes_first() -> None:
    paused = Facts(paused=True, weight_version="step-7", max_context_tokens=8192)
    [snapshot] = follow(recording("lifecycle_05"), facts=paused)
    assert snapshot.state == scheduler_pb2.INSTANCE_STATE_PAUSED
    assert (snapshot.weight_version, snapshot.max_context_tokens) == ("step-7", 8192)
    assert follow(recording("lifecycle_07"), facts=paused)[0].state == scheduler_pb2.INSTANCE_STATE_SLEEPING


def test_restart_at_the_same_address() -> None:
    before, restarted, one_request = recordings("11", "12", "13")
    assert before.incarnation == "start-1796013664.68"
    assert restarted.incarnation == one_request.incarnation == "start-1796013779.50"
    assert restarted.cache_epoch > before.cache_epoch
    assert restarted.sequence > before.sequence
    # Nothing of the old life is left: no negative window, and 3 tokens are no evidence of a speed.
    assert before.HasField("prefill_tokens_per_second")
    assert not restarted.HasField("prefill_tokens_per_second")
    assert not one_request.HasField("prefill_tokens_per_second")
    assert one_request.prefill_tokens_total == 3


def test_a_new_collector_names_the_living_engine_the_same() -> None:
    [_, before] = recordings("06", "07")
    later = advance(None, page_of(recording("lifecycle_08")), START + 60 * SECOND)
    after = to_snapshots(later, TARGET, Facts())[0]
    assert (after.incarnation, after.cache_epoch) == (before.incarnation, before.cache_epoch)
    assert after.sequence > before.sequence


def test_without_a_start_time_falling_counters_tell_a_restart() -> None:
    pages = [without(recording(f"lifecycle_{number}"), "process_start_time") for number in ("10", "11", "12", "13")]
    overload, done, restarted, one_request = follow(*pages)
    assert overload.incarnation == done.incarnation == "seen-1796013700000"
    assert restarted.incarnation == one_request.incarnation == "seen-1796013702000"
    assert restarted.cache_epoch > done.cache_epoch
    assert not restarted.HasField("prefill_tokens_per_second")


def test_counters_that_fall_under_an_unchanged_start_time_are_a_restart() -> None:
    before = recording("lifecycle_11")
    fallen = recording("lifecycle_13").replace("1.7960137795e+09", "1.79601366468e+09")
    first, second, third = follow(before, fallen, fallen)
    assert first.incarnation == "start-1796013664.68"
    assert second.incarnation == third.incarnation == "start-1796013664.68-seen-1796013701000"


def test_a_clock_that_steps_back_does_not_turn_the_sequence() -> None:
    page = page_of(recording("lifecycle_00"))
    first = advance(None, page, START)
    second = advance(first, page, START - 3600 * SECOND)
    assert second.sequence == START + 1
    assert second.observed_ns == START - 3600 * SECOND


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("vllm:num_requests_running", {"running"}),
        ("vllm:num_requests_waiting{", {"waiting"}),
        ("vllm:num_requests_waiting_by_reason", {"waiting_capacity"}),
        ("vllm:kv_cache_usage_perc", {"used_blocks"}),
        ("vllm:cache_config_info", {"block_size", "total_blocks", "used_blocks"}),
        ("vllm:prefix_cache_queries", {"prefix_query_tokens_total"}),
        ("vllm:prefix_cache_hits", {"prefix_hit_tokens_total"}),
        ("vllm:prompt_tokens_by_source", {"prefill_tokens_total"}),
        ("vllm:generation_tokens", {"generation_tokens_total"}),
        ("vllm:num_preemptions", {"preemptions_total"}),
        ("vllm:request_prefill_time_seconds", {"prefill_tokens_per_second"}),
    ],
)
def test_a_missing_family_is_named_and_leaves_its_fields_unknown(family: str, fields: set[str]) -> None:
    text = recording("lifecycle_11")
    whole, partial = follow(text)[0], follow(without(text, family))[0]
    present = {found.name for found, _ in whole.ListFields()}
    assert present - {found.name for found, _ in partial.ListFields()} == fields
    remarks = page_of(without(text, family)).remarks
    assert len(remarks) == 1
    assert family.rstrip("{") in next(iter(remarks))


def test_a_whole_page_leaves_nothing_to_remark() -> None:
    assert page_of(recording("lifecycle_04")).remarks == frozenset()


def test_a_missing_sleep_state_is_not_taken_for_serving() -> None:
    [snapshot] = follow(without(recording("lifecycle_07"), "vllm:engine_sleep_state"))
    assert snapshot.state == scheduler_pb2.INSTANCE_STATE_UNSPECIFIED


def test_connector_hits_count_as_hits() -> None:
    text = recording("lifecycle_01")
    line = 'vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} '
    [snapshot] = follow(text.replace(line + "0.0", line + "320.0"))
    assert snapshot.prefix_hit_tokens_total == 1472 + 320


def test_usage_in_exponents() -> None:
    text = config(recording("lifecycle_04"), kv_cache_size_tokens="32000032", kv_cache_max_concurrency="None")
    text = text.replace("0.24250325945241202", "9.75e-06")
    [snapshot] = follow(text)
    assert snapshot.total_blocks == 1_000_000
    assert snapshot.used_blocks == 10


def config(text: str, **values: str) -> str:
    """The page with other values in vllm:cache_config_info."""
    for key, value in values.items():
        text, changed = re.subn(rf'\b{key}="[^"]*"', f'{key}="{value}"', text)
        assert changed
    return text


@pytest.mark.parametrize(
    ("values", "block_size", "total_blocks", "remarked"),
    [
        ({}, 32, 767, False),
        # The sum over four engines of which this page shows one, or a label that ignores the override.
        ({"num_gpu_blocks": "3072", "num_gpu_blocks_override": "None"}, 32, 767, True),
        # A context limit that is not a whole number of blocks: 768 / ceil(1000 / 32) = 24 requests of 1,000 tokens.
        ({"kv_cache_size_tokens": "24000", "kv_cache_max_concurrency": "24.0"}, 32, 767, False),
        # A hybrid model: each token occupies blocks of two groups.
        ({"kv_cache_size_tokens": "12288", "kv_cache_max_concurrency": "1.5"}, 32, 383, True),
        # The smallest group has small blocks, the attention has large ones.
        ({"block_size": "4", "effective_attention_block_size": "256", "num_gpu_blocks": "96",
          "num_gpu_blocks_override": "None"}, 256, 95, False),
        ({"effective_attention_block_size": "None", "block_size": "8", "kv_cache_size_tokens": "None"}, 8, 767, False),
        ({"kv_cache_size_tokens": "None", "num_gpu_blocks_override": "None", "num_gpu_blocks": "1000"}, 32, 999, False),
        ({"kv_cache_size_tokens": "None", "num_gpu_blocks": "3072"}, 32, 767, False),
        ({"kv_cache_max_concurrency": "nan"}, 32, 767, False),
        ({"kv_cache_size_tokens": "None", "num_gpu_blocks_override": "None", "num_gpu_blocks": "None"}, 32, None, True),
    ],
)  # fmt: skip
def test_capacity(values: dict[str, str], block_size: int, total_blocks: int | None, remarked: bool) -> None:
    text = config(recording("lifecycle_04"), **values)
    [snapshot] = follow(text)
    assert snapshot.block_size == block_size
    assert (snapshot.total_blocks if snapshot.HasField("total_blocks") else None) == total_blocks
    assert snapshot.HasField("used_blocks") == (total_blocks is not None)
    assert bool(page_of(text).remarks) == remarked


def two_engines() -> str:
    """A server of two data-parallel ranks: rank 0 as recorded running, rank 1 as recorded overloaded."""

    def rank(text: str, engine: str) -> str:
        return "\n".join(line for line in text.splitlines() if f'engine="{engine}"' in line)

    first = config(recording("lifecycle_04"), num_gpu_blocks="1536")
    second = config(recording("lifecycle_10"), num_gpu_blocks="1536").replace('engine="0"', 'engine="1"')
    return rank(second, "1") + "\n" + first


def test_one_snapshot_per_engine_label() -> None:
    page = page_of(two_engines())
    assert page.remarks == frozenset()
    first, second = to_snapshots(advance(None, page, START), TARGET, Facts(max_context_tokens=8192))
    assert (first.dp_rank, second.dp_rank) == (0, 1)
    assert (first.running, second.running) == (3, 3)
    assert (first.waiting, second.waiting) == (0, 3)
    assert (first.total_blocks, second.total_blocks) == (767, 767)
    assert (first.used_blocks, second.used_blocks) == (186, 576)
    assert (first.generation_tokens_total, second.generation_tokens_total) == (1464, 4228)
    assert first.incarnation == second.incarnation
    assert first.instance_id == second.instance_id == "engine-a"
    assert (first.max_context_tokens, second.max_context_tokens) == (8192, 8192)


def test_ranks_share_the_pool_where_only_its_sum_is_known() -> None:
    page = page_of(config(two_engines(), kv_cache_size_tokens="None", num_gpu_blocks_override="None"))
    assert [rank.total_blocks for rank in page.ranks.values()] == [767, 767]


def test_one_rank_that_falls_is_a_restart_of_the_server() -> None:
    pages = [without(text, "process_start_time") for text in (two_engines(), recording("lifecycle_03"))]
    before = advance(None, page_of(pages[0]), START)
    after = advance(before, page_of(pages[1]), START + SECOND)
    assert after.boot.incarnation != before.boot.incarnation


@pytest.mark.parametrize("engine", ["a", "", "-1"])
def test_engines_that_are_not_numbered_are_refused(engine: str) -> None:
    page = parse_page(recording("lifecycle_00").replace('engine="0"', f'engine="{engine}"'))
    with pytest.raises(EngineUnreadable, match="not ranks"):
        read_page(page)


def test_metrics_of_something_else_are_refused() -> None:
    lines = [line for line in recording("lifecycle_04").splitlines() if "vllm:" not in line]
    with pytest.raises(EngineUnreadable, match="disable-log-stats"):
        read_page(parse_page("\n".join(lines)))


def test_prefill_speed_waits_for_evidence_and_is_weighed_by_time() -> None:
    speed = PrefillSpeed().add(500, 0.1)
    assert speed.tokens_per_second is None
    speed = speed.add(500, 0.1)
    assert speed.tokens_per_second == pytest.approx(5000)
    assert speed.add(0, 0).tokens_per_second == pytest.approx(5000)
    # Little evidence gives way at once, a full horizon of it by halves.
    assert speed.add(1000, 0.8).tokens_per_second == pytest.approx(2000)
    settled = speed.add(500_000, 100)
    assert settled.add(10_000, 10).tokens_per_second == pytest.approx((settled.tokens + 10_000) / 20)


def test_speed_is_not_read_from_falling_sums() -> None:
    first = advance(None, page_of(recording("lifecycle_11")), START)
    less = replace(first.page.ranks[0], prefill_work=(1.0, 0.1))
    second = advance(first, replace(first.page, ranks={0: less}), START + SECOND)
    assert second.prefill[0] == first.prefill[0]
