"""What is cached, from events."""

import random

import pytest

from moorage.collect.kv_events import decode_batch
from moorage.collect.kv_record import MAX_SESSIONS, CacheRecord
from moorage.hashes import prefix_hashes
from tests.unit.collect.kv_fakes import CLEARED, batch, removed, stored


def apply(record: CacheRecord, *events: object) -> None:
    record.apply(decode_batch(batch(*events)).events)


def record_of(*events: object) -> CacheRecord:
    record = CacheRecord()
    apply(record, *events)
    return record


def hashes(*tokens: int, salt: str = "") -> list[int]:
    return prefix_hashes(tokens, 4, salt)


def test_our_hashes_are_chained_from_tokens_whatever_the_engine_calls_its_blocks() -> None:
    record = record_of(stored([901, -7], range(8)), stored([b"x" * 32], range(8, 12), parent=-7))
    assert record.hashes == hashes(*range(12))
    assert record.distinct_blocks == 3
    apply(record, removed(b"x" * 32), removed(901))
    assert record.hashes == hashes(*range(8))[1:]


def test_a_second_copy_is_the_same_block_until_the_last_one_goes() -> None:
    record = record_of(stored([1, 2], range(8)), stored([1, 2], range(8)))
    assert (record.distinct_blocks, record.hashes) == (2, hashes(*range(8)))
    apply(record, removed(1, 2))
    assert record.distinct_blocks == 2
    apply(record, removed(1))
    assert record.hashes == hashes(*range(8))[1:]
    apply(record, removed(1, 1, 77))
    assert record.distinct_blocks == 1


def test_an_unknown_parent_leaves_no_hash_but_a_block() -> None:
    record = record_of(stored([5], range(4), parent=4), stored([6], range(4, 8), parent=5))
    assert (record.distinct_blocks, record.hashes) == (2, [])
    # Told again with its beginning, it gets its hash; what hangs on it gets one when told again.
    apply(record, stored([4, 5], range(100, 108)))
    assert record.hashes == hashes(*range(100, 108))


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": 3},
        {"lora_name": "adapter", "extra_keys": [["adapter"], ["adapter"]]},
        {"extra_keys": [[["image", 0]], None]},
        {"extra_keys": [["salt", ["image", 0]], None]},
        {"extra_keys": [[b"digest of embeddings"], None]},
        {"cache_salt": "a", "extra_keys": [["b"], None]},
        # Tokens of blocks that were skipped.
        {"token_ids": list(range(12))},
        {"extra_keys": [[7], None]},
    ],
)
def test_blocks_that_depend_on_more_than_tokens_have_no_hash(fields: dict[str, object]) -> None:
    record = record_of(stored([1, 2], range(8), **fields), stored([3], range(8, 12), parent=2))
    assert (record.distinct_blocks, record.hashes) == (3, [])


def test_an_image_in_the_second_block_leaves_the_first_its_hash() -> None:
    record = record_of(stored([1, 2, 3], range(12), extra_keys=[None, [["image", 2]], None]))
    assert (record.distinct_blocks, record.hashes) == (3, hashes(*range(4)))


@pytest.mark.parametrize("fields", [{"extra_keys": [["v7"], None]}, {"cache_salt": "v7"}])
def test_a_salt_seeds_the_chain(fields: dict[str, object]) -> None:
    record = record_of(stored([1, 2], range(8), **fields), stored([3], range(8, 12), parent=2))
    assert record.hashes == hashes(*range(12), salt="v7")


def test_one_name_for_two_contents_is_worth_nothing() -> None:
    record = record_of(stored([1], range(4)), stored([1], range(4), cache_salt="v7"))
    assert (record.distinct_blocks, record.hashes) == (1, [])
    apply(record, stored([1], range(4)), stored([2], range(4, 8), parent=1))
    assert (record.distinct_blocks, record.hashes) == (2, [])


def test_blocks_elsewhere_do_not_count() -> None:
    record = record_of(
        stored([1], range(4), medium="CPU"),
        stored([2], range(4), medium="STORAGE"),
        stored([3], range(4), locality="REMOTE"),
        stored([4], range(4), medium=None),
    )
    assert record.distinct_blocks == 1
    # It moves to the host: gone from here; what goes from there was never counted.
    apply(record, removed(4, medium="CPU_PINNED"))
    assert record.distinct_blocks == 1
    apply(record, removed(4), stored([4], range(4), medium="CPU_PINNED"))
    assert record.distinct_blocks == 0


