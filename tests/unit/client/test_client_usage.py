from __future__ import annotations

from moorage.usage import UsageLog
from moorage.v1.scheduler_pb2 import Usage


def test_nothing_told_is_nothing_known() -> None:
    log = UsageLog()
    assert log.total() == Usage()
    log.begin()
    log.finish()
    assert log.total() == Usage()
    assert log.take(10) == []


def test_the_latest_values_of_a_turn_win_and_zero_is_a_value() -> None:
    log = UsageLog()
    turn = log.begin(prompt_tokens=10)
    turn.update(cached_tokens=8, output_tokens=1)
    turn.update(cached_tokens=0, output_tokens=4)
    turn.update(output_tokens=None)
    assert log.total() == Usage(prompt_tokens=10, cached_tokens=0, output_tokens=4, context_tokens=14)


def test_a_told_context_wins_over_the_derived_one() -> None:
    log = UsageLog()
    log.begin(prompt_tokens=10).update(output_tokens=4, context_tokens=13)
    assert log.total().context_tokens == 13


def test_every_finished_turn_is_taken_once_in_order() -> None:
    log = UsageLog()
    for cached in (1, 2, 3):
        log.begin().update(cached_tokens=cached)
    log.finish()
    log.finish()
    first, second = log.take(2)
    assert [first.cached_tokens, second.cached_tokens] == [1, 2]
    log.put_back(second)
    log.put_back(first)
    assert [turn.cached_tokens for turn in log.take(10)] == [1, 2, 3]
    assert not log.has_unreported


def test_a_session_that_had_turns_elsewhere_goes_on_counting() -> None:
    log = UsageLog()
    log.least_number = 3
    assert [log.begin().number, log.begin().number] == [3, 4]
    log.least_number = 9
    assert [log.begin().number, log.begin().number] == [9, 10]
    log.least_number = 5
    assert log.begin().number == 11
