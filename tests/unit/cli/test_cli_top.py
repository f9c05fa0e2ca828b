"""moorage top: the frame as a pure function, and the verb that prints it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from moorage.cli import top as top_module
from moorage.cli.channel import connect
from moorage.cli.errors import RpcFailure
from moorage.cli.options import Settings
from moorage.cli.top import render
from moorage.v1 import inspector_pb2 as inspector
from moorage.v1 import operator_pb2 as operator
from tests.unit.cli import samples
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake import Code, Failure, FakeServer

WIDTH = 400  # so that no answer is wrapped


def _frame(**parts: object) -> list[str]:
    fields = {"pool": samples.pool(), "instances": samples.instances(), "classes": samples.classes(), "width": WIDTH}
    return render(**{**fields, **parts})  # type: ignore[arg-type]


def _answer(question: str, **parts: object) -> str:
    lines = [line for line in _frame(**parts) if line.startswith(question)]
    assert len(lines) == 1
    return lines[0][12:]


def test_the_title_names_pool_policy_mode_and_time() -> None:
    assert _frame(now=samples.NOW)[0] == "pool default  policy misa-t  ENFORCE  12.5 decisions/s  12:00:00"
    assert _frame()[0].endswith("decisions/s")
    observed = _frame(pool=samples.pool(mode=operator.MODE_OBSERVE))[0]
    assert "OBSERVE (nothing is held" in observed


def test_labels_are_mentioned_only_where_something_is_wrong_with_them() -> None:
    config = operator.PoolConfig(class_inference=operator.CLASS_INFERENCE_ALL)
    assert _answer("Labels", pool=samples.pool(mislabelled_total=3, inferred_total=2, config=config)) == (
        "5 without a class, 1 of a class nobody knows, 3 contradicted by behaviour; inference all, "
        "2 under an inferred class"
    )
    assert "; inference off, " in _answer("Labels")
    quiet = _frame(pool=samples.pool(unlabelled_total=0, unknown_class_total=0))
    assert not [line for line in quiet if line.startswith("Labels")]


@pytest.mark.parametrize(
    ("pressure", "hit_rate", "brake", "verdict"),
    [
        (0.02, 0.95, 1.0, "no; continuations hit 0.95 at worst (agentic, healthy is 0.90)"),
        (0.35, 0.95, 1.0, "YES: "),
        (0.0, 0.6, 1.0, "YES: "),
        (0.1, 0.95, 1.0, "NEAR: "),
        (0.0, 0.82, 1.0, "NEAR: "),
        (0.0, 0.95, 0.88, "NEAR: "),
    ],
)
def test_is_it_thrashing(pressure: float, hit_rate: float, brake: float, verdict: str) -> None:
    answer = _answer(
        "Thrashing?",
        pool=samples.pool(pressure=pressure),
        instances=samples.instances(samples.instance(brake=brake)),
        classes=samples.classes(samples.workload_class(continuation_hit_rate=hit_rate)),
    )
    assert answer.startswith(verdict)


def test_thrashing_is_unknown_while_nothing_was_measured() -> None:
    quiet = {"pool": samples.pool(pressure=0.0), "classes": samples.classes(samples.bare_class())}
    assert _answer("Thrashing?", **quiet, instances=samples.instances(samples.bare_instance())) == (
        "UNKNOWN: no continuation was measured yet; pressure <unknown>, no brake"
    )
    gone = samples.instance(freshness=inspector.FRESHNESS_GONE)
    assert _answer("Thrashing?", **quiet, instances=samples.instances(gone)).startswith("UNKNOWN: no living instance")


def test_the_brake_is_named_with_its_reason() -> None:
    signal = inspector.Signal(name="brake", value=0.88, detail="2 preemptions")
    braked = [samples.instance(f"e{n}", brake=0.88, signals=[signal]) for n in range(5)]
    assert "brake on e0, e1, e2 and 2 more (2 preemptions)" in _answer(
        "Thrashing?", instances=samples.instances(*braked)
    )


def test_who_waits_and_why_comes_from_the_held_sessions() -> None:
    held = [samples.held_session("a"), samples.held_session("b", reason="QUEUED_BEHIND"), samples.held_session("c")]
    assert _answer("Waiting?", held=held) == (
        "4 held: agentic 3 (oldest 41s), rlvr 1 (oldest 41s); KV_BUDGET 2, QUEUED_BEHIND 1 (of 3 looked at): the "
        "forecast of held KV blocks leaves no room for it, until sessions end and free enough blocks, or the brake "
        "lets go"
    )


def test_who_waits_behind_others_waits_for_what_the_first_waits_for() -> None:
    held = [samples.held_session("b", reason="QUEUED_BEHIND")]
    assert _answer("Waiting?", held=held, first=samples.held_session("a")).endswith(
        "; QUEUED_BEHIND 1 (of 1 looked at); first in line, agentic: KV_BUDGET, needs 40 blocks, 12 fit"
    )


def test_where_all_queue_the_one_looked_at_says_behind_whom() -> None:
    first = samples.held_session("a", reason="QUEUED_BEHIND")
    first.hold.detail = "class 'rlhf' goes first and does not fit: 9 blocks; enters when those before it have entered"
    assert _answer("Waiting?", held=[first], first=first).endswith(
        "; QUEUED_BEHIND 1 (of 1 looked at); class 'rlhf' goes first and does not fit: 9 blocks"
    )


def test_nobody_waits() -> None:
    assert _answer("Waiting?", pool=samples.pool(held_sessions=0)) == "nobody"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"freshness": inspector.FRESHNESS_GONE}, "no instance is alive"),
        ({"cordoned": True}, "every instance is cordoned, draining or paused"),
        ({"active_sessions": 15}, "every instance is at its session cap"),
        ({"forecast_blocks": 690}, "the blocks of every instance are booked"),
        ({"brake": 0.7}, "the brake is on at vllm-0"),
        ({}, "others go first (order of the queue, quotas of the classes)"),
    ],
)
def test_without_held_sessions_the_instances_suggest_the_cause(changes: dict[str, Any], cause: str) -> None:
    answer = _answer("Waiting?", instances=samples.instances(samples.instance(**changes)))
    assert answer.endswith(f"; because {cause}")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "as asked; 0.9 points off over 250 samples; rlvr has 34.0% of 33.1% wanted"),
        ({"mixture_deviation": 7.25}, "OFF TARGET; 7.2 points off"),
        ({"completed_by_class": {"agentic": 9}}, "too early to say (9 of 100 samples); 0.9 points off; rlvr has"),
        ({"consumed_mixture": {}}, "UNKNOWN: nothing was completed yet"),
        ({"target_mixture": {}}, "UNKNOWN: no target is configured"),
    ],
)
def test_is_the_mixture_as_asked(changes: dict[str, object], verdict: str) -> None:
    assert _answer("Mixture?", pool=samples.pool(**changes)).startswith(verdict)


def test_the_load() -> None:
    at_work = samples.instances(samples.instance())
    assert _answer("Load", instances=at_work) == (
        "22 active of cap 30, 4 held; blocks: 980 booked, 520 forecast, 900 used, 1536 usable"
    )
    loose = samples.pool(session_cap=400)
    assert _answer("Load", pool=loose, instances=at_work).startswith("22 active, 4 held; "), "it limits nobody"
    idle = samples.pool(active_sessions=0, held_sessions=0)
    assert _answer("Load", pool=idle, instances=at_work).startswith("0 active, 0 held; ")
    assert ", <unknown> forecast, " in _answer("Load", instances=samples.instances(samples.bare_instance()))


def test_blocks_that_nothing_booked_explains() -> None:
    foreign = samples.instances(samples.instance(reserved_blocks=102, forecast_blocks=440), samples.instance("vllm-1"))
    assert _answer("Load", instances=foreign).endswith("; 450 used on vllm-0, 102 booked there: other traffic?")
    for fine in (
        {"reserved_blocks": 380, "forecast_blocks": 390},  # they grew
        {"reserved_blocks": 0, "forecast_blocks": 460},  # they were released since the engine reported
        {"reserved_blocks": 0, "forecast_blocks": 0, "freshness": inspector.FRESHNESS_STALE},
    ):
        assert "other traffic" not in _answer("Load", instances=samples.instances(samples.instance(**fine)))


def test_engines_are_mentioned_where_one_does_not_serve() -> None:
    fine = samples.instance()
    assert not [line for line in _frame(instances=samples.instances(fine)) if line.startswith("Engines")]
    stale, gone = inspector.FRESHNESS_STALE, inspector.FRESHNESS_GONE
    others = [
        samples.instance("e1", freshness=stale, stalled=True), samples.instance("e2", freshness=gone, stalled=True),
        samples.instance("e3", updating_weights=True), samples.instance("e4", freshness=stale),
    ]  # fmt: skip
    assert _answer("Engines", instances=samples.instances(fine, *others)) == (
        "1 of 5 fresh and serving; gone: e2, stale: e1, e4, stalled: e1, updating: e3"
    )


@pytest.mark.parametrize(("seconds", "said"), [(5, "0.90)"), (600, "0.90, last reported 10m ago)")])
def test_an_old_hit_rate_says_so(seconds: int, said: str) -> None:
    signal = inspector.Signal(name="continuation_hit_rate", value=0.95, age=Duration(seconds=seconds))
    answer = _answer("Thrashing?", instances=samples.instances(samples.instance(signals=[signal])))
    assert f"(agentic, healthy is {said}" in answer


def test_pressure_is_unknown_while_no_engine_has_a_hit_rate() -> None:
    bare = samples.instances(samples.bare_instance())
    assert "pressure <unknown>" in _answer("Thrashing?", pool=samples.pool(pressure=0.0), instances=bare)


def test_the_tables_hold_the_numbers() -> None:
    lines = _frame()
    assert "agentic  3     12      120   48.0%     48.6%   0.95       41s" in lines
    assert "new      0     0       0     0.0%      <none>  <unknown>  <none>" in lines
    vllm_0 = next(line for line in lines if line.startswith("vllm-0"))
    assert vllm_0.split() == [
        "vllm-0", "11", "15", "490", "450", "700", "0.02", "1.00", "FRESH:400ms", "agentic:6,rlvr:5",
    ]  # fmt: skip
    cordoned = _frame(instances=samples.instances(samples.instance(rank=1, cordoned=True)))
    assert cordoned[-1].startswith("vllm-0/1  ")
    assert " FRESH:400ms,SERVING,CORDONED " in cordoned[-1]


@pytest.mark.parametrize("width", [20, 40, 80, 132])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = _frame(width=width, held=[samples.held_session()])
    assert max(len(line) for line in lines) <= width


def test_an_empty_pool_has_a_frame() -> None:
    lines = render(
        inspector.GetPoolResponse(pool="p"), inspector.ListInstancesResponse(), inspector.ListClassesResponse(), 80
    )
    assert lines[0] == "pool p  policy <none>  ENFORCE  0.0 decisions/s"


@pytest.fixture
def watched(server: FakeServer) -> FakeServer:
    """A pool with held sessions."""
    server.answers.update(
        GetPool=samples.pool(),
        ListInstances=samples.instances(),
        ListClasses=samples.classes(),
        ListSessions=inspector.ListSessionsResponse(sessions=[samples.held_session()]),
    )
    return server


def test_once_prints_one_frame(run: Run, watched: FakeServer) -> None:
    text = run("top", "--once").stdout
    assert text.count("Thrashing?") == 1
    assert "KV_BUDGET 1" in text
    assert "\x1b" not in text
    request = watched.last("ListSessions")
    assert request.held is True
    assert watched.count("ListSessions") == 1, "one page, however long the queue"


def test_the_first_in_line_is_looked_at_where_most_wait_behind_it(run: Run, watched: FakeServer) -> None:
    behind = [samples.held_session(name, reason="QUEUED_BEHIND") for name in ("h1", "h2")]
    other = samples.held_session("r1", reason="QUEUED_BEHIND")
    other.workload_class = "rlvr"
    older = samples.held_session("h0", now=samples.NOW - timedelta(seconds=9), reason="QUEUED_BEHIND")
    watched.answers["ListSessions"] = inspector.ListSessionsResponse(sessions=[*behind, other, older])
    asked: list[str] = []

    def look(request: inspector.GetSessionRequest) -> inspector.GetSessionResponse | Failure:
        asked.append(request.session_id)
        if request.session_id == "h0":
            return Failure(Code.NOT_FOUND, "no such session", reason="SESSION_UNKNOWN")
        return inspector.GetSessionResponse(session=samples.held_session("r1"))

    watched.answers["GetSession"] = look
    text = " ".join(run("top", "--once").stdout.split())
    assert "QUEUED_BEHIND 4; first in line, agentic: KV_BUDGET, needs 40 blocks, 12 fit" in text
    assert asked == ["h0", "r1"], "the oldest of each class, until one waits for something else than others"


def test_frames_follow_each_other_where_there_is_no_terminal(run: Run, watched: FakeServer) -> None:
    text = run("top", "--iterations", "3", "--interval", "10ms").stdout
    assert text.count("Thrashing?") == 3
    assert text.count("\n\npool default") == 2
    assert watched.count("GetPool") == 3


@pytest.mark.usefixtures("watched")
def test_nobody_is_asked_for_holds_where_nobody_is_held(run: Run, watched: FakeServer) -> None:
    watched.answers["GetPool"] = samples.pool(held_sessions=0)
    run("top", "--once")
    assert watched.count("ListSessions") == 0


def test_a_failure_ends_it(run: Run, watched: FakeServer) -> None:
    watched.answers["GetPool"] = Failure(Code.NOT_FOUND, "pool 'default' is not known", reason="POOL_UNKNOWN")
    run("top", "--once", code=4)


def test_a_long_frame_is_cut_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LINES", "10")
    monkeypatch.setenv("COLUMNS", "80")
    top_module._redraw([f"line {number}" for number in range(30)], first=False)
    shown = capsys.readouterr().out
    assert "line 7" in shown
    assert "line 8" not in shown
    assert "... 22 more lines" in shown


def test_a_live_view_outlasts_a_failure_but_not_the_first_one(server: FakeServer) -> None:
    server.answers["GetPool"] = Failure(Code.UNAVAILABLE, "the store is unreachable", reason="STORE_UNAVAILABLE")
    with connect(Settings(server=server.address)) as api:
        lines = top_module._frame_or_error(api, first=False)
        assert "UNAVAILABLE: the store is unreachable" in lines[0]
        assert lines[1] == "reason: STORE_UNAVAILABLE"
        with pytest.raises(RpcFailure):
            top_module._frame_or_error(api, first=True)
