"""moorage get: every noun in every format, pages, filters."""

from __future__ import annotations

import json

import pytest
import yaml
from google.protobuf.json_format import Parse
from google.protobuf.message import Message

from moorage.v1 import inspector_pb2 as inspector
from moorage.v1 import scheduler_pb2 as scheduler
from tests.unit.cli import samples
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake import FakeServer

ODD = "a b\n\x1b[2J{c}"


@pytest.fixture(autouse=True)
def _answers(server: FakeServer) -> None:
    server.answers.update(
        GetPool=samples.pool(),
        ListInstances=samples.instances(),
        ListClasses=samples.classes(),
        ListSessions=inspector.ListSessionsResponse(sessions=[samples.session(), samples.held_session()]),
    )


def _rows(text: str) -> list[list[str]]:
    """Cells, which hold no spaces; so a split finds as many in every line."""
    lines = [line.split() for line in text.splitlines()]
    assert all(len(line) == len(lines[0]) for line in lines), text
    return lines


@pytest.mark.parametrize(
    ("noun", "name", "age"),
    [
        ("pool", "default", None),
        ("instances", "vllm-0", "400ms"),
        ("sessions", "s1", None),
        ("classes", "agentic", "41s"),
    ],
)
@pytest.mark.parametrize("output", ["table", "wide"])
def test_tables_begin_with_the_name_and_end_with_the_age(
    run: Run, noun: str, name: str, age: str | None, output: str
) -> None:
    header, first, *_ = _rows(run("get", noun, "-o", output).stdout)
    assert (header[0], first[0]) == ("NAME", name)
    if noun in ("instances", "sessions"):
        assert header[-1] == "AGE"
    if age is not None:
        assert first[-1] == age


@pytest.mark.parametrize("noun", ["pool", "instances", "sessions", "classes"])
def test_wide_adds_columns(run: Run, noun: str) -> None:
    table, wide = (_rows(run("get", noun, "-o", output).stdout) for output in ("table", "wide"))
    assert set(table[0]) < set(wide[0])
    assert len(table) == len(wide)


@pytest.mark.parametrize(
    ("noun", "method"),
    [("pool", "GetPool"), ("instances", "ListInstances"), ("sessions", "ListSessions"), ("classes", "ListClasses")],
)
def test_json_and_yaml_are_the_answer_itself(run: Run, server: FakeServer, noun: str, method: str) -> None:
    answer = server.answers[method]
    assert isinstance(answer, Message)
    as_json = run("get", noun, "-o", "json").stdout
    as_yaml = run("get", noun, "-o", "yaml").stdout
    assert Parse(as_json, type(answer)()) == answer
    assert yaml.safe_load(as_yaml) == json.loads(as_json)


def test_json_spells_zero_out_and_leaves_unknown_out(run: Run, server: FakeServer) -> None:
    server.answers["GetPool"] = inspector.GetPoolResponse(pool="default")
    pool = json.loads(run("get", "pool", "-o", "json").stdout)
    assert pool["heldSessions"] == "0"
    assert "usedBlocks" not in pool


@pytest.mark.parametrize(
    ("noun", "names"),
    [
        ("pool", "default\n"),
        ("instances", "vllm-0\nvllm-1\n"),
        ("sessions", "s1\nh1\n"),
        ("classes", "agentic\nrlvr\nnew\n"),
    ],
)
def test_names_come_one_per_line(run: Run, noun: str, names: str) -> None:
    assert run("get", noun, "-o", "name").stdout == names


def test_ranks_of_one_instance_share_a_name(run: Run, server: FakeServer) -> None:
    server.answers["ListInstances"] = samples.instances(samples.instance(), samples.instance(rank=1))
    assert run("get", "instances", "-o", "name").stdout == "vllm-0\n"
    assert [row[:2] for row in _rows(run("get", "instances").stdout)[1:]] == [["vllm-0", "0"], ["vllm-0", "1"]]


def test_unknown_is_never_zero(run: Run) -> None:
    header, _, bare = _rows(run("get", "instances").stdout)
    cells = dict(zip(header, bare, strict=True))
    unknown = {key for key, value in cells.items() if value == "<unknown>"}
    assert unknown == {"USED", "BUDGET", "PRESSURE", "BRAKE", "AGE"}
    assert cells["RESERVED"] == "0"


def test_instance_status_shows_what_an_operator_did(run: Run, server: FakeServer) -> None:
    server.answers["ListInstances"] = samples.instances(
        samples.instance(cordoned=True), samples.instance("b", draining=True, cordoned=True)
    )
    assert [row[2] for row in _rows(run("get", "instances").stdout)[1:]] == [
        "SERVING,CORDONED",
        "SERVING,DRAINING,CORDONED",
    ]


