"""moorage admit, place, release, heartbeat: requests from flags and files, answers, exit codes."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import yaml
from google.protobuf.json_format import MessageToJson, Parse

from moorage.v1 import scheduler_pb2 as scheduler
from tests.unit.cli import samples
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake import FakeServer

HOLD = scheduler.DECISION_HOLD
REJECT = scheduler.DECISION_REJECT


def test_admit_prints_where_and_the_lease(run: Run, server: FakeServer) -> None:
    server.answers["Admit"] = samples.placed()
    line = "session/s1 admitted instance=vllm-0 rank=1 endpoint=http://vllm-0:8000 lease-token=t-1 ttl=60s\n"
    assert run("admit", "s1").stdout == line
    assert run("admit", "s1", "-o", "name").stdout == "s1\n"
    assert Parse(run("admit", "s1", "-o", "json").stdout, scheduler.AdmitResponse()) == samples.placed()
    assert yaml.safe_load(run("admit", "s1", "-o", "yaml").stdout)["lease"]["token"] == "t-1"


@pytest.mark.parametrize("output", ["table", "json", "yaml", "name"])
@pytest.mark.parametrize("decision", [HOLD, REJECT])
def test_a_refusal_exits_with_3_in_every_format(
    run: Run, server: FakeServer, decision: scheduler.Decision.ValueType, output: str
) -> None:
    server.answers["Admit"] = scheduler.AdmitResponse(decision=decision, hold=samples.hold())
    result = run("admit", "s1", "-o", output, code=3)
    assert result.stdout
    assert result.stderr == ""


def test_a_hold_says_why(run: Run, server: FakeServer) -> None:
    server.answers["Admit"] = scheduler.AdmitResponse(decision=HOLD, hold=samples.hold("POOL_CAP"))
    assert run("admit", "s1", code=3).stdout == (
        'session/s1 held reason=POOL_CAP position=3 ahead=5 retry-after=1s detail="needs 40 blocks, 12 fit"\n'
    )
    reject = scheduler.Hold(reason=scheduler.HOLD_REASON_TOO_LARGE, detail="9000 > 700")
    server.answers["Admit"] = scheduler.AdmitResponse(decision=REJECT, hold=reject)
    assert run("admit", "s1", code=3).stdout == 'session/s1 rejected reason=TOO_LARGE detail="9000 > 700"\n'


def test_observe_mode_shows_the_hold_that_did_not_bind(run: Run, server: FakeServer) -> None:
    server.answers["Admit"] = samples.placed(hold=samples.hold("CLASS_CAP"))
    assert run("admit", "s1").stdout.endswith(" observed-hold=CLASS_CAP\n")


def test_admit_flags_become_the_request(run: Run, server: FakeServer) -> None:
    server.answers["Admit"] = samples.placed()
    run(
        "admit", "s 1", "--class", "agentic", "--group", "g", "--group-size", "8", "--policy-version", "-1",
        "--prompt-tokens", "0", "--expected-output-tokens", "900", "--expected-turns", "4", "--max-context-tokens",
        "4096", "--prefix-hash", "0xff", "--prefix-hash", str(2**64 - 1), "--max-wait", "1500ms", "--lease-ttl", "2m",
        "--tenant", "t", "--label", "a=b=c", "--label", "d=", "--request-id", "r1", "--timeout", "7", "-p", "other",
    )  # fmt: skip
    expected = scheduler.AdmitRequest(
        pool="other", request_id="r1", session_id="s 1", workload_class="agentic", group_id="g", group_size=8,
        policy_version=-1, prompt_tokens=0, expected_output_tokens=900, expected_turns=4, max_context_tokens=4096,
        prefix_hashes=[255, 2**64 - 1], tenant="t", labels={"a": "b=c", "d": ""},
    )  # fmt: skip
    expected.max_wait.FromMilliseconds(1500)
    expected.lease_ttl.FromSeconds(120)
    assert server.last("Admit") == expected
    deadline = server.deadlines[-1]
    assert deadline is not None
    assert 8.0 < deadline < 9.0, "the deadline is the timeout plus the wait"


def test_absent_flags_stay_absent_and_a_request_id_is_made(run: Run, server: FakeServer) -> None:
    server.answers["Admit"] = samples.placed()
    run("admit", "s1")
    request = server.last("Admit")
    assert uuid.UUID(request.request_id).version == 4
    assert {field.name for field, _ in request.ListFields()} == {"pool", "request_id", "session_id"}


def test_a_body_comes_from_a_file_or_stdin_and_flags_go_over_it(run: Run, server: FakeServer, tmp_path: Path) -> None:
    server.answers["Admit"] = samples.placed()
    body = MessageToJson(
        scheduler.AdmitRequest(pool="p", request_id="r", session_id="s1", tenant="t", prefix_hashes=[1, 2])
    )
    (tmp_path / "admit.json").write_text(body)
    run("admit", "-f", "admit.json")
    assert server.last("Admit") == Parse(body, scheduler.AdmitRequest())
    run("admit", "s2", "-f", "-", "--tenant", "u", "--prefix-hash", "3", "--pool", "q", stdin=body)
    assert server.last("Admit") == scheduler.AdmitRequest(
        pool="q", request_id="r", session_id="s2", tenant="u", prefix_hashes=[3]
    )


def test_the_pool_of_a_body_goes_over_the_environment(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["Admit"] = samples.placed()
    monkeypatch.setenv("MOORAGE_POOL", "env")
    run("admit", "-f", "-", stdin='{"pool": "body", "sessionId": "s"}')
    assert server.last("Admit").pool == "body"
    run("admit", "-f", "-", stdin='{"sessionId": "s"}')
    assert server.last("Admit").pool == "env"


@pytest.mark.parametrize(
    ("args", "stdin", "complaint"),
    [
        (["admit"], None, "missing SESSION"),
        (["admit", "-f", "-"], "{", "no AdmitRequest in protobuf JSON"),
        (["admit", "-f", "-"], '{"sessionIdd": "s"}', "no AdmitRequest in protobuf JSON"),
        (["admit", "-f", "nowhere.json"], None, "nowhere.json"),
        (["admit", "s", "--label", "x"], None, "KEY=VALUE"),
        (["admit", "s", "--max-wait", "soon"], None, "no duration"),
        (["admit", "s", "--prefix-hash", "-1"], None, "unsigned 64-bit"),
        (["admit", "s", "--prefix-hash", "0xzz"], None, "unsigned 64-bit"),
        (["admit", "s", "--prompt-tokens", "-1"], None, "--prompt-tokens"),
        (["admit", "s", "--group-size", str(2**32)], None, "--group-size"),
        (["place", "s"], None, "missing --lease-token"),
        (["place"], None, "missing SESSION, --lease-token"),
        (["release", "s"], None, "missing --outcome"),
        (["release", "s", "--outcome", "bored"], None, "--outcome"),
        (["heartbeat"], None, "nothing to report"),
        (["heartbeat", "--instance", "a"], None, "--incarnation"),
        (["heartbeat", "--session", "a"], None, "--lease-token"),
        (["heartbeat", "--rank", "1", "--lease-token", "t"], None, "--rank needs --instance"),
        (["heartbeat", "--instance", "a", "--incarnation", "i", "--turn", "1"], None, "--turn needs --session"),
        (["heartbeat", "-f", "-"], "instances: []", "no HeartbeatRequest"),
        (["heartbeat", "-f", "-"], "{}", "nothing to report"),
    ],
)
def test_usage_errors_exit_with_2_and_call_nobody(
    run: Run, server: FakeServer, args: list[str], stdin: str | None, complaint: str
) -> None:
    result = run(*args, code=2, stdin=stdin)
    assert complaint in result.stderr
    assert result.stdout == ""
    assert server.requests == []


def test_place(run: Run, server: FakeServer) -> None:
    answer = scheduler.PlaceResponse(
        decision=scheduler.DECISION_PLACE, placement=scheduler.Placement(instance_id="vllm-0", endpoint="http://e")
    )
    server.answers["Place"] = answer
    args = ["place", "s1", "--lease-token", "t", "--turn", "0", "--prompt-tokens", "77", "--prefix-hash", "9"]
    assert run(*args, "--max-wait", "2").stdout == "session/s1 placed instance=vllm-0 rank=0 endpoint=http://e\n"
    request = server.last("Place")
    assert (request.session_id, request.lease_token, request.turn, request.prompt_tokens) == ("s1", "t", 0, 77)
    assert request.HasField("turn")
    assert list(request.prefix_hashes) == [9]
    assert request.max_wait.seconds == 2
    assert run(*args, "-o", "name").stdout == "vllm-0\n"
    assert Parse(run(*args, "-o", "json").stdout, scheduler.PlaceResponse()) == answer
    assert yaml.safe_load(run(*args, "-o", "yaml").stdout)["decision"] == "DECISION_PLACE"


def test_place_tells_a_move_and_a_hold(run: Run, server: FakeServer) -> None:
    moved = scheduler.PlaceResponse(
        decision=scheduler.DECISION_PLACE, moved=True, placement=scheduler.Placement(instance_id="b", endpoint="e"),
        lease=scheduler.Lease(token="t-2"),
    )  # fmt: skip
    server.answers["Place"] = moved
    line = "session/s1 moved instance=b rank=0 endpoint=e lease-token=t-2\n"
    assert run("place", "s1", "--lease-token", "t").stdout == line
    server.answers["Place"] = scheduler.PlaceResponse(decision=HOLD, hold=samples.hold("WEIGHT_UPDATE"))
    assert "held reason=WEIGHT_UPDATE" in run("place", "s1", "--lease-token", "t", code=3).stdout
    assert run("place", "s1", "--lease-token", "t", "-o", "name", code=3).stdout == ""


def test_release(run: Run, server: FakeServer) -> None:
    answer = scheduler.ReleaseResponse(
        released=True, residency=scheduler.Residency(block_seconds=1234.4, peak_blocks=50)
    )
    answer.residency.duration.FromSeconds(90)
    server.answers["Release"] = answer
    args = ["release", "s1", "--lease-token", "t", "--outcome", "completed", "--output-tokens", "5"]
    assert run(*args).stdout == "session/s1 released residency=90s block-seconds=1234 peak-blocks=50\n"
    request = server.last("Release")
    assert request.outcome == scheduler.OUTCOME_COMPLETED
    assert [field.name for field, _ in request.usage.ListFields()] == ["output_tokens"]
    assert run(*args, "-o", "name").stdout == "s1\n"
    assert Parse(run(*args, "-o", "json").stdout, scheduler.ReleaseResponse()) == answer
    assert yaml.safe_load(run(*args, "-o", "yaml").stdout)["released"] is True


def test_releasing_a_held_session_needs_no_token_and_is_idempotent(run: Run, server: FakeServer) -> None:
    server.answers["Release"] = scheduler.ReleaseResponse(released=False)
    result = run("release", "s1", "--outcome", "PAUSED")
    assert result.stdout == "session/s1 not released: unknown or already over\n"
    request = server.last("Release")
    assert request.outcome == scheduler.OUTCOME_PAUSED
    assert not request.lease_token
    assert not request.HasField("usage")


def test_heartbeat_by_flags(run: Run, server: FakeServer) -> None:
    answer = scheduler.HeartbeatResponse(
        instances=[scheduler.InstanceAck(instance_id="vllm-0", accepted=True, dp_rank=2)],
        sessions=[scheduler.SessionAck(session_id="s1", known=True)],
    )
    server.answers["Heartbeat"] = answer
    args = [
        "heartbeat", "--instance", "vllm-0", "--rank", "2", "--incarnation", "i", "--endpoint", "http://e",
        "--total-blocks", "768", "--used-blocks", "0", "--state", "draining", "--session", "s1", "--lease-token", "t",
        "--phase", "tool-wait", "--context-tokens", "12",
    ]  # fmt: skip
    assert run(*args).stdout == "instance/vllm-0 rank=2 accepted\nsession/s1 renewed\n"
    request = server.last("Heartbeat")
    snapshot, progress = request.instances[0], request.sessions[0]
    assert (snapshot.instance_id, snapshot.dp_rank, snapshot.incarnation) == ("vllm-0", 2, "i")
    assert snapshot.state == scheduler.INSTANCE_STATE_DRAINING
    assert snapshot.HasField("used_blocks")
    assert not snapshot.HasField("running")
    assert snapshot.sequence > 1_700_000_000_000
    assert snapshot.HasField("observed_time")
    assert (progress.phase, progress.context_tokens) == (scheduler.PHASE_TOOL_WAIT, 12)
    assert Parse(run(*args, "-o", "json").stdout, scheduler.HeartbeatResponse()) == answer
    assert yaml.safe_load(run(*args, "-o", "yaml").stdout)["sessions"][0]["known"] is True


def test_heartbeat_sequences_grow_and_may_be_given(run: Run, server: FakeServer) -> None:
    server.answers["Heartbeat"] = scheduler.HeartbeatResponse()
    run("heartbeat", "--instance", "a", "--incarnation", "i", "--sequence", "7")
    assert server.last("Heartbeat").instances[0].sequence == 7
    assert server.last("Heartbeat").instances[0].state == scheduler.INSTANCE_STATE_SERVING


def test_heartbeat_items_that_were_not_taken_exit_with_3(run: Run, server: FakeServer) -> None:
    server.answers["Heartbeat"] = scheduler.HeartbeatResponse(
        instances=[
            scheduler.InstanceAck(instance_id="a", accepted=True),
            scheduler.InstanceAck(instance_id="b", reason="old sequence", reregister=True),
        ],
        sessions=[scheduler.SessionAck(session_id="s")],
    )
    body = json.dumps({"pool": "p", "instances": [{"instanceId": "a"}, {"instanceId": "b"}], "sessions": [{}]})
    assert run("heartbeat", "-f", "-", stdin=body, code=3).stdout.splitlines() == [
        "instance/a rank=0 accepted",
        "instance/b rank=0 refused: old sequence, register again",
        "session/s refused: unknown, over, or stale token",
    ]
    assert server.last("Heartbeat").pool == "p"
