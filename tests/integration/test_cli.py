"""The command line against a real server on a real Redis, as an operator would use it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from google.protobuf import json_format

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from tests.integration.engines import Engines
from tests.integration.processes import COMMAND, PATIENCE_S, Server, environment, eventually, moorage

#: Flags of a session of which several fit on an engine of the tests.
SMALL = ("--prompt-tokens", "64", "--max-context-tokens", "128")


class Operator:
    """Runs the command on one pool, and fails loudly on an exit code that was not expected."""

    def __init__(self, server: Server, pool: str) -> None:
        self.server, self.pool = server, pool
        self.env = {"MOORAGE_SERVER": server.address, "MOORAGE_POOL": pool}

    def __call__(self, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
        done = moorage(*arguments, env=self.env, stdin=stdin)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout or done.stderr

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "-o", "json", code=code))

    def admitted(self, session: str, *flags: str) -> pb.AdmitResponse:
        return json_format.Parse(self("admit", session, *flags, "-o", "json"), pb.AdmitResponse())


@pytest.fixture
def operator(shared_server: Server, pool: str) -> Operator:
    """An operator of a pool without instances."""
    return Operator(shared_server, pool)


@pytest.fixture
def crowded(operator: Operator) -> Iterator[Operator]:
    """A pool of two engines that take one session each: `a` and `b` live, `c` is held."""
    operator("config", "set", "--policy", "static", "--static-cap", "1", "--epoch-interval", "200ms")
    operator("config", "mixture", "agentic=48.6", "rlvr=33.1", "rlhf=18.2")
    with Engines(operator.server.api, "engine-0", "engine-1", pool=operator.pool):
        for session in ("a", "b"):
            operator("admit", session, "--class", "agentic", "--prompt-tokens", "64", "--max-wait", "20s")
        operator("admit", "c", "--class", "rlhf", "--prompt-tokens", "64", code=3)
        yield operator


def test_ping(operator: Operator) -> None:
    assert operator("ping", "--wait", "10s").startswith(f"{operator.server.address} ready in ")
    assert operator.json("ping")["readiness"] == "SERVING"


def test_a_session_from_admission_to_release(operator: Operator) -> None:
    with Engines(operator.server.api, "engine-0", pool=operator.pool):
        placed = operator.admitted("s", "--class", "agentic", "--prompt-tokens", "100", "--max-wait", "20s")
        assert placed.placement.endpoint == "http://engine-0:8000"
        token = placed.lease.token
        assert operator("place", "s", "--lease-token", token, "--turn", "1", "-o", "name") == "engine-0\n"
        beat = operator(
            "heartbeat", "--session", "s", "--lease-token", token, "--phase", "tool-wait", "--turn", "1",
            "--context-tokens", "320", "--cached-tokens", "96",
        )  # fmt: skip
        assert beat == "session/s renewed\n"
        row = operator("get", "sessions").splitlines()[1].split()
        assert row[:7] == ["s", "agentic", "TOOL_WAIT", "engine-0", "20", "320", "1"]
        released = operator("release", "s", "--lease-token", token, "--outcome", "completed")
        assert released.startswith("session/s released residency=")
        assert operator.json("get", "pool")["completedByClass"] == {"agentic": "1"}
        assert "unknown or already over" in operator("release", "s", "--outcome", "completed", "--lease-token", token)


def test_requests_come_from_files_too(operator: Operator) -> None:
    snapshot = pb.InstanceSnapshot(
        instance_id="engine-9", endpoint="http://e9", incarnation="1", sequence=1, block_size=16, total_blocks=64
    )
    request = json_format.MessageToJson(pb.HeartbeatRequest(instances=[snapshot]))
    assert operator("heartbeat", "-f", "-", stdin=request) == "instance/engine-9 rank=0 accepted\n"
    body = json_format.MessageToJson(pb.AdmitRequest(session_id="s", workload_class="rlvr", prompt_tokens=32))
    assert "admitted instance=engine-9" in operator("admit", "--max-wait", "20s", "-f", "-", stdin=body)


def test_get_in_every_format(crowded: Operator) -> None:
    assert crowded("get", "pool").splitlines()[1].split()[:5] == [crowded.pool, "ENFORCE", "static", "2", "1"]
    assert [line.split()[0] for line in crowded("get", "instances").splitlines()] == ["NAME", "engine-0", "engine-1"]
    assert crowded("get", "sessions", "-o", "name").split() == ["a", "b", "c"]
    assert crowded("get", "sessions", "--held", "-o", "name").split() == ["c"]
    assert crowded("get", "classes", "-o", "name").split() == ["agentic", "rlhf", "rlvr"]
    for noun, message in (
        ("pool", ipb.GetPoolResponse()),
        ("instances", ipb.ListInstancesResponse()),
        ("sessions", ipb.ListSessionsResponse()),
        ("classes", ipb.ListClassesResponse()),
    ):
        assert json_format.Parse(crowded("get", noun, "-o", "json"), message).ByteSize() > 0
    narrow, wide = (crowded("get", "instances", *flags).splitlines() for flags in ((), ("-o", "wide")))
    assert len(wide[0]) > len(narrow[0])
    listed = yaml.safe_load(crowded("get", "sessions", "-o", "yaml"))["sessions"]
    assert [session["sessionId"] for session in listed] == ["a", "b", "c"]


def test_explain_says_why_and_until_when(crowded: Operator) -> None:
    text = crowded("explain", "c")
    assert text.startswith("session/c (class rlhf) is held: POOL_CAP")
    assert "history:" in text
    answer = json_format.Parse(crowded("explain", "c", "-o", "json"), ipb.GetSessionResponse())
    assert answer.hold.reason == pb.HOLD_REASON_POOL_CAP
    assert answer.hold.position == 1
    assert [entry.kind for entry in answer.history] == ["hold"]
    assert "was placed" in crowded("explain", "a")


def test_describe(crowded: Operator) -> None:
    assert "Sessions:   2 active, 1 held" in crowded("describe", "pool")
    assert "Sessions:         1 of cap 1" in crowded("describe", "instance", "engine-0")
    assert "Phase:" in crowded("describe", "session", "a")
    assert "Target share:           18.2%" in crowded("describe", "class", "rlhf")


def test_top_once(crowded: Operator) -> None:
    frame = crowded("top", "--once")
    assert f"pool {crowded.pool}" in frame
    assert "Load        2 active of cap 2, 1 held" in frame
    assert {"engine-0", "engine-1"} <= set(frame.split())


def test_watch_follows_what_happens(crowded: Operator) -> None:
    watching = subprocess.Popen(
        [*COMMAND, "watch", "-o", "json", "--since-start"],
        env=environment(crowded.env), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watching.stdout is not None
    events = (json.loads(line) for line in watching.stdout)
    assert next(e for e in events if e.get("sessionId") == "c")["kind"] == "hold"
    crowded("evict", "a", "--reason", "too slow")
    evicted = next(e for e in events if e["kind"] == "evict")
    assert (evicted["sessionId"], evicted["reason"]) == ("a", "too slow")
    watching.terminate()
    watching.communicate()
    # A watch that was cut off goes on where it stopped.
    crowded("evict", "b")
    again = crowded("watch", "-o", "json", "--resume", evicted["resumeToken"], "--limit", "1")
    assert json.loads(again)["sessionId"] == "b"


def test_evict_ends_a_session_and_its_place_goes_to_the_next(crowded: Operator) -> None:
    assert crowded("evict", "a", "--reason", "stuck") == "session/a evicted\n"
    assert "admitted" in crowded("admit", "c", "--class", "rlhf", "--max-wait", "20s")
    assert "unknown or already over" in crowded("evict", "a")
    assert "session 'a'" in crowded("place", "a", "--lease-token", "x", code=4)
    assert "stuck" in crowded("watch", "--since-start", "--limit", str(_events(crowded)))


def _events(operator: Operator) -> int:
    """Events up to the first eviction."""
    request = ipb.WatchEventsRequest(pool=operator.pool, resume_token="0")
    events = operator.server.api.inspector.WatchEvents(request, timeout=PATIENCE_S)
    return next(number for number, event in enumerate(events, 1) if event.kind == "evict")


def test_cordon_keeps_new_sessions_away_and_living_ones_in(operator: Operator) -> None:
    with Engines(operator.server.api, "engine-0", pool=operator.pool):
        living = operator.admitted("living", *SMALL, "--max-wait", "20s")
        assert operator("cordon", "engine-0") == "instance/engine-0 cordoned ranks=1\n"
        assert "CORDONED" in operator("get", "instances").upper()
        assert operator.json("admit", "new", *SMALL, code=3)["hold"]["reason"] == "HOLD_REASON_DRAINING"
        assert operator("place", "living", "--lease-token", living.lease.token, "-o", "name") == "engine-0\n"
        assert operator("uncordon", "engine-0") == "instance/engine-0 uncordoned ranks=1\n"
        assert "admitted" in operator("admit", "new", *SMALL, "--max-wait", "20s")
        assert "no instance 'engine-7'" in operator("describe", "instance", "engine-7", code=4)
        assert "engine-7" in operator("cordon", "engine-7", code=4)


def test_drain_moves_sessions_off(operator: Operator) -> None:
    with Engines(operator.server.api, "engine-0", "engine-1", pool=operator.pool):
        placed = operator.admitted("s", *SMALL, "--max-wait", "20s")
        home = placed.placement.instance_id
        other = {"engine-0": "engine-1", "engine-1": "engine-0"}[home]
        assert operator("drain", home) == f"instance/{home} draining ranks=1 sessions-to-move=1\n"
        moved = operator("place", "s", "--lease-token", placed.lease.token, "--max-wait", "20s")
        assert moved.startswith(f"session/s moved instance={other}")
        # The move rotated the token: the old one fences nobody in.
        assert "LEASE_STALE" in operator("place", "s", "--lease-token", placed.lease.token, code=3)
        eventually(lambda: operator.json("get", "sessions", "--instance", home).get("sessions", []) == [])


def test_config_shows_and_sets_what_is_in_force(operator: Operator) -> None:
    assert "is not known" in operator("config", code=4)
    operator("config", "set", "--policy", "misa", "--headroom", "0.9", "--max-policy-lag", "3")
    operator("config", "class", "rlvr", "--prior-context-tokens", "48000", "--alias", "math")
    operator("config", "mixture", "rlvr=2", "agentic=1")
    shown = operator.json("config")
    assert (shown["policy"], shown["headroom"], shown["maxPolicyLag"]) == ("misa", 0.9, 3)
    assert shown["classes"]["rlvr"] == {
        "targetShare": 2.0, "priorContextTokens": "48000", "refused": False, "aliases": ["math"]
    }  # fmt: skip
    assert operator.json("get", "pool")["targetMixture"]["rlvr"] == pytest.approx(2 / 3)
    operator("config", "set", "--unset", "max-policy-lag")
    assert "maxPolicyLag" not in operator.json("config")
    assert "lease_ttl" in operator("config", "set", "--lease-ttl", "25h", code=2)
    operator("config", "class", "rlhf", "--refuse")
    refused = operator.json("admit", "s", "--class", "rlhf", code=3)
    assert (refused["decision"], refused["hold"]["reason"]) == ("DECISION_REJECT", "HOLD_REASON_CLASS_REFUSED")
    assert operator.json("admit", "t", "--class", "math", code=3)["workloadClass"] == "rlvr"


def test_observe_places_everything_and_says_what_enforce_would_have_said(crowded: Operator) -> None:
    crowded("config", "set", "--mode", "observe")
    placed = eventually(lambda: _if_placed(crowded))
    assert placed["hold"]["reason"] in ("HOLD_REASON_POOL_CAP", "HOLD_REASON_QUEUED_BEHIND")
    # Its history keeps it too.
    assert crowded("explain", "d").split()[-1] == placed["hold"]["reason"].removeprefix("HOLD_REASON_")


def _if_placed(operator: Operator) -> dict[str, Any] | None:
    done = moorage("admit", "d", "--class", "rlhf", "-o", "json", env=operator.env)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer if answer["decision"] == "DECISION_PLACE" else None


def test_exit_codes_tell_failures_apart(operator: Operator) -> None:
    assert "POOL_UNKNOWN" in operator("get", "pool", code=4)
    assert "Usage:" in operator("admit", code=2)
    assert "session_id" in operator("admit", "x" * 257, code=2)
    assert operator("admit", "s", code=3).startswith("session/s held reason=NO_INSTANCE")
    nobody = moorage("get", "pool", "--server", "127.0.0.1:1", "--timeout", "2s")
    assert nobody.returncode == 5
