"""Collectors and the pod of `helm test`: their rights, and that the command line understands what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from moorage.cli.collect import sglang, vllm
from tests.integration.processes import Server, environment, eventually
from tests.unit.helm.chart import NAME, NAMESPACE, Helm, Manifest

ENGINE = 'collector.engines={"v":{"engine":"vllm","urls":["http://h:8000"]}}'
FAR, NEAR, SGLANG = (f"{NAME}-collector-{name}" for name in ("vllm", "vllm-here", "sglang"))


def _arguments(deployment: Manifest) -> list[str]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def test_a_selector_may_read_pods_in_its_namespace_and_nothing_else(helm: Helm) -> None:
    rendered = helm.render("collector")
    assert rendered.of("ClusterRole") == []
    assert rendered.of("ClusterRoleBinding") == []
    assert {role["metadata"]["name"]: role["metadata"]["namespace"] for role in rendered.of("Role")} == {
        FAR: "engines",
        NEAR: NAMESPACE,
    }
    for role in rendered.of("Role"):
        assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_rights_go_to_the_account_of_the_pods(helm: Helm) -> None:
    rendered = helm.render("collector")
    for binding in rendered.of("RoleBinding"):
        role = rendered.one("Role", binding["roleRef"]["name"])
        assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]
        ((kind, name, namespace),) = ((s["kind"], s["name"], s["namespace"]) for s in binding["subjects"])
        account = rendered.one("ServiceAccount", name)
        assert (kind, namespace) == ("ServiceAccount", account["metadata"]["namespace"])
        pod = rendered.one("Deployment", name)["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == name
    assert len(rendered.of("RoleBinding")) == 2


def test_no_rights_are_made_where_they_are_managed_elsewhere(helm: Helm) -> None:
    rendered = helm.render("collector", "rbac.create=false")
    assert rendered.of("Role") == rendered.of("RoleBinding") == []
    assert [account["metadata"]["name"] for account in rendered.of("ServiceAccount")] == [NAME]


@pytest.mark.parametrize("name", [FAR, NEAR, SGLANG])
def test_the_command_line_understands_a_collector(helm: Helm, name: str) -> None:
    verb, engine, *options = _arguments(helm.render("collector").one("Deployment", name))
    assert verb == "collect"
    command: click.Command = {"vllm": vllm, "sglang": sglang}[engine]
    given = command.make_context(engine, options).params
    assert given["urls"] or given["dns"] or given["kube_selector"]


def test_a_collector_says_all_it_was_given(helm: Helm) -> None:
    rendered = helm.render("collector")
    assert _arguments(rendered.one("Deployment", FAR)) == [
        "collect", "vllm", "--pool=policy-70b", "--kube-selector=app=vllm,role in (decode)",
        "--kube-namespace=engines", "--kube-port=8000", "--interval=500ms", "--discovery-interval=10s",
    ]  # fmt: skip
    assert _arguments(rendered.one("Deployment", SGLANG)) == [
        "collect", "sglang", "--pool=default", "--url=judge=http://judge.engines.svc:30000",
        "--dns=sglang-headless.engines.svc:30000",
    ]  # fmt: skip


def test_two_collectors_never_overlap(helm: Helm) -> None:
    for name in (FAR, NEAR, SGLANG):
        spec = helm.render("collector").one("Deployment", name)["spec"]
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_callers_know_the_server_and_its_credentials(helm: Helm) -> None:
    rendered = helm.render("tls")
    pods = dict(rendered.pods())
    for where in (f"Deployment/{FAR}", f"Pod/{NAME}-test"):
        (container,) = pods[where]["spec"]["containers"]
        variables = {variable["name"]: variable for variable in container["env"]}
        assert variables["MOORAGE_SERVER"]["value"] == f"{NAME}.{NAMESPACE}.svc:50061"
        reference = variables["MOORAGE_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "moorage-client-token", "key": "token"}
        secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pods[where]["spec"]["volumes"][1:]}
        assert secrets == {"server-ca": "moorage-tls", "client": "moorage-client-tls"}
        said = " ".join(container["args"])
        for flag in ("--ca=/etc/moorage/server-ca/ca.crt", "--cert=/etc/moorage/client/tls.crt"):
            assert flag in said


def test_the_test_pod_is_a_test(helm: Helm) -> None:
    pod = helm.render().one("Pod", f"{NAME}-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert helm.render("embedded").of("Pod") == []


@pytest.mark.parametrize("reachable", [True, False])
def test_the_test_pod_tells_a_server_from_none(helm: Helm, tmp_path: Path, reachable: bool) -> None:
    """Its script, run as the container would: against a server, and against nobody."""
    (container,) = helm.render().one("Pod", f"{NAME}-test")["spec"]["containers"]
    (script,) = container["args"]
    address = "127.0.0.1:1"
    server = None
    if reachable:
        server = Server.start(tmp_path / "serve.log")
        eventually(server.api.ready)
        address = server.address
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*container["command"], script.replace("--wait 60s", "--wait 1s")],
        env=environment({"MOORAGE_SERVER": address, "HOSTNAME": "pod", "PATH": path}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if server is not None:
        server.end()
    assert (done.returncode == 0) is reachable, done.stdout + done.stderr
    assert ("session/test-pod released" in done.stdout) is reachable


def test_a_server_that_asks_nobody_who_he_is_was_told_so(helm: Helm) -> None:
    assert helm.render("default").config()["insecure_listen"] is True
    assert "insecure_listen" not in helm.render("tls").config()
    token = ("auth.existingSecret=tokens", "client.tokenSecret=token")
    assert "insecure_listen" not in helm.render("collector", *token).config()


def test_a_token_goes_in_plain_text_only_where_there_is_no_tls(helm: Helm) -> None:
    def variables(scenario: str) -> set[str]:
        rendered = helm.render(scenario, "auth.existingSecret=tokens", "client.tokenSecret=token", ENGINE)
        (deployment,) = (d for d in rendered.of("Deployment") if d["metadata"]["name"].endswith("-v"))
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return {variable["name"] for variable in container["env"]}

    assert "MOORAGE_PLAINTEXT_TOKEN" in variables("default")
    assert "MOORAGE_PLAINTEXT_TOKEN" not in variables("tls")
