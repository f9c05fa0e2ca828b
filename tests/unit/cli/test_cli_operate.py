"""moorage cordon, uncordon, drain, evict, weights, config: what an operator changes."""

from __future__ import annotations

import json

import pytest
import yaml

from moorage.v1 import operator_pb2 as operator
from tests.unit.cli import samples
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake import Code, Failure, FakeServer


@pytest.mark.parametrize(
    ("verb", "method", "answer", "line"),
    [
        ("cordon", "CordonInstance", operator.CordonInstanceResponse(changed=2), "cordoned ranks=2"),
        ("uncordon", "UncordonInstance", operator.UncordonInstanceResponse(changed=1), "uncordoned ranks=1"),
        ("drain", "DrainInstance", operator.DrainInstanceResponse(changed=1, sessions=9),
         "draining ranks=1 sessions-to-move=9"),
        ("cordon", "CordonInstance", operator.CordonInstanceResponse(), "unchanged: already cordoned"),
    ],
)  # fmt: skip
def test_instance_verbs(
    run: Run, server: FakeServer, verb: str, method: str, answer: operator.CordonInstanceResponse, line: str
) -> None:
    server.answers[method] = answer
    assert run(verb, "vllm-0").stdout == f"instance/vllm-0 {line}\n"
    assert not server.last(method).HasField("dp_rank")
    assert run(verb, "vllm-0", "--rank", "0", "-p", "q", "-o", "name").stdout == "vllm-0\n"
    request = server.last(method)
    assert (request.pool, request.instance_id, request.dp_rank) == ("q", "vllm-0", 0)
    assert request.HasField("dp_rank")
    assert json.loads(run(verb, "vllm-0", "-o", "json").stdout)["changed"] == answer.changed
    assert yaml.safe_load(run(verb, "vllm-0", "-o", "yaml").stdout)["changed"] == answer.changed


def test_evict(run: Run, server: FakeServer) -> None:
    server.answers["EvictSession"] = operator.EvictSessionResponse(evicted=True)
    assert run("evict", "s1", "--reason", "stuck tool").stdout == "session/s1 evicted\n"
    assert server.last("EvictSession") == operator.EvictSessionRequest(
        pool="default", session_id="s1", reason="stuck tool"
    )
    assert json.loads(run("evict", "s1", "-o", "json").stdout) == {"evicted": True}
    assert run("evict", "s1", "-o", "name").stdout == "s1\n"
    server.answers["EvictSession"] = operator.EvictSessionResponse()
    assert run("evict", "s1").stdout == "session/s1 not evicted: unknown or already over\n"


def test_weights(run: Run, server: FakeServer) -> None:
    server.answers["BeginWeightUpdate"] = operator.BeginWeightUpdateResponse(changed=2)
    server.answers["EndWeightUpdate"] = operator.EndWeightUpdateResponse(changed=1)
    assert run("weights", "begin", "step-7").stdout == "pool/default weight update begun version=step-7 ranks=2\n"
    narrow = ("step-7", "--policy-version", "7", "--cache-cleared", "--instance", "i", "--rank", "1")
    assert run("weights", "end", *narrow).stdout == "pool/default weight update ended version=step-7 ranks=1\n"
    assert server.last("EndWeightUpdate") == operator.EndWeightUpdateRequest(
        pool="default", weight_version="step-7", policy_version=7, cache_cleared=True, instance_id="i", dp_rank=1
    )
    assert run("weights", "end").stdout == "pool/default weight update ended, the old weights stay ranks=1\n"
    assert not server.last("EndWeightUpdate").HasField("cache_cleared")


def _echo(request: operator.ConfigurePoolRequest) -> operator.ConfigurePoolResponse:
    return operator.ConfigurePoolResponse(config=request.config)


