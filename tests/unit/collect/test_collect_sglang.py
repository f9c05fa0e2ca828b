"""The pure part, on pages crafted from SGLang's documentation. Expected values are worked out by hand from them."""

import json
import re

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from moorage.collect.exposition import parse_page
from moorage.collect.reader import EngineUnreadable
from moorage.collect.sglang import Scrape, advance, to_snapshots
from moorage.collect.sglang_loads import Load, read_loads
from moorage.collect.sglang_page import PageReading, read_page
from moorage.collect.targets import Target
from moorage.v1 import scheduler_pb2
from moorage.v1.scheduler_pb2 import InstanceSnapshot
from tests.unit.collect.fakes import crafted

TARGET = Target("engine-a", "http://10.0.0.7:30000")
SECOND = 1_000_000_000
START = 1_796_013_700 * SECOND

FRESH, BUSY, BUSIER = crafted("one_00_fresh.txt"), crafted("one_01_busy.txt"), crafted("one_02_busier.txt")
FLUSHED, NEW_WEIGHTS = crafted("one_03_flushed.txt"), crafted("one_04_new_weights.txt")
RESTARTED, TWO_RANKS = crafted("one_05_restarted.txt"), crafted("two_ranks.txt")


def read(text: str) -> PageReading:
    return read_page(parse_page(text))


def loads_of(name: str) -> dict[int, Load]:
    return read_loads(json.loads(crafted(name)))


def follow(*pages: str, loads: tuple[dict[int, Load], ...] = ()) -> list[InstanceSnapshot]:
    """Snapshots of rank 0 after each of `pages`, scraped one second apart, with the loads read each time."""
    scrape: Scrape | None = None
    snapshots = []
    for number, page in enumerate(pages):
        seen = loads[number] if number < len(loads) else {}
        scrape = advance(scrape, read(page), seen, START + number * SECOND)
        snapshots.append(to_snapshots(scrape, TARGET, None)[0])
    return snapshots


def without(text: str, *names: str) -> str:
    return "\n".join(line for line in text.splitlines() if not any(name in line for name in names))


def edit(text: str, pattern: str, value: str) -> str:
    """The page with another value on the lines that match."""
    changed, count = re.subn(rf"^({pattern}.*) \S+$", rf"\g<1> {value}", text, flags=re.MULTILINE)
    assert count
    return changed


def test_a_busy_engine() -> None:
    [snapshot] = follow(BUSY)
    assert snapshot == InstanceSnapshot(
        instance_id="engine-a",
        endpoint="http://10.0.0.7:30000",
        dp_rank=0,
        incarnation="startup-31.48291703",
        sequence=START,
        observed_time=Timestamp(seconds=1_796_013_700),
        state=scheduler_pb2.INSTANCE_STATE_UNSPECIFIED,
        block_size=64,
        total_blocks=6400,
        # 100,001 tokens take one page more than 1,562 x 64.
        used_blocks=1563,
        cached_blocks=3125,
        running=12,
        waiting=4,
        waiting_capacity=3,
        # Storage has not hit yet, so it has no series.
        prefix_query_tokens_total=40_000 + 150_000 + 10_000,
        prefix_hit_tokens_total=150_000 + 10_000,
        prefill_tokens_total=41_000,
        generation_tokens_total=52_000,
        preemptions_total=0,
        max_context_tokens=131_072,
        cache_epoch=snapshot.cache_epoch,
    )
    assert 0 < snapshot.cache_epoch < 2**63
    assert read(BUSY).remarks == frozenset()


def test_a_fresh_engine_has_not_counted_anything_and_that_is_no_remark() -> None:
    [snapshot] = follow(FRESH, loads=(loads_of("loads_not_ready.json"),))
    for name in ("prefix_query_tokens_total", "prefix_hit_tokens_total", "prefill_tokens_total"):
        assert not snapshot.HasField(name)
    assert not snapshot.HasField("generation_tokens_total")
    assert not snapshot.HasField("prefill_tokens_per_second")
    assert (snapshot.preemptions_total, snapshot.used_blocks, snapshot.running) == (0, 0, 0)
    assert read(FRESH).remarks == frozenset()