def test_odd_ids_stay_one_cell_and_never_steer_the_terminal(run: Run, server: FakeServer) -> None:
    server.answers["ListSessions"] = inspector.ListSessionsResponse(sessions=[samples.session(ODD)])
    assert _rows(run("get", "sessions").stdout)[1][0] == "a\\x20b\\n\\x1b[2J{c}"
    assert run("get", "sessions", "-o", "name").stdout == "a b\\n\\x1b[2J{c}\n"
    assert json.loads(run("get", "sessions", "-o", "json").stdout)["sessions"][0]["sessionId"] == ODD


def test_an_empty_list_still_prints_its_header(run: Run, server: FakeServer) -> None:
    server.answers["ListSessions"] = inspector.ListSessionsResponse()
    assert len(run("get", "sessions").stdout.splitlines()) == 1
    assert run("get", "sessions", "-o", "name").stdout == ""


def test_session_filters_reach_the_server(run: Run, server: FakeServer) -> None:
    run(
        "get", "sessions", "--class", "agentic", "--instance", "vllm-0", "--phase", "tool-wait", "--not-held", "-p", "p"
    )
    request = server.last("ListSessions")
    assert (request.pool, request.workload_class, request.instance_id) == ("p", "agentic", "vllm-0")
    assert request.phase == scheduler.PHASE_TOOL_WAIT
    assert request.HasField("held")
    assert request.held is False
    run("get", "sessions")
    assert not server.last("ListSessions").HasField("held")


def _paged_sessions(total: int, page: int) -> object:
    """Pages of at most `page` of `total` sessions, every second page empty, as filters may leave them."""

    def answer(request: inspector.ListSessionsRequest) -> inspector.ListSessionsResponse:
        start, _, empty = (request.page_token or "0:").partition(":")
        if empty:
            return inspector.ListSessionsResponse(next_page_token=f"{start}:")
        end = min(int(start) + min(request.page_size, page), total)
        names = [f"s{number}" for number in range(int(start), end)]
        return inspector.ListSessionsResponse(
            sessions=[inspector.Session(session_id=name) for name in names],
            next_page_token=f"{end}:empty" if end < total else "",
        )

    return answer


def test_all_pages_are_fetched(run: Run, server: FakeServer) -> None:
    server.answers["ListSessions"] = _paged_sessions(25, page=10)  # type: ignore[assignment]
    answer = json.loads(run("get", "sessions", "-o", "json").stdout)
    assert [item["sessionId"] for item in answer["sessions"]] == [f"s{number}" for number in range(25)]
    assert answer["nextPageToken"] == ""
    assert server.count("ListSessions") == 5


def test_a_limit_ends_between_pages_and_keeps_a_valid_token(run: Run, server: FakeServer) -> None:
    server.answers["ListSessions"] = _paged_sessions(25, page=10)  # type: ignore[assignment]
    answer = json.loads(run("get", "sessions", "--limit", "12", "-o", "json").stdout)
    assert len(answer["sessions"]) == 12
    assert answer["nextPageToken"] == "12:empty"


def test_all_pages_of_instances_and_classes_are_fetched(run: Run, server: FakeServer) -> None:
    first = samples.instances(samples.instance("a"))
    first.next_page_token = "more"
    second = samples.instances(samples.instance("b"))
    server.answers["ListInstances"] = lambda request: second if request.page_token == "more" else first
    more = inspector.ListClassesResponse(classes=[samples.bare_class("x")], next_page_token="more")
    last = inspector.ListClassesResponse(classes=[samples.bare_class("y")])
    server.answers["ListClasses"] = lambda request: last if request.page_token == "more" else more
    assert run("get", "instances", "-o", "name").stdout == "a\nb\n"
    assert run("get", "classes", "-o", "name").stdout == "x\ny\n"


@pytest.mark.parametrize(("known", "shown"), [(samples.instance(), "0.00"), (samples.bare_instance(), "<unknown>")])
def test_a_pressure_of_0_without_any_hit_rate_is_unknown(
    run: Run, server: FakeServer, known: inspector.Instance, shown: str
) -> None:
    server.answers.update(GetPool=samples.pool(pressure=0.0), ListInstances=samples.instances(known))
    header, row = (line.split() for line in run("get", "pool").stdout.splitlines())
    assert dict(zip(header, row, strict=True))["PRESSURE"] == shown
    described = run("describe", "pool").stdout
    assert f"Pressure: {shown}" in " ".join(described.split())