@pytest.fixture
def configured(server: FakeServer) -> FakeServer:
    """A pool with two classes, one of them with priors and an alias."""
    agentic = operator.ClassConfig(target_share=2, prior_context_tokens=100, aliases=["tools"])
    config = operator.PoolConfig(
        policy="misa", classes={"agentic": agentic, "rlvr": operator.ClassConfig(target_share=1)}
    )
    config.classes["plain"].refused = True
    server.answers.update(GetPool=samples.pool(config=config), ConfigurePool=_echo)
    return server


@pytest.mark.usefixtures("configured")
def test_config_shows_what_is_in_force(run: Run) -> None:
    shown = yaml.safe_load(run("config").stdout)
    assert shown["policy"] == "misa"
    assert shown["classes"]["agentic"]["aliases"] == ["tools"]
    assert json.loads(run("config", "-o", "json").stdout)["classes"]["agentic"]["targetShare"] == 2
    assert yaml.safe_load(run("config", "-o", "yaml").stdout)["mode"] == "MODE_UNSPECIFIED"


def test_config_of_an_unknown_pool_is_not_found(run: Run, server: FakeServer) -> None:
    server.answers["GetPool"] = Failure(Code.NOT_FOUND, "pool 'default' is not known", reason="POOL_UNKNOWN")
    assert "pool 'default' is not known" in run("config", code=4).stderr


def test_config_set_masks_what_was_given(run: Run, configured: FakeServer) -> None:
    line = run(
        "config", "set", "--policy", "misa-t", "--mode", "observe", "--headroom", "0.9", "--lease-ttl", "2m",
        "--max-sessions", "0", "--unset", "max-policy-lag", "--class-inference", "unlabelled",
    ).stdout  # fmt: skip
    request = configured.last("ConfigurePool")
    assert set(request.update_mask.paths) == {
        "policy", "mode", "headroom", "lease_ttl", "max_sessions_per_instance", "max_policy_lag",
        "class_inference",
    }  # fmt: skip
    config = request.config
    assert (config.policy, config.mode, config.headroom) == ("misa-t", operator.MODE_OBSERVE, 0.9)
    assert config.class_inference == operator.CLASS_INFERENCE_UNLABELLED
    assert config.lease_ttl.seconds == 120
    assert config.HasField("max_sessions_per_instance")
    assert not config.HasField("max_policy_lag")
    assert request.request_id
    assert line.startswith("pool/default configured: policy, mode, ")


def test_config_set_from_a_file_replaces_all(run: Run, configured: FakeServer) -> None:
    body = '{"policy": "static", "staticCap": 12, "classes": {"a": {"targetShare": 1}}}'
    assert (
        run("config", "set", "-f", "-", "--static-cap", "16", stdin=body).stdout == "pool/default configured: whole\n"
    )
    request = configured.last("ConfigurePool")
    assert not request.HasField("update_mask")
    assert (request.config.policy, request.config.static_cap) == ("static", 16)
    refused = run("config", "set", "-f", "-", "--unset", "headroom", code=2, stdin=body)
    assert "replaces the whole configuration" in refused.stderr


def test_config_class_keeps_the_fields_not_named(run: Run, configured: FakeServer) -> None:
    assert run("config", "class", "agentic", "--target-share", "0.4").stdout == (
        "pool/default configured: classes.agentic\n  agentic.target_share: 2.0 -> 0.4\n"
    )
    request = configured.last("ConfigurePool")
    assert list(request.update_mask.paths) == ["classes.agentic"]
    assert request.config.classes["agentic"] == operator.ClassConfig(
        target_share=0.4, prior_context_tokens=100, aliases=["tools"]
    )
    assert list(request.config.classes) == ["agentic"]


def test_config_class_adds_refuses_renames_and_removes(run: Run, configured: FakeServer) -> None:
    run("config", "class", "new.one", "--refuse", "--alias", "x", "--alias", "y", "--prior-residency", "90s")
    request = configured.last("ConfigurePool")
    expected = operator.ClassConfig(refused=True, aliases=["x", "y"])
    expected.prior_residency.FromSeconds(90)
    assert request.config.classes["new.one"] == expected
    assert list(request.update_mask.paths) == ["classes.new.one"]
    run("config", "class", "plain", "--allow")
    allowed = configured.last("ConfigurePool").config.classes["plain"]
    assert allowed.HasField("refused")
    assert allowed.refused is False
    run("config", "class", "plain", "--remove")
    assert list(configured.last("ConfigurePool").update_mask.paths) == ["classes.plain"]
    assert not configured.last("ConfigurePool").config.classes


