"""The server's Deployment and what stands around it, value by value."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.unit.helm.chart import NAME, NAMESPACE, Helm, Manifest, Rendered, environment


def _spec(rendered: Rendered) -> Manifest:
    spec: Manifest = rendered.one("Deployment")["spec"]
    return spec


def _mounted(rendered: Rendered) -> dict[str, str]:
    """File in the server's container -> SECRET/KEY it shows."""
    paths = {mount["name"]: mount["mountPath"] for mount in rendered.server()["volumeMounts"]}
    return {
        f"{paths[volume['name']]}/{item['path']}": f"{volume['secret']['secretName']}/{item['key']}"
        for volume in _spec(rendered)["template"]["spec"]["volumes"]
        if "secret" in volume
        for item in volume["secret"]["items"]
    }


def test_replicas_are_left_to_the_autoscaler(helm: Helm) -> None:
    assert _spec(helm.render(None, "replicaCount=3"))["replicas"] == 3
    scaled = helm.render("ha-external-redis")
    assert "replicas" not in _spec(scaled)
    scaler = scaled.one("HorizontalPodAutoscaler")
    assert scaler["apiVersion"] == "autoscaling/v2"
    assert scaler["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME}
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 12)


def test_a_changed_configuration_rolls_the_pods(helm: Helm) -> None:
    def checksum(*settings: str) -> str:
        annotations = _spec(helm.render(None, *settings))["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert len(checksum()) == 64
    assert checksum() == checksum("replicaCount=5")
    assert checksum() != checksum("config.log.level=debug")
    assert checksum() != checksum("redis.keyPrefix=other")


def test_a_pod_gets_longer_than_it_takes_to_stop(helm: Helm) -> None:
    """Sleep, then the pause and the grace of the server, then 10 s; fractions count."""
    pod = _spec(helm.render("ha-external-redis"))["template"]["spec"]
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert pod["terminationGracePeriodSeconds"] == 5 + 33 + 10
    given = _spec(helm.render(None, "terminationGracePeriodSeconds=16"))["template"]["spec"]
    assert given["terminationGracePeriodSeconds"] == 16
    hasty = _spec(helm.render(None, "config.shutdown.grace_s=0", "preStopSleepSeconds=1"))["template"]["spec"]
    assert hasty["terminationGracePeriodSeconds"] == 11


def test_probes_ask_the_plaintext_health_listener(helm: Helm) -> None:
    """Also under TLS, which Kubernetes' probes do not speak."""
    rendered = helm.render("tls", "health.port=50099")
    container = rendered.server()
    asked = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
    assert asked == {
        "startup": {"port": 50099, "service": "liveness"},
        "liveness": {"port": 50099, "service": "liveness"},
        "readiness": {"port": 50099, "service": "readiness"},
    }
    assert rendered.config()["health"]["listen"] == "0.0.0.0:50099"


def test_listeners_and_ports_agree(helm: Helm) -> None:
    rendered = helm.render(None, "service.port=6000", "metrics.port=9999", "config.health.check_interval_s=0.5")
    ports = {port["name"]: port["containerPort"] for port in rendered.server()["ports"]}
    config = rendered.config()
    assert ports == {"grpc": 6000, "health": 50062, "metrics": 9999}
    assert config["health"] == {"check_interval_s": 0.5, "listen": "0.0.0.0:50062"}
    assert (config["listen"], config["metrics"]["listen"]) == ("0.0.0.0:6000", "0.0.0.0:9999")
    without = helm.render(None, "metrics.enabled=false")
    assert "metrics" not in without.config()
    assert [port["name"] for port in without.one("Service", f"{NAME}-headless")["spec"]["ports"]] == ["grpc"]


def test_there_is_a_service_for_one_and_one_for_each(helm: Helm) -> None:
    rendered = helm.render()
    assert rendered.one("Service")["spec"]["type"] == "ClusterIP"
    headless = rendered.one("Service", f"{NAME}-headless")["spec"]
    assert headless["clusterIP"] == "None"
    assert [port["name"] for port in headless["ports"]] == ["grpc", "metrics"]


def test_an_embedded_ledger_never_has_two_servers(helm: Helm) -> None:
    """Not while a new version comes, either."""
    rendered = helm.render("embedded")
    assert _spec(rendered)["strategy"] == {"type": "Recreate"}
    assert _spec(rendered)["replicas"] == 1
    assert rendered.config()["redis"] == {"key_prefix": "moorage", "embedded": True}


def test_the_bundled_redis_is_a_ledger(helm: Helm) -> None:
    rendered = helm.render()
    text = rendered.one("ConfigMap", f"{NAME}-redis")["data"]["redis.conf"]
    options = dict(line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))
    assert options["maxmemory-policy"] == "noeviction"
    assert options["appendonly"] == "yes"
    assert options["port"] == "6379"
    assert rendered.config()["redis"]["url"] == f"redis://{NAME}-redis:6379/0"
    (rule,) = rendered.one("NetworkPolicy", f"{NAME}-redis")["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"] == _spec(rendered)["selector"]["matchLabels"]
    claims = rendered.one("StatefulSet", f"{NAME}-redis")["spec"]["volumeClaimTemplates"]
    assert [claim["spec"]["resources"]["requests"]["storage"] for claim in claims] == ["1Gi"]