def test_the_window_between_two_pages() -> None:
    first, second = follow(BUSY, BUSIER)
    queries = second.prefix_query_tokens_total - first.prefix_query_tokens_total
    hits = second.prefix_hit_tokens_total - first.prefix_hit_tokens_total
    # Neither 0.31 nor 0, which the gauge of the last batch says.
    assert (queries, hits) == (80_000, 71_000)
    assert second.prefill_tokens_total - first.prefill_tokens_total == 10_000
    # Not the tokens of finished requests.
    assert second.generation_tokens_total - first.generation_tokens_total == 8_000
    # Not the 1 of the last report.
    assert second.preemptions_total - first.preemptions_total == 3
    assert second.incarnation == first.incarnation
    assert second.cache_epoch == first.cache_epoch


def test_loads_are_younger_than_the_gauges_and_tell_the_prefill_speed() -> None:
    busy, busier = loads_of("loads_one_01_busy.json"), loads_of("loads_one_02_busier.json")
    first, second = follow(BUSY, BUSIER, loads=(busy, busier))
    # 4 in the queue, and one more waits for its grammar.
    assert (first.running, first.waiting, first.waiting_capacity) == (13, 5, 4)
    assert first.prefill_tokens_per_second == pytest.approx(41_000 / 8.2)
    # 51,000 tokens in 10.2 s since start.
    assert second.prefill_tokens_per_second == pytest.approx(51_000 / 10.2)


def test_an_idle_engine_keeps_its_speed_and_a_silent_one_catches_up() -> None:
    busy, busier = loads_of("loads_one_01_busy.json"), loads_of("loads_one_02_busier.json")
    first, idle, silent, later = follow(BUSY, BUSY, BUSY, BUSIER, loads=(busy, busy, {}, busier))
    assert first.prefill_tokens_per_second == idle.prefill_tokens_per_second == silent.prefill_tokens_per_second
    assert (silent.running, silent.waiting) == (12, 4)
    assert later.prefill_tokens_per_second == pytest.approx(51_000 / 10.2)


def test_a_flush_changes_the_cache_epoch_and_a_refused_one_does_not() -> None:
    before, refused, flushed, idle = follow(
        BUSIER, edit(BUSIER, 'sglang:http_responses_total{endpoint="/flush_cache"', "2"), FLUSHED, FLUSHED
    )
    assert refused.cache_epoch == before.cache_epoch
    assert flushed.cache_epoch != before.cache_epoch
    assert idle.cache_epoch == flushed.cache_epoch
    assert flushed.incarnation == before.incarnation


def test_each_weight_update_changes_the_cache_epoch() -> None:
    again = edit(NEW_WEIGHTS, "sglang:weight_load_duration_seconds", "1.7491027")
    epochs = [snapshot.cache_epoch for snapshot in follow(FLUSHED, NEW_WEIGHTS, NEW_WEIGHTS, again)]
    assert len(set(epochs)) == 3
    assert epochs[1] == epochs[2]


def test_every_collector_sees_the_same_incarnation_and_cache_epoch() -> None:
    *_, told = follow(BUSY, BUSIER, FLUSHED, NEW_WEIGHTS)
    [newcomer] = follow(NEW_WEIGHTS)
    assert (newcomer.incarnation, newcomer.cache_epoch) == (told.incarnation, told.cache_epoch)


def test_a_restart_is_another_startup_time() -> None:
    before, after = follow(BUSIER, RESTARTED, loads=(loads_of("loads_one_02_busier.json"), {}))
    assert (before.incarnation, after.incarnation) == ("startup-31.48291703", "startup-30.97740112")
    assert after.cache_epoch != before.cache_epoch
    assert after.sequence > before.sequence
    # Nothing of the former life is left.
    assert not after.HasField("prefill_tokens_per_second")


def test_without_startup_times_fallen_counters_are_a_restart() -> None:
    fallen = edit(BUSY, 'sglang:realtime_tokens_total{.*mode="decode"', "17")
    pages = [without(page, "startup_time_seconds") for page in (BUSY, BUSIER, fallen, fallen)]
    first, same, restarted, settled = follow(*pages)
    assert first.incarnation == same.incarnation == "seen-1796013700000"
    assert restarted.incarnation == settled.incarnation == "seen-1796013702000"
    assert "missing sglang:startup_time_seconds: restarts show only as counters that fall" in read(pages[0]).remarks


