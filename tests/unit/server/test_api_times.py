"""Seconds on the wire."""

from __future__ import annotations

import pytest

from moorage_server.api.times import to_duration, to_seconds, to_timestamp


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.001, 1.5, 86_400.0, 604_800.000000001])
def test_durations_survive_the_way_there_and_back(seconds: float) -> None:
    assert to_seconds(to_duration(seconds)) == pytest.approx(seconds, abs=1e-10)


def test_a_duration_is_well_formed_just_below_a_second() -> None:
    message = to_duration(0.9999999999)
    assert (message.seconds, message.nanos) == (1, 0)


def test_milliseconds_of_today_are_exact_in_a_timestamp() -> None:
    for milliseconds in (1_796_021_356_939, 1_796_021_356_001, 1):
        message = to_timestamp(milliseconds / 1000.0)
        assert message.seconds * 1000 + message.nanos / 1e6 == milliseconds
