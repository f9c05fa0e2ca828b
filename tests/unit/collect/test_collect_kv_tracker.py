"""Batches in order: gaps, replays, restarts."""

import pytest

from moorage.collect import kv_tracker
from moorage.collect.kv_tracker import MAX_TRIES, Tracker
from tests.unit.collect.kv_fakes import CLEARED, batch, stored


def block(number: int) -> bytes:
    """A batch that stores the block `number`."""
    return batch(stored([number], [number] * 4))


def held(tracker: Tracker) -> int:
    return tracker.record.distinct_blocks


def replay(tracker: Tracker, *numbers: int, complete: bool = True) -> bool:
    """An answer of these batches."""
    for number in numbers:
        tracker.replayed(number, block(number))
    return tracker.replay_over(complete)


def feed(tracker: Tracker, *numbers: int) -> None:
    for number in numbers:
        tracker.live(number, block(number))


def test_from_the_first_batch_on_without_a_replay() -> None:
    tracker = Tracker(can_replay=False)
    assert tracker.behind
    feed(tracker, 0, 1, 2)
    assert (tracker.behind, held(tracker), tracker.wanted) == (False, 3, None)


def test_a_late_start_without_a_replay_is_behind_until_the_cache_is_cleared() -> None:
    tracker = Tracker(can_replay=False)
    feed(tracker, 7, 8)
    assert (tracker.behind, tracker.reason) == (True, "missed batches 0 to 6")
    tracker.live(9, batch(stored([1], range(4)), CLEARED, stored([2], range(4))))
    assert (tracker.behind, held(tracker), tracker.clears) == (False, 1, 1)


def test_a_late_start_is_made_up_for_by_a_replay() -> None:
    tracker = Tracker(can_replay=True)
    assert (tracker.wanted, tracker.behind) == (0, True)
    feed(tracker, 3, 4)
    assert held(tracker) == 0
    assert replay(tracker, 0, 1, 2, 3)
    assert (tracker.behind, held(tracker), tracker.wanted) == (False, 5, None)


def test_an_engine_that_has_published_nothing_yet() -> None:
    tracker = Tracker(can_replay=True)
    assert not replay(tracker)
    assert (tracker.behind, held(tracker)) == (False, 0)


def test_a_replay_that_no_longer_has_the_beginning() -> None:
    tracker = Tracker(can_replay=True)
    replay(tracker, 5, 6)
    assert tracker.behind
    assert tracker.reason == "the publisher keeps no batches before 5, 0 was next"
    feed(tracker, 7)
    assert held(tracker) == 3
    tracker.live(8, batch(CLEARED))
    assert not tracker.behind


def test_what_comes_during_a_replay_and_in_it_counts_once() -> None:
    tracker = Tracker(can_replay=True)
    feed(tracker, 2)
    tracker.replayed(0, block(0))
    feed(tracker, 3, 4)
    for number in (1, 2, 3):
        tracker.replayed(number, block(number))
    tracker.replay_over(True)
    # Queued in the socket while the replay ran: not a restart.
    feed(tracker, 5)
    assert (tracker.generation, held(tracker), tracker.behind) == (0, 6, False)


def test_a_replay_ahead_of_what_is_published() -> None:
    tracker = Tracker(can_replay=True)
    replay(tracker, 0, 1, 2, 3)
    feed(tracker, 1, 2, 3, 4)
    assert (tracker.generation, held(tracker), tracker.behind) == (0, 5, False)


def test_a_gap_is_filled() -> None:
    tracker = Tracker(can_replay=True)
    feed(tracker, 0, 1, 4)
    assert (tracker.wanted, tracker.behind, held(tracker)) == (2, True, 2)
    replay(tracker, 2, 3, 4)
    assert (tracker.behind, held(tracker), tracker.wanted) == (False, 5, None)


def test_a_gap_that_can_not_be_filled_stays() -> None:
    tracker = Tracker(can_replay=True)
    feed(tracker, 0, 1, 4)
    assert not replay(tracker)
    assert (tracker.behind, held(tracker), tracker.wanted) == (True, 3, None)
    feed(tracker, 5)
    assert tracker.behind
    without = Tracker(can_replay=False)
    feed(without, 0, 1, 4)
    assert (without.behind, held(without), without.wanted) == (True, 3, None)


def test_a_cut_replay_is_asked_for_again_from_where_it_broke() -> None:
    tracker = Tracker(can_replay=True)
    replay(tracker, 0, 1, 5)
    assert (tracker.wanted, tracker.behind, held(tracker)) == (2, True, 2)
    replay(tracker, 2, 3, complete=False)
    assert (tracker.wanted, tracker.behind) == (4, True)
    replay(tracker, 4, 5)
    assert (tracker.wanted, tracker.behind, held(tracker)) == (None, False, 6)


def test_a_replay_without_an_answer_is_given_up_in_the_end() -> None:
    tracker = Tracker(can_replay=True)
    feed(tracker, 0, 2)
    for _ in range(MAX_TRIES - 1):
        assert not replay(tracker, complete=False)
        assert tracker.wanted == 1
    replay(tracker, complete=False)
    assert (tracker.wanted, tracker.behind, held(tracker)) == (None, True, 2)
    assert tracker.reason == f"no replay after {MAX_TRIES} tries"


