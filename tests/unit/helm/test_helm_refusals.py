"""What the chart does not install, and that it says which value is why."""

from __future__ import annotations

import json

import pytest

from tests.unit.helm.chart import Helm, Refused

EXTERNAL = "redis.mode=external"
SECRET = "redis.external.existingSecret=s"
URL = "redis.external.url=redis://h:6379/0"
PASSWORD_URL = "redis.external.url=redis://:$(REDIS_PASSWORD)@h:6379/0"
SENTINELS = 'redis.external.sentinel.addresses=["h:26379"]'
ENGINE = 'collector.engines={"v":{"engine":"vllm","urls":["http://h:8000"]}}'

#: Settings that contradict each other -> how the message begins.
CONTRADICTIONS = {
    ("redis.mode=embedded", "replicaCount=3"): "replicaCount is 3: redis.mode=embedded",
    (
        "redis.mode=embedded",
        "replicaCount=1",
        "autoscaling.enabled=true",
    ): "autoscaling.enabled is true: redis.mode=emb",
    (EXTERNAL,): "redis.external.url is empty",
    ("auth.allowAnonymous=false",): "auth.allowAnonymous is false: needs auth.existingSecret or tls.clientCaSecret",
    (EXTERNAL, "redis.external.url=redis://:geheim@h:6379/0"): "redis.external.url: holds a password",
    (EXTERNAL, "redis.external.url=redis://u:a/b@h:6379/0"): "redis.external.url: holds a password",
    (EXTERNAL, "redis.external.url=redis://h:6379/0?password=x"): "redis.external.url: holds a password",
    (EXTERNAL, URL, "redis.external.passwordKey=p"): "redis.external.existingSecret is empty",
    (EXTERNAL, URL, SECRET): "redis.external.urlKey: with existingSecret, set it or passwordKey",
    (EXTERNAL, PASSWORD_URL): "redis.external.passwordKey: goes together with $(REDIS_PASSWORD)",
    (EXTERNAL, URL, SECRET, "redis.external.passwordKey=p"): "redis.external.passwordKey: goes together",
    (EXTERNAL, URL, SECRET, "redis.external.urlKey=u"): "redis.external.url: leave it empty where urlKey",
    (EXTERNAL, SENTINELS): "redis.external.sentinel.masterName: goes together",
    (EXTERNAL, SENTINELS, "redis.external.sentinel.masterName=m", "redis.external.cluster=true"): (
        "redis.external.cluster is true: excludes redis.external.sentinel.addresses"
    ),
    ("tls.clientCaSecret=c",): "tls.existingSecret is empty",
    ('tls={"existingSecret":"t","clientCaSecret":"c"}',): "client.certSecret is empty",
    ("auth.existingSecret=a",): "client.tokenSecret is empty",
    ("auth.existingSecret=a", "tests.enabled=false", ENGINE): "client.tokenSecret is empty",
    ("terminationGracePeriodSeconds=15",): "terminationGracePeriodSeconds is 15: must be above 15",
    ("podDisruptionBudget.minAvailable=1",): "podDisruptionBudget.minAvailable: set it or",
    ("podDisruptionBudget.maxUnavailable=null",): "podDisruptionBudget.minAvailable: set it or",
    ('autoscaling={"enabled":true,"minReplicas":9}',): "autoscaling.minReplicas is 9: must not be above",
    ("health.port=50061",): "health.port: service.port, health.port and metrics.port must differ",
    ("config.listen=0.0.0.0:1",): "config.listen: the chart sets it, from service.port",
    ('config.redis={"url":"redis://h"}',): "config.redis: the chart sets it, from the value redis",
    ('config.tls={"cert_file":"/x"}',): "config.tls: the chart sets it",
    ('config.health={"listen":"0.0.0.0:1"}',): "config.health.listen: the chart sets it, from health.port",
    ('collector.engines={"v":{"engine":"vllm"}}',): "collector.engines.v: needs urls, dns or kubernetes.selector",
}

#: One setting that the schema refuses -> the path it names.
BREACHES = {
    "replicaCounts=2": "",
    "replicaCount=two": "/replicaCount",
    "redis.external.host=1": "/redis/external",
    "redis.mode=embeded": "/redis/mode",
    'redis.keyPrefix="{a}"': "/redis/keyPrefix",
    "redis.external.url=http://h": "/redis/external/url",
    "redis.bundled.maxMemory=0": "/redis/bundled/maxMemory",
    "image.tag=latest": "/image/tag",
    "redis.bundled.image.tag=latest": "/redis/bundled/image/tag",
    "service.port=80": "/service/port",
    "preStopSleepSeconds=0": "/preStopSleepSeconds",
    'collector.engines={"v":{"engine":"trtllm","urls":["http://h"]}}': "/collector/engines/v/engine",
    'collector.engines={"v":{"urls":["http://h"]}}': "/collector/engines/v",
    'collector.engines={"A_B":{"engine":"vllm","urls":["http://h"]}}': "/collector/engines",
    'collector.engines={"v":{"engine":"vllm","dns":["host"]}}': "/collector/engines/v/dns/0",
    "config.shutdown.grace_s=-1": "/config/shutdown/grace_s",
    'extraEnv=[{"name":"MOORAGE_REDIS_URL","value":"redis://:pw@h"}]': "/extraEnv/0/name",
    "topologySpread=" + json.dumps({"zone": "Always"}): "/topologySpread/zone",
    "prometheusRule.thresholds.holdAge=3": "/prometheusRule/thresholds",
    "podLabels.a=1": "/podLabels/a",
}


@pytest.mark.parametrize("settings", CONTRADICTIONS, ids=" ".join)
def test_contradictions_name_the_value(helm: Helm, settings: tuple[str, ...]) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(None, *settings)
    assert CONTRADICTIONS[settings] in str(refused.value)


@pytest.mark.parametrize("setting", BREACHES)
def test_the_schema_names_the_value(helm: Helm, setting: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(None, setting)
    assert f"at '{BREACHES[setting]}'" in str(refused.value)
