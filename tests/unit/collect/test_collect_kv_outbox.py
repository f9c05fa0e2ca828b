"""What the server is told, against a strict ledger."""

import random

import pytest

from moorage.collect.kv_events import Cleared, Removed, Stored
from moorage.collect.kv_outbox import MAX_HASHES, MAX_PAUSE, Outbox
from moorage.collect.kv_record import CacheRecord
from moorage.v1.scheduler_pb2 import PrefixAck, PrefixUpdate
from tests.unit.collect.prefix_ledger import PrefixLedger


def put(record: CacheRecord, *keys: int) -> None:
    record.apply([Stored([key], None, [key], 1) for key in keys])


def drop(record: CacheRecord, *keys: int) -> None:
    record.apply([Removed(keys)])


class Line:
    """An outbox, its record and the server at the other end."""

    def __init__(self) -> None:
        self.ledger = PrefixLedger()
        self.record = CacheRecord()
        self.outbox = Outbox("a", 2)

    def beat(self, behind: bool = False) -> list[PrefixUpdate]:
        """One heartbeat that arrives."""
        updates = self.outbox.updates(self.record, "boot-1", behind)
        self.outbox.settle([self.ledger.take(update) for update in updates])
        return updates

    def agrees(self) -> bool:
        """Whether the server knows exactly what is cached."""
        cache = self.ledger.cache("a", 2)
        assert self.ledger.complaints == []
        return cache is not None and cache.hashes == set(self.record.hashes) and not cache.behind


@pytest.fixture
def line() -> Line:
    return Line()


def test_a_stream_begins_with_everything_and_goes_on_with_changes(line: Line) -> None:
    put(line.record, 1, 2, 3)
    [first] = line.beat()
    assert (first.instance_id, first.dp_rank, first.incarnation) == ("a", 2, "boot-1")
    assert (first.sequence, first.reset, len(first.stored), first.behind) == (1, True, 3, False)
    put(line.record, 4, 5)
    drop(line.record, 1, 5)
    [second] = line.beat()
    assert (second.stream, second.sequence, second.reset) == (first.stream, 2, False)
    assert (len(second.stored), len(second.removed)) == (1, 1)
    assert line.agrees()


def test_nothing_new_is_told_too(line: Line) -> None:
    assert [len(line.beat()) for _ in range(3)] == [1, 1, 1]
    assert [(update.sequence, update.reset) for update in line.ledger.log] == [(1, True), (2, False), (3, False)]
    assert line.agrees()


def test_a_cleared_cache_is_a_new_stream(line: Line) -> None:
    put(line.record, 1)
    [first] = line.beat()
    line.record.apply([Cleared()])
    put(line.record, 2)
    [second] = line.beat()
    assert (second.reset, second.sequence, second.stream != first.stream) == (True, 1, True)
    assert line.agrees()


def test_large_updates_are_split(line: Line) -> None:
    put(line.record, *range(MAX_HASHES + 5))
    updates = line.beat()
    assert [(len(update.stored), update.reset) for update in updates] == [(MAX_HASHES, True), (5, False)]
    drop(line.record, *range(10))
    put(line.record, *range(100_000, 100_000 + MAX_HASHES))
    updates = line.beat()
    assert [(len(update.removed), len(update.stored)) for update in updates] == [(10, MAX_HASHES - 10), (0, 10)]
    assert line.agrees()


def test_while_behind_nothing_is_told_but_that(line: Line) -> None:
    put(line.record, 1)
    line.beat()
    put(line.record, 2)
    [update] = line.beat(behind=True)
    assert (update.behind, update.sequence, list(update.stored)) == (True, 2, [])
    put(line.record, 3)
    [update] = line.beat()
    assert (update.behind, update.reset, len(update.stored)) == (False, False, 2)
    assert line.agrees()


def test_a_record_that_begins_behind(line: Line) -> None:
    put(line.record, 1)
    assert [(update.reset, update.behind) for update in line.beat(behind=True)] == [(True, True)]
    assert [(update.reset, update.behind) for update in line.beat(behind=True)] == [(False, True)]
    [update] = line.beat()
    assert (update.reset, len(update.stored)) == (True, 1)
    assert line.agrees()


def test_a_server_that_wants_everything_again(line: Line) -> None:
    put(line.record, 1, 2)
    line.beat()
    put(line.record, 3)
    line.ledger.resend.add("a")
    line.beat()
    [update] = line.beat()
    assert (update.reset, len(update.stored)) == (True, 3)
    assert line.agrees()
    line.ledger.forget()
    line.beat()
    assert not line.agrees()
    line.beat()
    assert line.agrees()


def test_a_call_that_failed_begins_a_new_stream(line: Line) -> None:
    put(line.record, 1)
    line.beat()
    put(line.record, 2)
    # It arrived or not: nobody knows.
    [lost] = line.outbox.updates(line.record, "boot-1", False)
    line.outbox.settle([None])
    [update] = line.beat()
    assert (update.reset, update.sequence, update.stream != lost.stream) == (True, 1, True)
    assert line.agrees()


def test_one_of_several_updates_lost(line: Line) -> None:
    put(line.record, *range(MAX_HASHES + 5))
    first, _ = line.outbox.updates(line.record, "boot-1", False)
    line.outbox.settle([line.ledger.take(first), None])
    assert [update.reset for update in line.beat()] == [True, False]
    assert line.agrees()


def test_refusals_are_sat_out_longer_and_longer(line: Line) -> None:
    refused = PrefixAck(accepted=False, reason="too many instances")
    pauses = []
    for _ in range(9):
        updates = line.outbox.updates(line.record, "boot-1", False)
        assert [update.reset for update in updates] == [True]
        line.outbox.settle([refused])
        pauses.append(0)
        while not (again := line.outbox.updates(line.record, "boot-1", False)):
            line.outbox.settle([])
            pauses[-1] += 1
        line.outbox.settle([None for _ in again])
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    assert line.outbox.refusal == "too many instances"
    put(line.record, 1)
    line.beat()
    assert line.agrees()
    assert line.outbox.refusal == ""
    line.ledger.refuse.add("a")
    line.beat()
    assert (line.beat(), len(line.beat())) == ([], 1)
    assert line.agrees()


def test_any_course_of_things_leaves_the_server_with_the_record() -> None:
    rng = random.Random(11)
    line = Line()
    for _ in range(600):
        keys = rng.sample(range(40), 5)
        (put if rng.random() < 0.5 else drop)(line.record, *keys)
        chance = rng.random()
        if chance < 0.03:
            line.record.apply([Cleared()])
        elif chance < 0.06:
            line.ledger.resend.add("a")
        elif chance < 0.08:
            line.ledger.forget()
        elif chance < 0.12:
            updates = line.outbox.updates(line.record, "boot-1", False)
            line.outbox.settle([None for _ in updates])
        line.beat(behind=rng.random() < 0.2)
    line.beat()
    line.beat()
    assert line.agrees()