def test_no_redis_is_bundled_where_there_is_one(helm: Helm) -> None:
    assert helm.render("cluster").of("StatefulSet") == []
    assert helm.render("embedded").of("StatefulSet") == []


@pytest.mark.parametrize(
    ("scenario", "secrets", "url"),
    [
        ("ha-external-redis", {"valkey/password": "pw"}, "redis://:pw@valkey.redis.svc:6379/0"),
        ("sentinel", {"redis/redis-password": "pw"}, "redis://:pw@mymaster/0"),
        ("cluster", {"redis-cluster/url": "rediss://:pw@n:6379/0"}, "rediss://:pw@n:6379/0"),
    ],
)
def test_the_url_of_redis_comes_from_a_secret(helm: Helm, scenario: str, secrets: dict[str, str], url: str) -> None:
    rendered = helm.render(scenario)
    assert environment(rendered.server(), secrets)["MOORAGE_REDIS_URL"] == url
    assert "url" not in rendered.config()["redis"]


def test_sentinels_and_clusters_are_told_to_the_server(helm: Helm) -> None:
    sentinel = helm.render("sentinel").config()["redis"]
    assert sentinel["sentinels"] == [f"sentinel-{n}.redis.svc:26379" for n in range(3)]
    assert sentinel["master_name"] == "mymaster"
    assert helm.render("cluster").config()["redis"] == {"key_prefix": "rl-prod", "cluster": True}
    alone = helm.render(None, "redis.mode=external", "redis.external.url=redis://cache:6379/1").config()["redis"]
    assert alone == {"key_prefix": "moorage", "url": "redis://cache:6379/1"}


def test_files_that_the_configuration_names_are_mounted(helm: Helm) -> None:
    rendered = helm.render("tls")
    config, mounted = rendered.config(), _mounted(rendered)
    assert mounted == {
        config["tls"]["cert_file"]: "moorage-tls/tls.crt",
        config["tls"]["key_file"]: "moorage-tls/tls.key",
        config["tls"]["client_ca_file"]: "clients-ca/ca.crt",
        config["auth"]["tokens_file"]: "moorage-tokens/tokens.yaml",
    }
    assert rendered.server()["args"] == ["serve", "--config", "/etc/moorage/config/moorage.yaml"]


def test_the_ca_of_redis_is_what_tls_connections_trust(helm: Helm) -> None:
    rendered = helm.render("cluster")
    file = environment(rendered.server(), {"redis-cluster/url": ""})["SSL_CERT_FILE"]
    assert _mounted(rendered) == {file: "redis-ca/ca.crt"}


