"""What the epoch's holder makes of the sessions that changed."""

from __future__ import annotations

from moorage_server.core.view import Ended
from moorage_server.runtime.mirror import Mirror
from moorage_server.store.records import Change


def _now(ctx: int, st: str = "live", inst: str = "0|i") -> dict[str, str]:
    return {
        "st": st,
        "class": "a",
        "inst": inst,
        "ctx": str(ctx),
        "ctx_at": "1000",
        "shr": "0",
        "phase": "RUNNING",
        "admitted": "500",
        "ask": "100,200,,",
    }


def _ended(ctx: int, outcome: str = "COMPLETED") -> dict[str, str]:
    return {"class": "a", "outcome": outcome, "ctx": str(ctx), "admitted": "500", "ask": "100,200,,"}


def test_growth_is_counted_from_the_prompt_to_the_end() -> None:
    mirror = Mirror()
    mirror.apply([Change("s", _now(100), None)])
    mirror.apply([Change("s", _now(180), None)])
    mirror.apply([Change("s", None, _ended(250))])
    happened = mirror.take()
    assert happened.grown == {"a": 150.0}
    assert happened.ended == [Ended("a", "COMPLETED", 100.0, 250.0, declared=300.0)]
    assert happened.declared == [("a", 300.0)]
    assert mirror.rows == {}
    assert mirror.take().ended == []


def test_a_move_is_no_growth() -> None:
    mirror = Mirror()
    mirror.apply([Change("s", _now(180), None)])
    mirror.take()
    mirror.apply([Change("s", _now(180, st="held", inst=""), None)])
    assert mirror.rows == {}
    mirror.apply([Change("s", _now(200, inst="0|j"), None)])
    assert mirror.rows["s"].instance == "0|j"
    assert mirror.rows["s"].start_tokens == 100.0
    assert mirror.take().grown == {"a": 20.0}


def test_a_session_of_another_class_takes_along_what_it_gained() -> None:
    mirror = Mirror()
    mirror.apply([Change("s", _now(180), None), Change("t", _now(150), None)])
    mirror.apply([Change("s", {**_now(200), "class": "b"}, None)])
    assert mirror.rows["s"].workload_class == "b"
    assert mirror.take().grown == {"a": 50.0, "b": 100.0}
    mirror.apply([Change("s", None, {**_ended(230), "class": "a"})])
    happened = mirror.take()
    assert happened.grown == {"a": 130.0, "b": -100.0}
    assert happened.ended == [Ended("a", "COMPLETED", 100.0, 230.0, declared=300.0)]


def test_a_session_that_ends_without_a_home_ends_as_what_it_was() -> None:
    mirror = Mirror()
    mirror.apply([Change("s", _now(180), None)])
    mirror.apply([Change("s", _now(180, st="held", inst=""), None)])
    mirror.apply([Change("s", None, _ended(180, "ABORTED"))])
    happened = mirror.take()
    assert (happened.grown, happened.ended) == ({"a": 80.0}, [Ended("a", "ABORTED", 100.0, 180.0, declared=300.0)])


def test_a_new_holder_counts_only_what_nobody_has_counted() -> None:
    mirror = Mirror()
    mirror.apply([Change("lives", _now(180), None), Change("ended", None, _ended(250))])
    mirror.inherit()
    happened = mirror.take()
    assert (happened.grown, happened.declared) == ({}, [])
    assert happened.ended == [Ended("a", "COMPLETED", 100.0, 250.0, declared=300.0)]
    mirror.apply([Change("lives", _now(190), None)])
    assert mirror.take().grown == {"a": 10.0}


def test_who_was_never_admitted_did_not_end() -> None:
    mirror = Mirror()
    mirror.apply([Change("s", _now(100, st="held", inst=""), None)])
    mirror.apply([Change("s", None, None)])
    assert mirror.take().ended == []


def test_who_has_a_later_turn_or_announced_one_returns() -> None:
    mirror = Mirror()
    one, many = {**_now(100), "ask": "100,200,,1"}, {**_now(100), "ask": "100,200,,5"}
    mirror.apply([Change("silent", _now(100), None), Change("one", one, None), Change("many", many, None)])
    assert [sid for sid, row in mirror.rows.items() if row.returns] == ["many"]
    # After its last turn, too, a session may be told to wait for a tool.
    mirror.apply([Change("one", {**one, "turn": "0", "phase": "TOOL_WAIT"}, None)])
    assert not mirror.rows["one"].returns
    mirror.apply([Change("silent", {**_now(100), "turn": "1"}, None)])
    mirror.apply([Change("silent", {**_now(100), "turn": "0"}, None)])
    assert mirror.rows["silent"].returns, "and stays one that does"
