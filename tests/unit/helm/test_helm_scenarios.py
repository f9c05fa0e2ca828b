"""What holds for every manifest of every scenario in helm/moorage/ci."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest

from moorage_server.runtime.settings_sources import environment_variables, load_settings
from tests.unit.helm.chart import CHART, MONITORING, NAMESPACE, SCENARIOS, Helm, Manifest, environment, selects

#: The oldest version that the chart takes, and the newest that is known here.
VERSIONS = ("1.30", kubernetes_validate.latest_version())

SECRETS = {"valkey/password": "pw", "redis/redis-password": "pw", "redis-cluster/url": "rediss://:pw@node-0:6379/0"}

pytestmark = pytest.mark.parametrize("scenario", SCENARIOS)


def test_lints(helm: Helm, scenario: str) -> None:
    report = helm.run("lint", "--strict", str(CHART), f"--values={CHART / 'ci' / f'{scenario}-values.yaml'}")
    assert "1 chart(s) linted, 0 chart(s) failed" in report


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(helm: Helm, scenario: str, version: str) -> None:
    """Strictly: unknown fields are errors. The Prometheus operator's kinds have no schema here."""
    checked = 0
    for manifest in helm.render(scenario):
        if manifest["apiVersion"] != MONITORING:
            kubernetes_validate.validate(manifest, version, strict=True)
            checked += 1
    assert checked >= 5


def test_names_are_distinct_and_namespaces_given(helm: Helm, scenario: str) -> None:
    rendered = helm.render(scenario)
    names = [(m["kind"], m["metadata"]["namespace"], m["metadata"]["name"]) for m in rendered]
    assert len(set(names)) == len(names)
    assert {namespace for _, namespace, _ in names} <= {NAMESPACE, "engines"}


def test_workloads_select_their_own_pods_only(helm: Helm, scenario: str) -> None:
    rendered = helm.render(scenario)
    pods = dict(rendered.pods())
    for kind in ("Deployment", "StatefulSet"):
        for workload in rendered.of(kind):
            selector = workload["spec"]["selector"]["matchLabels"]
            chosen = [where for where, pod in pods.items() if selects(selector, pod["metadata"]["labels"])]
            assert chosen == [f"{kind}/{workload['metadata']['name']}"]


def test_whatever_selects_pods_selects_some(helm: Helm, scenario: str) -> None:
    """Services, budgets, policies and spreads: a selector with a slip selects nothing and says nothing."""
    rendered = helm.render(scenario)
    labels = [pod["metadata"]["labels"] for _, pod in rendered.pods()]
    selectors = [service["spec"]["selector"] for service in rendered.of("Service")]
    selectors += [budget["spec"]["selector"]["matchLabels"] for budget in rendered.of("PodDisruptionBudget")]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in rendered.of("NetworkPolicy")]
    for _, pod in rendered.pods():
        spreads = pod["spec"].get("topologySpreadConstraints", [])
        selectors += [spread["labelSelector"]["matchLabels"] for spread in spreads]
    assert len(selectors) >= 2
    for selector in selectors:
        assert sum(selects(selector, each) for each in labels) == 1, selector


def test_services_and_policies_name_ports_that_exist(helm: Helm, scenario: str) -> None:
    rendered = helm.render(scenario)
    for service in rendered.of("Service"):
        (pod,) = _chosen(rendered.pods(), service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= _ports(pod)
    for policy in rendered.of("NetworkPolicy"):
        (pod,) = _chosen(rendered.pods(), policy["spec"]["podSelector"]["matchLabels"])
        rules = policy["spec"].get("ingress", [])
        assert {port["port"] for rule in rules for port in rule["ports"]} <= _ports(pod)


def test_probes_ask_ports_that_exist(helm: Helm, scenario: str) -> None:
    for _, pod in helm.render(scenario).pods():
        for container in pod["spec"]["containers"]:
            ports = {number for port in container.get("ports", []) for number in (port["name"], port["containerPort"])}
            probes = [container[kind] for kind in container if kind.endswith("Probe")]
            for probe in probes:
                asked = [probe[how]["port"] for how in ("grpc", "tcpSocket", "httpGet") if how in probe]
                assert set(asked) <= ports


def test_pods_are_restricted(helm: Helm, scenario: str) -> None:
    """As the Pod Security Standard *restricted* asks, with a read-only root on top."""
    for where, pod in helm.render(scenario).pods():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"], where
        assert context["runAsUser"] > 0, where
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, where
        for container in pod["spec"]["containers"]:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"], where
            assert own["allowPrivilegeEscalation"] is False, where
            assert own["capabilities"] == {"drop": ["ALL"]}, where
            assert "memory" in container["resources"]["limits"], where


def test_pods_get_no_token_nor_service_variables_unasked(helm: Helm, scenario: str) -> None:
    """A Service called moorage would otherwise set MOORAGE_PORT."""
    for where, pod in helm.render(scenario).pods():
        assert pod["spec"]["enableServiceLinks"] is False, where
        asks = any("--kube-selector" in argument for argument in pod["spec"]["containers"][0].get("args", []))
        assert pod["spec"]["automountServiceAccountToken"] is asks, where


def test_images_are_pinned(helm: Helm, scenario: str) -> None:
    for where, pod in helm.render(scenario).pods():
        for container in pod["spec"]["containers"]:
            tagged = re.fullmatch(r"[\w./-]+:([\w.-]+)", container["image"])
            assert tagged, where
            assert tagged[1] != "latest", where


def test_volumes_are_mounted_and_mounts_are_volumes(helm: Helm, scenario: str) -> None:
    rendered = helm.render(scenario)
    for where, pod in rendered.pods():
        claims = [
            claim["metadata"]["name"]
            for owner in rendered.of("StatefulSet")
            if where == f"StatefulSet/{owner['metadata']['name']}"
            for claim in owner["spec"].get("volumeClaimTemplates", [])
        ]
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | set(claims)
        mounts = {mount["name"] for container in pod["spec"]["containers"] for mount in container["volumeMounts"]}
        assert volumes == mounts, where


def test_no_secret_is_in_plain_sight(helm: Helm, scenario: str) -> None:
    """The chart makes no Secret, and no text in a manifest looks like a URL with a password or a token."""
    rendered = helm.render(scenario)
    assert rendered.of("Secret") == []
    for text in _texts(list(rendered)):
        shown = text.replace("$(REDIS_PASSWORD)", "")
        assert not re.search(r"redis[s]?://[^@\s]*:[^@\s]+@", shown), text
    for _, pod in rendered.pods():
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                if re.search(r"PASSWORD|TOKEN|SECRET", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], variable


def test_the_server_takes_its_configuration(helm: Helm, scenario: str, tmp_path: Any) -> None:
    """The file and the variables of the pod, through the server's own checks."""
    rendered = helm.render(scenario)
    file = tmp_path / "moorage.yaml"
    file.write_text(rendered.one("ConfigMap")["data"]["moorage.yaml"], "utf-8")
    variables = environment(rendered.server(), SECRETS)
    unknown = {name for name in variables if name.startswith("MOORAGE_")} - environment_variables().keys()
    assert unknown == set()
    settings = load_settings(str(file), {}, variables)
    assert settings.embedded is (scenario == "embedded")


def _chosen(pods: Iterator[tuple[str, Manifest]], selector: dict[str, str]) -> list[Manifest]:
    return [pod for _, pod in pods if selects(selector, pod["metadata"]["labels"])]


def _ports(pod: Manifest) -> set[str]:
    return {port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", [])}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
