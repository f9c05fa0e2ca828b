"""One engine's task, with readers that do as they are told."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from moorage.collect.logs import line
from moorage.collect.reader import EngineUnreachable, EngineUnreadable, Reading
from moorage.collect.worker import REFUSALS, REPEATS, Board, EngineState, EngineWorker, Pace
from moorage.v1.scheduler_pb2 import INSTANCE_STATE_STOPPED, InstanceSnapshot


class ScriptedReader:
    """Gives one outcome per read; the last one for ever."""

    def __init__(self, outcomes: Sequence[Reading | Exception]) -> None:
        self.outcomes = list(outcomes)
        self.forgot = 0

    async def read(self, timeout: float) -> Reading:
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def forget_facts(self) -> None:
        self.forgot += 1


def reading(sequence: int = 1, incarnation: str = "start-1", remarks: Sequence[str] = ()) -> Reading:
    snapshot = InstanceSnapshot(instance_id="a", sequence=sequence, incarnation=incarnation)
    return Reading((snapshot,), frozenset(remarks))


async def look(worker: EngineWorker, times: int) -> None:
    for _ in range(times):
        await worker.look()


def messages(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if f"event={event} " in record.getMessage()]


@pytest.fixture(autouse=True)
def _log_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "moorage.collect")


async def test_states_are_logged_once_and_failures_counted(caplog: pytest.LogCaptureFixture) -> None:
    refused = EngineUnreachable("refused")
    outcomes: list[Reading | Exception] = [reading(), reading(), *[refused] * 5, EngineUnreadable("<html>"), reading()]
    worker = EngineWorker("a", ScriptedReader(outcomes), Board(), Pace(1.0, None))
    await look(worker, 2)
    assert worker.state is EngineState.REACHABLE
    await look(worker, 5)
    assert worker.state is EngineState.UNREACHABLE
    assert worker.failures == 5
    await look(worker, 1)
    assert worker.state is EngineState.UNREADABLE
    await look(worker, 3)
    assert (worker.failures, worker.failures_total) == (0, 6)
    logged = messages(caplog, "engine_state")
    assert [text.split(" was=")[0].split("state=")[-1] for text in logged] == [
        "reachable",
        "unreachable",
        "unreadable",
        "reachable",
    ]
    assert "reason='EngineUnreachable: refused'" in logged[1]
    assert "failures=6" in logged[3]


async def test_an_unexpected_error_is_a_state_with_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    worker = EngineWorker("a", ScriptedReader([KeyError("bug"), KeyError("bug"), reading()]), Board(), Pace(1.0, None))
    await look(worker, 2)
    assert worker.state is EngineState.UNREADABLE
    [record] = [record for record in caplog.records if record.exc_info]
    assert "KeyError" in record.getMessage()
    await look(worker, 1)
    assert worker.state is EngineState.REACHABLE


async def test_a_failing_engine_takes_back_what_was_not_sent() -> None:
    board = Board()
    worker = EngineWorker("a", ScriptedReader([reading(), EngineUnreachable("gone")]), board, Pace(1.0, None))
    board.put("b", (InstanceSnapshot(instance_id="b"),))
    await look(worker, 2)
    assert [snapshot.instance_id for snapshot in board.take()] == ["b"]


async def test_a_snapshot_is_taken_once_and_only_the_newest() -> None:
    board = Board()
    worker = EngineWorker("a", ScriptedReader([reading(1), reading(2)]), board, Pace(1.0, None))
    await look(worker, 2)
    assert [snapshot.sequence for snapshot in board.take()] == [2]
    assert board.take() == []


async def test_remarks_and_restarts_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = [
        reading(remarks=["missing x"]),
        reading(remarks=["missing x", "missing y"]),
        reading(incarnation="start-2", remarks=["missing x"]),
        reading(incarnation="start-2"),
    ]
    worker = EngineWorker("a", ScriptedReader(outcomes), Board(), Pace(1.0, None))
    await look(worker, 4)
    assert messages(caplog, "engine_remark") == [
        "event=engine_remark instance=a remark='missing x'",
        "event=engine_remark instance=a remark='missing y'",
    ]
    assert messages(caplog, "engine_started") == ["event=engine_started instance=a dp_rank=0 incarnation=start-1"]
    assert messages(caplog, "engine_restarted") == ["event=engine_restarted instance=a dp_rank=0 incarnation=start-2"]


async def test_look_now_does_not_wait_for_the_interval() -> None:
    board, reader = Board(), ScriptedReader([reading(1), reading(2)])
    worker = EngineWorker("a", reader, board, Pace(3600.0, None))
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(5):
        await board.wait()
        assert [snapshot.sequence for snapshot in board.take()] == [1]
        worker.look_now()
        await board.wait()
    assert [snapshot.sequence for snapshot in board.take()] == [2]
    assert reader.forgot == 1
    task.cancel()


def test_pace_follows_the_server_unless_fixed() -> None:
    free, fixed = Pace(None, None), Pace(2.0, 0.5)
    assert (free.interval, free.timeout) == (1.0, 0.8)
    for pace in (free, fixed):
        pace.suggest(4.0)
        pace.suggest(None)
        pace.suggest(0.0)
    assert (free.interval, fixed.interval) == (4.0, 2.0)
    assert free.timeout < free.interval
    assert fixed.timeout == 0.5
    free.suggest(1e9)
    assert free.interval == 60.0
    free.suggest(1e-9)
    assert free.interval == 0.1


def test_log_lines_keep_to_one_line() -> None:
    text = line("e", plain="x:1", quoted='two words "here"', broken="a\nb", empty="", number=1.23456, none=None)
    assert text == "event=e plain=x:1 quoted='two words \"here\"' broken='a\\nb' empty='' number=1.235 none=None"


async def test_an_engine_where_nobody_listens_any_more_is_reported_as_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """At the third refusal in a row, and again until it is taken; a silent one is not."""
    refused, silent = EngineUnreachable("refused", refused=True), EngineUnreachable("no answer")
    outcomes: list[Reading | Exception] = [
        reading(7), refused, refused, silent, refused, refused, refused, refused, reading(1, "start-2"),
    ]  # fmt: skip
    board = Board()
    worker = EngineWorker("a", ScriptedReader(outcomes), board, Pace(1.0, None))
    await look(worker, 1)
    assert [s.sequence for s in board.take()] == [7]
    await look(worker, 5)
    assert board.take() == []
    for sequence in (8, 9):
        await look(worker, 1)
        (stopped,) = board.take()
        assert (stopped.state, stopped.sequence, stopped.incarnation) == (INSTANCE_STATE_STOPPED, sequence, "start-1")
    assert len(messages(caplog, "engine_stopped")) == 1
    await look(worker, 1)
    assert [s.incarnation for s in board.take()] == ["start-2"]


async def test_what_was_said_often_enough_is_not_said_again() -> None:
    board = Board()
    outcomes: list[Reading | Exception] = [reading(), EngineUnreachable("refused", refused=True)]
    worker = EngineWorker("a", ScriptedReader(outcomes), board, Pace(1.0, None))
    await look(worker, REFUSALS + REPEATS)
    assert len(board.take()) == 1
    await look(worker, 20)
    assert board.take() == []


async def test_an_engine_that_was_never_there_is_not_reported() -> None:
    board = Board()
    worker = EngineWorker("a", ScriptedReader([EngineUnreachable("refused", refused=True)]), board, Pace(1.0, None))
    await look(worker, 5)
    assert board.take() == []