def test_without_startup_times_vanished_counters_are_a_restart() -> None:
    first, second = follow(*(without(page, "startup_time_seconds") for page in (BUSY, FRESH)))
    assert first.incarnation != second.incarnation


def test_fallen_prefill_work_is_a_restart() -> None:
    fresh = {0: Load(running=0, queued=0, prefill_work=(10.0, 0.001))}
    page = without(FRESH, "startup_time_seconds")
    first, second = follow(page, page, loads=(loads_of("loads_one_01_busy.json"), fresh))
    assert first.incarnation != second.incarnation


def test_fallen_counters_under_the_same_startup_time_are_a_restart() -> None:
    first, second, third = follow(BUSIER, BUSY, BUSIER)
    assert second.incarnation == "startup-31.48291703-seen-1796013701000"
    assert third.incarnation == second.incarnation != first.incarnation


def test_a_startup_time_that_comes_and_goes_is_no_restart() -> None:
    without_startup = without(BUSY, "startup_time_seconds")
    snapshots = follow(BUSY, without_startup, BUSY)
    assert len({snapshot.incarnation for snapshot in snapshots}) == 1
    late = follow(without_startup, BUSY, BUSY, RESTARTED)
    assert [snapshot.incarnation for snapshot in late[2:]] == ["seen-1796013700000", "startup-30.97740112"]


def test_the_sequence_grows_while_the_clock_steps_back() -> None:
    first = advance(None, read(BUSY), {}, START)
    second = advance(first, read(BUSY), {}, START - 5 * SECOND)
    assert (second.observed_ns, second.sequence) == (START - 5 * SECOND, START + 1)


def test_ranks_are_instances_and_processes_and_priorities_are_not_summed() -> None:
    scrape = advance(None, read(TWO_RANKS), loads_of("loads_two_ranks.json"), START)
    first, second = to_snapshots(scrape, TARGET, "step-7")
    assert (first.dp_rank, second.dp_rank) == (0, 1)
    assert (first.running, first.waiting, first.used_blocks, first.cached_blocks) == (7, 2, 200, 100)
    # 1,601 tokens take 101 pages of 16, and 3,199 cached ones fill 199.
    assert (second.running, second.waiting, second.used_blocks, second.cached_blocks) == (5, 0, 101, 199)
    assert (first.preemptions_total, second.preemptions_total) == (4, 1)
    assert (first.prefix_hit_tokens_total, second.prefix_hit_tokens_total) == (3_000, 500)
    assert (first.prefix_query_tokens_total, second.prefix_query_tokens_total) == (4_000, 2_500)
    assert (first.generation_tokens_total, second.generation_tokens_total) == (700, 900)
    assert first.prefill_tokens_per_second == pytest.approx(2_500)
    assert second.prefill_tokens_per_second == pytest.approx(4_000)
    for snapshot in (first, second):
        assert (snapshot.block_size, snapshot.total_blocks, snapshot.max_context_tokens) == (16, 1000, 32_768)
        assert snapshot.weight_version == "step-7"
    assert scrape.page.remarks == frozenset()


def test_the_first_of_ten_processes_is_found_by_number() -> None:
    shifted = re.sub(r'tp_rank="(\d)"', lambda match: f'tp_rank="{int(match[1]) + 9}"', TWO_RANKS)
    wrong = edit(shifted, 'sglang:num_running_reqs{.*priority="",tp_rank="10"', "99")
    assert read(wrong).ranks[0].running == 7


def test_the_first_pipeline_stage_speaks_for_the_rank() -> None:
    second_stage = BUSY.replace('pp_rank="0"', 'pp_rank="1"')
    both = BUSY + edit(second_stage, "sglang:num_running_reqs", "1")
    assert read(both).ranks[0].running == 12