def test_of_a_hybrid_the_first_group_of_full_attention_counts() -> None:
    record = record_of(
        stored([1], range(4), group_idx=0, kv_cache_spec_kind="sliding_window"),
        stored([1], range(4), group_idx=1, kv_cache_spec_kind="full_attention"),
        stored([1], range(4), group_idx=2, kv_cache_spec_kind="full_attention"),
        stored([2], range(4, 8), parent=1, group_idx=2, kv_cache_spec_kind="full_attention"),
        removed(1, group_idx=0),
        removed(1, group_idx=2),
    )
    assert record.hashes == hashes(*range(4))
    apply(record, removed(1, group_idx=1))
    assert record.distinct_blocks == 0


def test_blocks_of_another_size_than_the_engine_reports() -> None:
    record = CacheRecord()
    record.resize(None, 4)
    apply(record, stored([1], range(8), block_size=8), stored([2], range(4)))
    assert (record.distinct_blocks, record.hashes) == (2, hashes(*range(4)))
    assert record.remarks == {"KV events of blocks that are not of 4 tokens"}


def test_tokens_that_are_no_ids() -> None:
    record = record_of(stored([1, 2], [0, 1, 2, 3, [4, 5], [5, 6], [6, 7], [7, 8]]))  # type: ignore[list-item]
    assert (record.distinct_blocks, record.hashes) == (2, hashes(*range(4)))
    assert record.remarks == {"KV events with tokens that are no ids"}


def test_clearing_forgets_everything() -> None:
    record = record_of(stored([1], range(4), session_id="s"), CLEARED, stored([2], range(50, 54)))
    assert (record.hashes, record.clears, record.largest_sessions()) == (hashes(*range(50, 54)), 1, [])


def test_changes_are_net() -> None:
    record = record_of(stored([1], range(4)))
    assert record.take_changes() is None
    assert record.take_all() == hashes(*range(4))
    assert record.take_changes() == ([], [])
    apply(record, stored([2], range(10, 14)), removed(2), removed(1), stored([1], range(4)))
    assert record.take_changes() == ([], [])
    apply(record, stored([2], range(10, 14)), removed(1))
    assert record.take_changes() == (hashes(*range(10, 14)), hashes(*range(4)))
    apply(record, CLEARED)
    assert record.take_changes() is None


def test_any_course_of_events_nets_out() -> None:
    rng = random.Random(3)
    record, told = CacheRecord(), set[int]()
    for _ in range(400):
        key = rng.randrange(30)
        event = stored([key], [key] * 4) if rng.random() < 0.5 else removed(key)
        apply(record, event)
        if rng.random() < 0.1:
            changes = record.take_changes()
            gained, lost = (record.take_all(), []) if changes is None else changes
            assert not told & set(gained)
            assert set(lost) <= told
            told = (told - set(lost)) | set(gained)
            assert told == set(record.hashes)


def test_what_nobody_takes_is_not_kept_for_ever() -> None:
    record = CacheRecord()
    record.resize(10, 4)
    record.take_all()
    for key in range(3000):
        apply(record, stored([key], [key] * 4), removed(key))
    assert record.take_changes() is None


def test_more_blocks_than_the_engine_has() -> None:
    record = CacheRecord()
    record.resize(100, 4)
    apply(record, stored(range(1224), range(4 * 1224)))
    assert not record.overflowed
    # The same block again and again: an engine that reports reused blocks too.
    apply(record, stored([0], range(4)))
    assert record.overflowed
    apply(record, stored([1], range(4)))
    assert record.distinct_blocks == 0
    assert record.remarks == {"KV events store more blocks than the engine has"}
    apply(record, CLEARED, stored([1], range(4)))
    assert (record.overflowed, record.distinct_blocks) == (False, 1)


def test_sessions_hold_what_they_stored_and_is_still_there() -> None:
    record = record_of(
        stored([1, 2], range(8), session_id="a"),
        stored([3], range(8, 12), parent=2, session_id="b"),
        stored([4], range(20, 24), session_id="ä" * 129),
        stored([5], range(30, 34), session_id=""),
        stored([1], range(4), session_id="b"),
    )
    assert record.largest_sessions() == [("a", 2), ("b", 1)]
    apply(record, removed(1), removed(2), removed(3))
    assert record.largest_sessions() == [("a", 1)]


def test_only_the_largest_sessions_are_told() -> None:
    record = CacheRecord()
    for number in range(MAX_SESSIONS + 1):
        keys = [number, -number - 1] if number else [0]
        apply(record, stored(keys, [number] * 4 * len(keys), session_id=f"s{number}"))
    told = record.largest_sessions()
    assert (len(told), told[0][1], told[-1][1]) == (MAX_SESSIONS, 2, 2)