def test_numbers_keep_their_digits(helm: Helm) -> None:
    """Templates like to print large numbers as 1.099511627776e+12, which is no integer in YAML."""
    classes = helm.render("ha-external-redis").config()["pools"]["default"]["classes"]
    assert classes["rlhf"]["prior_context_tokens"] == 2**40
    assert isinstance(classes["rlhf"]["prior_context_tokens"], int)


def test_the_policy_lets_out_to_redis_and_names_alone(helm: Helm) -> None:
    def egress(scenario: str | None) -> list[tuple[list[Any], bool]]:
        policy = helm.render(scenario, "networkPolicy.enabled=true").one("NetworkPolicy")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        return [([port["port"] for port in rule["ports"]], "to" in rule) for rule in policy["egress"]]

    assert egress("embedded") == [([53, 53], False)]
    assert egress(None) == [([53, 53], False), ([6379], True)]
    assert egress("sentinel") == [([53, 53], False), ([6379, 26379], False)]
    assert egress("ha-external-redis") == [([53, 53], False), ([6379], True)]


def test_pods_of_the_release_may_call_whoever_else_may_not(helm: Helm) -> None:
    policy = helm.render("ha-external-redis").one("NetworkPolicy")["spec"]
    (calls,) = (rule for rule in policy["ingress"] if rule["ports"] == [{"port": "grpc"}])
    ours, theirs = calls["from"]
    test_pod = helm.render("ha-external-redis").one("Pod", f"{NAME}-test")
    assert ours["podSelector"]["matchLabels"].items() <= test_pod["metadata"]["labels"].items()
    assert theirs == {"namespaceSelector": {"matchLabels": {"team": "rl"}}}
    probes = [rule for rule in policy["ingress"] if rule["ports"] == [{"port": "health"}]]
    assert probes == [{"ports": [{"port": "health"}]}]


def test_disruptions_are_bounded(helm: Helm) -> None:
    default = helm.render().one("PodDisruptionBudget")["spec"]
    assert (default["maxUnavailable"], default.get("minAvailable")) == (1, None)
    high = helm.render("ha-external-redis").one("PodDisruptionBudget")["spec"]
    assert (high.get("maxUnavailable"), high["minAvailable"]) == (None, 2)


def test_spreads_can_be_made_strict_and_left_out(helm: Helm) -> None:
    def spreads(*settings: str) -> dict[str, str]:
        pod = _spec(helm.render(None, *settings))["template"]["spec"]
        return {one["topologyKey"]: one["whenUnsatisfiable"] for one in pod.get("topologySpreadConstraints", [])}

    host, zone = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
    assert spreads() == {host: "ScheduleAnyway", zone: "ScheduleAnyway"}
    assert spreads("topologySpread=" + json.dumps({zone: "DoNotSchedule", host: ""})) == {zone: "DoNotSchedule"}
    assert spreads("topologySpread=" + json.dumps({zone: "", host: ""})) == {}


def test_an_image_can_be_pinned_by_digest(helm: Helm) -> None:
    digest = f"sha256:{'ab' * 32}"
    rendered = helm.render(None, f"image.digest={digest}", "image.repository=images.example/moorage")
    assert rendered.server()["image"] == f"images.example/moorage@{digest}"


def test_names_follow_the_release(helm: Helm) -> None:
    rendered = helm.render(None, f"fullnameOverride={'x' * 60}")
    name = "x" * 40
    assert rendered.one("Service", f"{name}-headless")["metadata"]["namespace"] == NAMESPACE
    config = yaml.safe_load(rendered.one("ConfigMap", name)["data"]["moorage.yaml"])
    assert config["redis"]["url"] == f"redis://{name}-redis:6379/0"
    assert rendered.one("Service", f"{name}-redis")["spec"]["ports"][0]["port"] == 6379