def test_config_mixture_is_the_whole_mixture(run: Run, configured: FakeServer) -> None:
    run("config", "mixture", "agentic=48.6", "rlhf=18.2")
    request = configured.last("ConfigurePool")
    assert list(request.update_mask.paths) == ["classes.agentic", "classes.rlhf", "classes.rlvr"]
    classes = request.config.classes
    assert classes["agentic"] == operator.ClassConfig(target_share=48.6, prior_context_tokens=100, aliases=["tools"])
    assert classes["rlhf"] == operator.ClassConfig(target_share=18.2)
    assert classes["rlvr"] == operator.ClassConfig(), "not named, so its share is gone"


def test_config_tells_what_changed_and_warns_of_slips(run: Run, configured: FakeServer) -> None:
    result = run("config", "mixture", "agentc=48.6", "rlvr=1", "tools=3")
    assert result.stdout.splitlines() == [
        "pool/default configured: classes.agentc, classes.agentic, classes.rlvr, classes.tools",
        "  agentc.target_share: <none> -> 48.6",
        "  agentic.target_share: 2.0 -> <none>",
        "  tools.target_share: <none> -> 3.0",
    ]
    assert result.stderr.splitlines() == [
        "warning: class 'agentc' was never seen in this pool nor configured; it has agentic, plain, rlhf, rlvr",
        "warning: 'tools' is an alias of class 'agentic'",
    ]
    assert run("config", "class", "rlhf", "--target-share", "1").stderr == "", "seen, though not configured"
    removed = run("config", "class", "agentic", "--remove")
    assert "  agentic.aliases: tools -> <none>\n" in removed.stdout
    assert "was never seen" in run("config", "class", "rlv", "--refuse").stderr
    assert "  plain.refused: true -> false\n" in run("config", "class", "plain", "--allow").stdout


def test_config_of_a_pool_that_is_new(run: Run, server: FakeServer) -> None:
    server.answers["GetPool"] = Failure(Code.NOT_FOUND, reason="POOL_UNKNOWN")
    server.answers["ConfigurePool"] = _echo
    assert run("config", "mixture", "a=1", "-p", "fresh", "-o", "json").stderr == ""
    assert server.last("ConfigurePool").pool == "fresh"
    assert server.last("ConfigurePool").config.classes["a"].target_share == 1
    assert run("config", "class", "b", "--target-share", "2", "-o", "yaml").stdout


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["set"], "nothing to set"),
        (["set", "--policy", "best"], "--policy"),
        (["set", "--headroom", "2"], "--headroom"),
        (["set", "--unset", "colour"], "no field 'colour' to unset"),
        (["class", "a"], "name fields to set"),
        (["class", "a", "--remove", "--refuse"], "name fields to set"),
        (["class", "a", "--target-share", "0"], "--target-share"),
        (["mixture"], "CLASS=SHARE"),
        (["mixture", "a"], "KEY=VALUE"),
        (["mixture", "a=b"], "no share"),
        (["mixture", "a=nan"], "no share"),
        (["mixture", "a=0"], "no share"),
    ],
)
def test_config_usage_errors(run: Run, server: FakeServer, args: list[str], complaint: str) -> None:
    assert complaint in run("config", *args, code=2).stderr
    assert server.requests == []


def test_config_passes_other_failures_on(run: Run, server: FakeServer) -> None:
    server.answers["GetPool"] = Failure(Code.UNAVAILABLE, "the store is unreachable", reason="STORE_UNAVAILABLE")
    run("config", "mixture", "a=1", code=5)
    assert server.count("ConfigurePool") == 0