def test_equal_values_under_several_pids_are_one_value() -> None:
    line = next(line for line in BUSY.splitlines() if line.startswith("sglang:page_size{"))
    named = line.replace('pp_rank="0"', 'pid="1",pp_rank="0"')
    assert read(f"{BUSY}{named}\n").ranks[0].block_size == 64
    reading = read(f"{BUSY}{edit(named, 'sglang:page_size', '16')}\n")
    assert reading.ranks[0].block_size is None
    assert reading.remarks == {"several values of sglang:page_size"}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sglang:kv_used_tokens", ["used_blocks"]),
        ("sglang:kv_evictable_tokens", ["cached_blocks"]),
        ("sglang:num_running_reqs", ["running"]),
        ("sglang:num_queue_reqs", ["waiting", "waiting_capacity"]),
        ("sglang:num_grammar_queue_reqs", ["waiting"]),
        ("sglang:page_size", ["block_size", "used_blocks", "cached_blocks"]),
        ("sglang:context_len", ["max_context_tokens"]),
        ("sglang:prefill_effective_tokens_total", ["prefix_query_tokens_total", "prefix_hit_tokens_total"]),
        ("sglang:realtime_tokens_total", ["prefill_tokens_total", "generation_tokens_total"]),
    ],
)
def test_a_renamed_series_is_said_and_its_fields_are_unknown(name: str, fields: list[str]) -> None:
    renamed = BUSY.replace(name, f"{name.removesuffix('_total')}_renamed")
    [whole], [snapshot] = follow(BUSY), follow(renamed)
    known = {field.name for field, _ in snapshot.ListFields()}
    assert {field.name for field, _ in whole.ListFields()} - known == {*fields}
    assert read(renamed).remarks == {f"missing {name}"}


def test_retractions_without_gauge_and_counter_are_unknown() -> None:
    [snapshot] = follow(without(BUSY, "sglang:num_retracted"))
    assert not snapshot.HasField("preemptions_total")
    assert read(without(BUSY, "sglang:num_retracted")).remarks == {"missing sglang:num_retracted_requests_total"}


def test_an_unknown_mode_makes_absent_ones_unknown() -> None:
    renamed = BUSY.replace('mode="device_hit"', 'mode="gpu_hit"')
    rank = read(renamed).ranks[0]
    assert (rank.prefix_query_tokens_total, rank.prefix_hit_tokens_total) == (None, None)
    assert "unknown modes of sglang:prefill_effective_tokens_total: gpu_hit" in read(renamed).remarks


def test_pages_follow_from_tokens_where_their_number_is_missing() -> None:
    reading = read(without(BUSY, "sglang:num_pages"))
    assert reading.ranks[0].total_blocks == 6400
    assert reading.remarks == {"missing sglang:num_pages"}
    odd = read(edit(BUSY, "sglang:num_pages", "3200"))
    assert odd.ranks[0].total_blocks == 3200
    assert any(remark.startswith("disagreement: sglang:max_total_num_tokens means 6400") for remark in odd.remarks)


def test_tokens_held_by_streaming_sessions_are_used() -> None:
    line = next(line for line in BUSY.splitlines() if line.startswith("sglang:kv_used_tokens{"))
    held = edit(line.replace("kv_used_tokens", "streaming_session_held_tokens"), "sglang:streaming", "6400")
    assert read(f"{BUSY}{held}\n").ranks[0].used_blocks == 1563 + 100


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300"])
def test_values_that_are_no_count_are_unknown(value: str) -> None:
    assert read(edit(BUSY, "sglang:kv_used_tokens", value)).ranks[0].used_blocks is None


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("up 1\n", "no sglang: series"),
        ("vllm:num_requests_running 1\n", "no sglang: series"),
        (BUSY.replace('pp_rank="0"', 'dp_rank="x",pp_rank="0"'), "dp_rank"),
    ],
)
def test_other_pages_are_unreadable(page: str, complaint: str) -> None:
    with pytest.raises(EngineUnreadable, match=complaint):
        read(page)


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"loads": None}, {"loads": []}, {"loads": [1, None, []]}, {"loads": [{"dp_rank": "0"}]}],
)
def test_answers_without_loads(answer: object) -> None:
    assert read_loads(answer) == {}


def test_odd_loads_are_unknown() -> None:
    odd = {"dp_rank": 0, "max_total_num_tokens": 100, "num_running_reqs": True, "num_waiting_reqs": -1}
    assert read_loads({"loads": [odd, {**odd, "dp_rank": 1, "total_prefill_uncached_tokens": 5}]}) == {
        0: Load(None, None, None),
        1: Load(None, None, None),
    }


def test_loads_of_an_engine_that_has_not_written_any_are_not_idle() -> None:
    assert loads_of("loads_not_ready.json") == {}