def test_no_answer_at_the_start_and_then_the_first_batch() -> None:
    tracker = Tracker(can_replay=True)
    for _ in range(MAX_TRIES):
        replay(tracker, complete=False)
    assert (tracker.wanted, tracker.behind) == (None, True)
    feed(tracker, 0)
    assert not tracker.behind


def test_too_much_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_WAITING", "MAX_WAITING_BYTES"):
        tracker = Tracker(can_replay=True)
        feed(tracker, 0)
        with monkeypatch.context() as patch:
            patch.setattr(kv_tracker, limit, 3)
            feed(tracker, *range(5, 9))
        assert (tracker.wanted, tracker.behind, held(tracker)) == (None, True, 5)
        # An answer that comes after all is not wanted any more.
        assert not replay(tracker, 1, 2)
        assert held(tracker) == 5


@pytest.mark.parametrize("can_replay", [False, True])
def test_a_sequence_that_goes_back_is_a_new_engine(can_replay: bool) -> None:
    tracker = Tracker(can_replay)
    feed(tracker, 0, 1, 2)
    record = tracker.record
    feed(tracker, 0)
    assert tracker.generation == 1
    assert tracker.record is not record
    assert (tracker.behind, held(tracker)) == (False, 1)
    feed(tracker, 1)
    assert held(tracker) == 2


def test_a_new_engine_whose_first_batches_were_missed() -> None:
    tracker = Tracker(can_replay=True)
    feed(tracker, *range(6))
    feed(tracker, 2)
    assert (tracker.generation, tracker.wanted, tracker.behind) == (1, 0, True)
    replay(tracker, 0, 1, 2)
    assert (held(tracker), tracker.behind) == (3, False)


def test_a_restart_in_the_middle_of_a_replay() -> None:
    tracker = Tracker(can_replay=True)
    feed(tracker, 0, 5, 6)
    feed(tracker, 0)
    assert (tracker.generation, held(tracker), tracker.behind) == (1, 1, False)


def test_a_known_restart_begins_anew() -> None:
    tracker = Tracker(can_replay=False)
    tracker.resize(10, 4)
    feed(tracker, 0, 1)
    tracker.restart("new")
    assert (tracker.generation, tracker.behind, held(tracker)) == (1, True, 0)
    # What the engine's metrics said still holds.
    assert tracker.record.block_size == 4
    feed(tracker, 0)
    assert not tracker.behind


def test_an_audit_finds_what_was_dropped_at_the_end() -> None:
    tracker = Tracker(can_replay=True)
    tracker.audit()
    replay(tracker, 0, 1)
    tracker.audit()
    assert (tracker.wanted, tracker.behind) == (2, False)
    replay(tracker, 2, 3)
    assert (tracker.wanted, held(tracker), tracker.behind) == (None, 4, False)
    # No answer proves nothing.
    tracker.audit()
    replay(tracker, complete=False)
    assert (tracker.wanted, tracker.behind) == (None, False)
    without = Tracker(can_replay=False)
    feed(without, 0)
    without.audit()
    assert without.wanted is None


def test_an_audit_that_is_cut_leaves_the_record_behind_until_it_has_the_rest() -> None:
    tracker = Tracker(can_replay=True)
    feed(tracker, 0)
    tracker.audit()
    replay(tracker, 1, 4)
    assert (tracker.wanted, tracker.behind) == (2, True)
    replay(tracker, 2, 3, 4)
    assert (tracker.wanted, held(tracker), tracker.behind) == (None, 5, False)


def test_doubt_lasts_until_the_next_batch() -> None:
    tracker = Tracker(can_replay=False)
    feed(tracker, 0)
    tracker.doubt("perhaps cleared")
    assert (tracker.behind, tracker.reason) == (True, "perhaps cleared")
    feed(tracker, 1)
    assert not tracker.behind


def test_an_unreadable_batch_is_a_gap_that_nothing_fills() -> None:
    tracker = Tracker(can_replay=True)
    feed(tracker, 0)
    tracker.live(1, b"garbage")
    feed(tracker, 2)
    assert (tracker.behind, tracker.wanted, held(tracker)) == (True, None, 2)
    assert tracker.remarks == {"unreadable KV events: no MessagePack: ExtraData"}
    assert tracker.reason.startswith("batch 1 is unreadable")


def test_unknown_events_are_remarked() -> None:
    tracker = Tracker(can_replay=False)
    tracker.live(0, batch({"type": "BlockMoved"}, stored([1], range(4))))
    assert (held(tracker), tracker.behind) == (1, False)
    assert tracker.remarks == {"KV events of unknown type 'BlockMoved'"}


def test_garbage_does_not_fill_the_memory_with_remarks() -> None:
    tracker = Tracker(can_replay=False)
    for number in range(200):
        tracker.live(number, batch({"type": f"Strange{number}"}))
    assert len(tracker.remarks) == kv_tracker.MAX_REMARKS


def test_more_blocks_than_there_are_is_a_reason_too() -> None:
    tracker = Tracker(can_replay=False)
    tracker.resize(1, 4)
    tracker.live(0, batch(stored(range(2000), range(8000))))
    assert (tracker.behind, tracker.reason) == (True, "more blocks stored than the engine has")
    tracker.live(1, batch(CLEARED))
    assert not tracker.behind
