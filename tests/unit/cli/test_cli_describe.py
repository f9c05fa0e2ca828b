"""moorage describe and explain: one thing at length."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
import yaml
from google.protobuf.json_format import Parse

from moorage.cli.explain import explanation
from moorage.v1 import inspector_pb2 as inspector
from moorage.v1 import operator_pb2 as operator
from moorage.v1 import scheduler_pb2 as scheduler
from tests.unit.cli import samples
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake import Code, Failure, FakeServer


def _fields(text: str) -> dict[str, str]:
    """The labelled lines."""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def test_describe_pool(run: Run, server: FakeServer) -> None:
    server.answers["GetPool"] = samples.pool()
    text = run("describe", "pool").stdout
    fields = _fields(text)
    assert fields["Sessions"] == "22 active, 4 held, cap 30"
    assert fields["Mixture"] == "0.9 points off target"
    assert fields["healthy_hit_rate"] == "0.9"
    assert "  agentic  12      3     130       120        48.0%     48.6%" in text.splitlines()


def test_a_mixture_without_target_is_unknown(run: Run, server: FakeServer) -> None:
    server.answers.update(GetPool=inspector.GetPoolResponse(pool="default"), ListInstances=samples.instances())
    fields = _fields(run("describe", "pool").stdout)
    assert fields["Mixture"] == "<unknown>"
    assert fields["Blocks"] == "0 reserved, <unknown> used, <unknown> usable"


def test_describe_instance_shows_its_ranks(run: Run, server: FakeServer) -> None:
    server.answers["ListInstances"] = samples.instances(
        samples.instance(), samples.instance(rank=1), samples.instance("other")
    )
    text = run("describe", "instance", "vllm-0").stdout
    assert text.count("Name:             vllm-0") == 2
    assert "continuation_hit_rate  0.95       <unknown>  over 8 s" in text
    assert "  agentic  6       9" in text
    assert _fields(text)["Prefix index"] == "640 blocks, events, updated 1s ago"
    one = json.loads(run("describe", "instance", "vllm-0", "--rank", "1", "-o", "json").stdout)
    assert [item["snapshot"]["dpRank"] for item in one["instances"]] == [1]


def test_an_index_that_is_behind_is_not_used(run: Run, server: FakeServer) -> None:
    index = inspector.PrefixIndex(source="events", blocks=640, behind=True)
    server.answers["ListInstances"] = samples.instances(samples.instance(prefix_index=index), samples.bare_instance())
    known = _fields(run("describe", "instance", "vllm-0").stdout)["Prefix index"]
    assert known == "640 blocks, events, updated <unknown> ago, behind: not used"
    assert _fields(run("describe", "instance", "vllm-1").stdout)["Prefix index"] == "<none>"


@pytest.mark.parametrize(("kind", "noun"), [("instance", "instances"), ("class", "classes")])
def test_describing_what_is_not_there_is_not_found(run: Run, server: FakeServer, kind: str, noun: str) -> None:
    server.answers.update(ListInstances=samples.instances(), ListClasses=samples.classes())
    result = run("describe", kind, "nobody", code=4)
    assert result.stderr.startswith(f"error: NOT_FOUND: no {kind} 'nobody' in pool 'default'")
    assert f"moorage get {noun}" in result.stderr


def test_describe_session(run: Run, server: FakeServer) -> None:
    answer = inspector.GetSessionResponse(session=samples.session(), history=samples.history("admit", "place"))
    server.answers["GetSession"] = answer
    fields = _fields(run("describe", "session", "s1").stdout)
    assert fields["Class"] == "agentic (declared: tools)"
    assert fields["Home"] == "vllm-0 rank 0, incarnation i1"
    assert server.last("GetSession").session_id == "s1"
    assert Parse(run("describe", "session", "s1", "-o", "json").stdout, inspector.GetSessionResponse()) == answer


def test_describe_held_session_shows_the_hold(run: Run, server: FakeServer) -> None:
    server.answers["GetSession"] = inspector.GetSessionResponse(session=samples.held_session(), hold=samples.hold())
    fields = _fields(run("describe", "session", "h1").stdout)
    assert fields["Home"] == "<none>"
    assert fields["Reason"].startswith("KV_BUDGET: ")
    assert fields["Detail"] == "needs 40 blocks, 12 fit"


def test_describe_class(run: Run, server: FakeServer) -> None:
    config = operator.PoolConfig(classes={"agentic": operator.ClassConfig(target_share=48.6)})
    server.answers.update(ListClasses=samples.classes(), GetPool=samples.pool(config=config))
    text = run("describe", "class", "agentic").stdout
    assert _fields(text)["Residency"] == "60s"
    assert _fields(text)["Reference"] == "40.2 blocks a session holds on average"
    assert _fields(text)["Quota"] == "881 blocks over all instances"
    assert text.endswith("Config:\n  target_share: 48.6\n")
    assert run("describe", "class", "new").stdout.endswith("Config: <none>\n")
    assert yaml.safe_load(run("describe", "class", "new", "-o", "yaml").stdout)["classes"][0]["workloadClass"] == "new"


def test_explain_says_why_a_session_is_held_and_until_what(run: Run, server: FakeServer) -> None:
    now = datetime.now(UTC)
    answer = inspector.GetSessionResponse(
        session=samples.held_session(now=now), hold=samples.hold(now=now), history=samples.history("hold")
    )
    server.answers["GetSession"] = answer
    text = run("explain", "h1").stdout
    fields = _fields(text)
    assert text.startswith("session/h1 (class agentic) is held: KV_BUDGET\n")
    assert fields["Held for"] in ("41s", "42s")
    assert fields["Place"] == "3 in the queue of its class; 5 go first in all"
    assert fields["Until"] == "sessions end and free enough blocks, or the brake lets go"
    assert fields["Ask again"] == "in 1s"
    assert "why hold" in text
    assert Parse(run("explain", "h1", "-o", "json").stdout, inspector.GetSessionResponse()) == answer
    assert yaml.safe_load(run("explain", "h1", "-o", "yaml").stdout)["hold"]["reason"] == "HOLD_REASON_KV_BUDGET"


@pytest.mark.parametrize("number", sorted(set(scheduler.HoldReason.values()) - {0}))
def test_every_hold_reason_has_words(number: scheduler.HoldReason.ValueType) -> None:
    name = scheduler.HoldReason.Name(number).removeprefix("HOLD_REASON_")
    answer = inspector.GetSessionResponse(session=samples.held_session(reason=name))
    text = "\n".join(explanation(answer, samples.NOW))
    assert f"Reason:     {name}: " in text
    assert "does not know" not in text


def test_a_reason_of_a_newer_server_is_shown_as_its_number() -> None:
    answer = inspector.GetSessionResponse(session=samples.held_session())
    answer.session.hold.reason = 99  # type: ignore[assignment]
    assert "Reason:     99: a reason this version does not know" in "\n".join(explanation(answer, samples.NOW))


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (scheduler.PHASE_PLACED, "was placed"),
        (scheduler.PHASE_RUNNING, "is running"),
        (scheduler.PHASE_TOOL_WAIT, "waits for a tool"),
        (scheduler.PHASE_PAUSED, "was released as paused"),
    ],
)
def test_explain_says_where_a_session_is_that_is_not_held(phase: scheduler.Phase.ValueType, words: str) -> None:
    answer = inspector.GetSessionResponse(session=samples.session(phase=phase), history=samples.history("admit"))
    lines = list(explanation(answer, samples.NOW))
    assert words in lines[0]
    assert lines[1] == "  on instance vllm-0 rank 0, 40 blocks reserved"
    assert "why admit" in lines[-1]


@pytest.mark.parametrize(
    ("declared", "inferred", "line"),
    [
        ("agentic", "", None),
        ("agentic", "agentic", None),
        ("tools", "agentic", "  declared as tools; behaves like agentic(0.97)"),
        ("agentic", "rlvr", "  declared as agentic; behaves like rlvr(0.97)"),
        ("", "", "  declared no class"),
    ],
)
def test_explain_says_what_is_wrong_with_a_label(declared: str, inferred: str, line: str | None) -> None:
    sure = 0.97 if inferred else 0.0
    session = samples.session(declared_class=declared, inferred_class=inferred, inferred_confidence=sure)
    lines = list(explanation(inspector.GetSessionResponse(session=session), samples.NOW))
    assert [text for text in lines if "declared" in text] == ([line] if line else [])


def test_describe_session_shows_what_it_behaves_like(run: Run, server: FakeServer) -> None:
    session = samples.session(inferred_class="rlvr", inferred_confidence=0.9)
    server.answers["GetSession"] = inspector.GetSessionResponse(session=session)
    assert _fields(run("describe", "session", "s1").stdout)["Behaves like"] == "rlvr(0.90)"
    server.answers["GetSession"] = inspector.GetSessionResponse(session=samples.session())
    assert _fields(run("describe", "session", "s1").stdout)["Behaves like"] == "<none>"


def test_explain_shows_what_enforce_would_have_said() -> None:
    answer = inspector.GetSessionResponse(session=samples.session(), hold=samples.hold("POOL_CAP"))
    assert any("in mode ENFORCE it would be held: reason=POOL_CAP" in line for line in explanation(answer, samples.NOW))


def test_explain_of_an_unknown_session_is_not_found(run: Run, server: FakeServer) -> None:
    server.answers["GetSession"] = Failure(Code.NOT_FOUND, "session 'x' is not known", reason="SESSION_UNKNOWN")
    result = run("explain", "x", code=4)
    assert result.stdout == ""
    assert "reason: SESSION_UNKNOWN" in result.stderr
    assert "moorage get sessions" in result.stderr
