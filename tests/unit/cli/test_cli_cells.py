"""Cells: ages, escapes, unknown against absent; and the table printer."""

from __future__ import annotations

from datetime import timedelta

import pytest

from moorage.cli import cells
from moorage.cli.tables import labelled, table
from moorage.v1 import inspector_pb2 as inspector
from moorage.v1 import scheduler_pb2 as scheduler
from tests.unit.cli import samples


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"), (-3, "0s"), (0.35, "350ms"), (1, "1s"), (1.25, "1.2s"), (41.4, "41s"), (119, "119s"), (120, "2m"),
        (7199, "119m"), (7200, "2h0m"), (11100, "3h5m"), (172799, "47h59m"), (187200, "2d4h"), (86400 * 400, "400d0h"),
    ],
)  # fmt: skip
def test_ages_read_as_people_say_them(seconds: float, shown: str) -> None:
    assert cells.age(seconds) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [("", "<none>"), ("plain", "plain"), ("a b", "a\\x20b"), ("\t\n\x1b[0m", "\\t\\n\\x1b[0m"), ("é日本", "é日本"),
     ("\u202e", "\\u202e"), ("\xa0", "\\xa0")],
)  # fmt: skip
def test_cells_hold_no_spaces_and_nothing_that_steers(text: str, shown: str) -> None:
    assert cells.cell(text) == shown


def test_a_clock_that_is_behind_gives_no_negative_age() -> None:
    session = samples.session()
    assert cells.since(session, "admitted_time", samples.NOW - timedelta(hours=1)) == "0s"
    assert cells.since(inspector.Session(), "admitted_time", samples.NOW) == "<unknown>"


def test_absent_fields_are_unknown_and_zero_is_zero() -> None:
    snapshot = scheduler.InstanceSnapshot(used_blocks=0)
    assert cells.optional(snapshot, "used_blocks") == "0"
    assert cells.optional(snapshot, "total_blocks") == "<unknown>"
    assert cells.clock_time(snapshot, "observed_time") == "<unknown>"
    assert cells.percent(None) == "<unknown>"
    assert cells.percent(0.0) == "0.0%"
    assert cells.pairs({}) == "<none>"


def test_tables_align_left_without_trailing_spaces() -> None:
    assert table(("NAME", "A"), [("x", "1"), ("longer", "")]) == ["NAME    A", "x       1", "longer"]
    assert table(("NAME", "A"), []) == ["NAME  A"]
    assert labelled([("A", "1"), ("Long", "2")]) == ["A:     1", "Long:  2"]
