"""Batches of events, in both of the layouts that engines use."""

import msgpack
import pytest

from moorage.collect.kv_events import Batch, Cleared, Removed, Stored, Unreadable, decode_batch
from tests.unit.collect.kv_fakes import CLEARED, batch, removed, stored


def test_events_as_maps() -> None:
    event = stored([11, -12], range(8), 10, session_id="s-1", group_idx=0, kv_cache_spec_kind="full_attention")
    events = decode_batch(batch(event, removed(11, group_idx=0), CLEARED)).events
    assert events == [
        Stored([11, -12], 10, list(range(8)), 4, medium="GPU", group=0, kind="full_attention", session_id="s-1"),
        Removed([11], "GPU", group=0),
        Cleared(),
    ]


def test_events_as_arrays() -> None:
    old = ["BlockStored", [11], None, [1, 2, 3, 4], 4, None]
    older = ["BlockRemoved", [11]]
    newer = ["BlockStored", [12], 11, [5, 6, 7, 8], 4, 7, "CPU", "adapter", [["adapter"]], 1, "mamba"]
    assert decode_batch(batch(old, older, newer, ["AllBlocksCleared"])).events == [
        Stored([11], None, [1, 2, 3, 4], 4),
        Removed([11]),
        Stored([12], 11, [5, 6, 7, 8], 4, True, "CPU", None, [["adapter"]], group=1, kind="mamba"),
        Cleared(),
    ]


def test_hashes_as_bytes() -> None:
    key, parent = b"k" * 32, b"p" * 32
    [event] = decode_batch(batch(stored([key], range(4), parent))).events
    assert event == Stored([key], parent, [0, 1, 2, 3], 4, medium="GPU")


def test_sglang_fields() -> None:
    event = stored([-5], range(4), cache_salt="v7", session_id="s")
    del event["lora_name"]
    assert decode_batch(batch(event)).events == [
        Stored([-5], None, [0, 1, 2, 3], 4, medium="GPU", cache_salt="v7", session_id="s")
    ]


def test_unknown_events_and_fields_are_passed_over() -> None:
    strange = {"type": "BlockMoved", "block_hashes": [1]}
    read = decode_batch(batch(strange, ["Other", 1], removed(3, new_field={"a": 1}), CLEARED | {"why": "reset"}))
    assert read == Batch([Removed([3], "GPU"), Cleared()], frozenset({"BlockMoved", "Other"}))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage",
        # An array that claims four billion elements.
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        msgpack.packb(7),
        msgpack.packb({"events": []}),
        msgpack.packb([1.5]),
        msgpack.packb([1.5, None, 0]),
        batch(None),
        batch([]),
        batch([1, 2]),
        batch({"no": "type"}),
        batch({"type": "BlockStored"}),
        batch({"type": "BlockRemoved", "block_hashes": "abc"}),
        batch(removed("text")),
        batch(removed(1.5)),
        batch(stored([1], range(4), parent="text")),
        batch(stored([1], range(4), block_size=0)),
        batch(stored([1], range(4), block_size=None)),
        batch(stored([1], range(4)) | {"token_ids": None}),
    ],
)
def test_what_is_no_batch(payload: bytes) -> None:
    with pytest.raises(Unreadable):
        decode_batch(payload)
