from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.proxy import usage as module
from moorage.proxy.usage import JsonTap, SseTap, TokenUsage, usage_of

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"usage": USAGE}, TokenUsage(9, 8, 4)),
        ({"usage": {**USAGE, "prompt_tokens_details": None}}, TokenUsage(9, None, 4)),
        ({"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 0}}}, TokenUsage(9, 0, 4)),
        (
            {"usage": {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}},
            TokenUsage(5, 4, 2),
        ),
        ({"type": "response.completed", "response": {"usage": {"input_tokens": 5}}}, TokenUsage(5, None, None)),
        ({"usage": {"prompt_tokens": "9", "completion_tokens": True, "prompt_tokens_details": 3}}, TokenUsage()),
        ({"usage": None}, None),
        ({"response": "text"}, None),
        ([], None),
        (None, None),
    ],
)
def test_what_is_not_said_is_unknown(message: Any, expected: TokenUsage | None) -> None:
    assert usage_of(message) == expected


def event(content: object, newline: str = "\n") -> bytes:
    return f"data: {json.dumps(content)}{newline * 2}".encode()


def stream(newline: str = "\n") -> list[bytes]:
    return [
        f": a comment{newline * 2}".encode(),
        event({"choices": [{"text": 'it says "usage" and }\n\n'}], "usage": None}, newline),
        event({"choices": [{"text": "ä"}]}, newline),
        event({"choices": [], "usage": USAGE}, newline),
        f"data: [DONE]{newline * 2}".encode(),
    ]


@given(
    cuts=st.lists(st.integers(0, 400), max_size=12), newline=st.sampled_from(["\n", "\r\n", "\r"]), hide=st.booleans()
)
def test_a_stream_may_be_cut_anywhere(cuts: list[int], newline: str, hide: bool) -> None:
    events = stream(newline)
    whole = b"".join(events)
    tap, passed, start = SseTap(hide_usage=hide), b"", 0
    for cut in (*sorted(cuts), len(whole)):
        passed += tap.feed(whole[start : max(start, cut)])
        start = max(start, cut)
    passed += tap.end()
    assert passed == b"".join(events[:3] + events[4:] if hide else events)
    assert tap.usage == TokenUsage(9, 8, 4)


def test_events_are_passed_on_as_soon_as_they_are_whole() -> None:
    tap = SseTap(hide_usage=True)
    first, second = event({"choices": [1]}), event({"choices": [2]})
    assert tap.feed(first + second[:5]) == first
    assert tap.feed(second[5:]) == second


def test_usage_beside_choices_is_never_hidden() -> None:
    tap, both = SseTap(hide_usage=True), event({"choices": [{"text": "a"}], "usage": USAGE})
    assert tap.feed(both) == both
    assert tap.usage == TokenUsage(9, 8, 4)


def test_a_stream_without_its_last_blank_line_counts() -> None:
    tap, last = SseTap(), event({"choices": [], "usage": USAGE}).rstrip()
    assert tap.feed(last) + tap.end() == last
    assert tap.usage is not None


def test_what_is_no_stream_of_events_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_BYTES", 100)
    tap, noise = SseTap(hide_usage=True), [b'"usage"' * 10, b"x" * 60, b"y" * 10, b"\n\n"]
    passed = [tap.feed(chunk) for chunk in noise]
    assert b"".join(passed) + tap.end() == b"".join(noise)
    assert passed[2] == noise[2]
    assert tap.usage is None


def test_broken_json_is_passed_on() -> None:
    tap, broken = SseTap(hide_usage=True), b'data: {"usage": \n\ndata: "usage"\n\n'
    assert tap.feed(broken) == broken
    assert tap.usage is None


@given(cuts=st.lists(st.integers(0, 200), max_size=5))
def test_a_whole_answer_is_read_and_passed_on(cuts: list[int]) -> None:
    whole = json.dumps({"choices": [], "usage": USAGE}).encode()
    tap, start = JsonTap(), 0
    for cut in (*sorted(cuts), len(whole)):
        piece = whole[start : max(start, cut)]
        assert tap.feed(piece) == piece
        start = max(start, cut)
    assert tap.end() == b""
    assert tap.usage == TokenUsage(9, 8, 4)


def test_an_answer_that_is_too_long_or_no_json_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, text = JsonTap(), JsonTap()
    assert text.feed(b"not json") == b"not json"
    for tap in (empty, text):
        tap.end()
        assert tap.usage is None
    monkeypatch.setattr(module, "MAX_READ_BYTES", 10)
    long = JsonTap()
    long.feed(json.dumps({"usage": USAGE}).encode())
    long.end()
    assert long.usage is None
