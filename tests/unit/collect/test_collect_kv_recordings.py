"""What an engine published, against what it answered."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moorage.collect.kv_tracker import Tracker
from moorage.hashes import prefix_hashes
from tests.unit.collect.kv_fakes import batch

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kv-events"


def lines(name: str) -> Iterator[dict[str, Any]]:
    for text in (FIXTURES / name).read_text().splitlines():
        yield json.loads(text)


def play(name: str) -> Tracker:
    """A tracker that heard a crafted file."""
    tracker = Tracker(can_replay=False)
    for number, line in enumerate(lines(name)):
        tracker.live(number, batch(*line["events"]))
    assert (tracker.remarks, tracker.behind) == (set(), False)
    return tracker


def cached(tracker: Tracker, prompt: list[int], salt: str) -> int:
    """Tokens of `prompt` that the record says are cached: whole blocks, and never the last token, whose output the
    engine needs.
    """
    hashes = prefix_hashes(prompt, 32, salt)[: (len(prompt) - 1) // 32]
    known = next((number for number, value in enumerate(hashes) if value not in tracker.record), len(hashes))
    return 32 * known


def test_a_recorded_vllm_tells_what_it_will_have_cached() -> None:
    tracker = Tracker(can_replay=False)
    tracker.resize(47, 32)
    messages: list[list[bytes]] = []
    compared, most, was_reset = 0, 0, False
    for line in lines("vllm-0.32.jsonl"):
        if "frames" in line:
            messages.append([base64.b64decode(frame) for frame in line["frames"]])
        elif "reset" in line:
            was_reset = True
        else:
            # The prompt went before its own messages. A reset shows in the messages of the next step only.
            foreseen = 0 if was_reset else cached(tracker, line["prompt"], line["salt"])
            assert foreseen == line["cached_tokens"]
            compared += foreseen > 0
            for _, number, payload in messages:
                tracker.live(int.from_bytes(number, "big"), payload)
            assert all(value in tracker.record for value in prefix_hashes(line["prompt"], 32, line["salt"]))
            most = max(most, tracker.record.distinct_blocks)
            messages, was_reset = [], False
    # 47 blocks, of which the last output always fills a part of one, and of which some were evicted.
    assert (compared, most) == (23, 46)
    assert (tracker.behind, tracker.clears, tracker.remarks) == (False, 1, set())
    sessions = dict(tracker.record.largest_sessions())
    assert sessions.keys() == {"s-0", "s-2", "s-3"}
    assert sum(sessions.values()) == tracker.record.distinct_blocks


def test_events_as_arrays() -> None:
    hashes = prefix_hashes(range(48), 16)
    assert set(play("arrays.jsonl").record.hashes) == {hashes[0], hashes[2]}


def test_sglang_calls_blocks_by_our_hashes() -> None:
    tracker = play("sglang.jsonl")
    hashes = prefix_hashes(range(48), 16)
    salted = prefix_hashes(range(16), 16, "v7")
    assert set(tracker.record.hashes) == {hashes[0], hashes[2], *salted}
    assert tracker.record.largest_sessions() == [("s-1", 1), ("s-2", 1), ("s-3", 1)]
    ids = [value for line in lines("sglang.jsonl") for event in line["events"] for value in event["block_hashes"]]
    assert set(hashes) <= {value % 2**64 for value in ids}
