"""moorage watch: lines, JSON lines, and what happens when the connection is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from moorage.cli import watch as watch_module
from moorage.v1 import inspector_pb2 as inspector
from tests.unit.cli import samples
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake import Code, Failure, FakeServer

Stream = Callable[[inspector.WatchEventsRequest], Iterator[object]]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_PAUSE", 0.01)


def _log(length: int, at_once: int, end: object = None) -> Stream:
    """Events numbered from 1; a stream sends `at_once` of them, those after the token, and then `end`."""

    def answer(request: inspector.WatchEventsRequest) -> Iterator[object]:
        first = int(request.resume_token or "0") + 1
        for number in range(first, min(first + at_once, length + 1)):
            yield samples.event(str(number))
        if end is not None:
            yield end

    return answer


def test_an_event_is_a_line(run: Run, server: FakeServer) -> None:
    server.answers["WatchEvents"] = [samples.event("7"), samples.event("8", session_id="", decision=0, kind="epoch")]
    assert run("watch", "--limit", "2", "-p", "q").stdout.splitlines() == [
        '2026-03-01T12:00:00.000Z admit session=s1 instance=vllm-0 decision=PLACE blocks=40 note="two words"',
        '2026-03-01T12:00:00.000Z epoch instance=vllm-0 blocks=40 note="two words"',
    ]
    assert server.last("WatchEvents") == inspector.WatchEventsRequest(pool="q")
    assert run("watch", "--limit", "1", "-o", "wide").stdout.endswith("resume-token=7\n")


def test_odd_text_stays_on_its_line(run: Run, server: FakeServer) -> None:
    server.answers["WatchEvents"] = [samples.event("1", session_id='a "b"\n=c', values={})]
    assert 'session="a \\"b\\"\\\\n=c"' in run("watch", "--limit", "1").stdout


def test_json_is_one_object_per_line(run: Run, server: FakeServer) -> None:
    server.answers["WatchEvents"] = _log(3, at_once=3)
    lines = run("watch", "--limit", "3", "-o", "json").stdout.splitlines()
    assert [json.loads(line)["resumeToken"] for line in lines] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("args", "token"), [([], ""), (["--since-start"], "0"), (["--resume", "41"], "41"), (["--resume", ""], "")]
)
def test_where_it_begins(run: Run, server: FakeServer, args: list[str], token: str) -> None:
    server.answers["WatchEvents"] = [samples.event("1")]
    run("watch", "--limit", "1", *args)
    assert server.last("WatchEvents").resume_token == token


@pytest.mark.parametrize("end", [Failure(Code.UNAVAILABLE, "going away"), None])
def test_a_lost_connection_continues_after_the_last_event(run: Run, server: FakeServer, end: object) -> None:
    server.answers["WatchEvents"] = _log(5, at_once=2, end=end)
    lines = run("watch", "--since-start", "--limit", "5", "-o", "json").stdout.splitlines()
    assert [json.loads(line)["resumeToken"] for line in lines] == ["1", "2", "3", "4", "5"]
    asked = [request.resume_token for name, request in server.requests if name == "WatchEvents"]
    assert asked == ["0", "2", "4"]


def test_a_server_that_stays_away_ends_the_watch(run: Run, server: FakeServer) -> None:
    server.answers["WatchEvents"] = _log(1, at_once=1, end=Failure(Code.UNAVAILABLE, "going away"))
    result = run("watch", "--since-start", "--timeout", "100ms", code=5)
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr.startswith("error: UNAVAILABLE: going away")
    assert server.count("WatchEvents") > 2


def test_a_first_failure_ends_it_at_once(run: Run, server: FakeServer) -> None:
    server.answers["WatchEvents"] = [Failure(Code.UNAVAILABLE, "no store")]
    run("watch", code=5)
    assert server.count("WatchEvents") == 1


def test_other_failures_end_it(run: Run, server: FakeServer) -> None:
    server.answers["WatchEvents"] = _log(9, at_once=1, end=Failure(Code.OUT_OF_RANGE, "token 1 is too old"))
    result = run("watch", "--resume", "1", code=1)
    assert "--since-start" in result.stderr


def test_two_beginnings_are_one_too_many(run: Run) -> None:
    assert "exclude each other" in run("watch", "--since-start", "--resume", "3", code=2).stderr
