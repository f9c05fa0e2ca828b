"""Where the store is: one Redis, sentinels, a Cluster, or this process."""

from __future__ import annotations

import pytest

from moorage_server.runtime.settings_sources import SettingsError, load_settings
from moorage_server.store.connect import open_store

TWO = ("a.example:26379", "[::1]:26380")


def problems(**env: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, {}, {f"MOORAGE_REDIS_{name}": value for name, value in env.items()})
    return list(caught.value.problems)


@pytest.mark.parametrize("text", [",".join(TWO), ", ".join(TWO), f"- {TWO[0]}\n- '{TWO[1]}'", str(list(TWO))])
def test_a_variable_lists_sentinels_with_commas_or_in_yaml(text: str) -> None:
    env = {"MOORAGE_REDIS_SENTINELS": text, "MOORAGE_REDIS_MASTER_NAME": "m"}
    settings = load_settings(None, {}, env)
    assert settings.redis.sentinels == TWO
    assert settings.sentinels == [("a.example", 26379), ("::1", 26380)]
    assert not settings.embedded
    assert settings.store == "m at sentinels a.example:26379, [::1]:26380"


def test_sentinels_need_no_url_and_a_cluster_does() -> None:
    settings = load_settings(None, {"redis_url": "rediss://:hush@h/0"}, {"MOORAGE_REDIS_CLUSTER": "true"})
    assert settings.redis.cluster
    assert settings.store == "cluster rediss://***@h/0"
    assert problems(CLUSTER="true") == [
        "redis: url, of one of the nodes, is needed with cluster (MOORAGE_REDIS_CLUSTER)"
    ]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SENTINELS": "h:1"}, "redis: master_name is needed with sentinels"),
        ({"MASTER_NAME": "m"}, "redis: sentinels are needed with master_name"),
        ({"SENTINELS": "h:1", "MASTER_NAME": "m", "CLUSTER": "yes"}, "redis: sentinels and cluster exclude each other"),
        ({"SENTINELS": "h:1", "MASTER_NAME": "m", "EMBEDDED": "yes"}, "redis: sentinels and embedded exclude"),
        ({"CLUSTER": "yes", "EMBEDDED": "yes"}, "redis: cluster and embedded exclude each other"),
        ({"SENTINELS": "h", "MASTER_NAME": "m"}, "redis.sentinels.0: must be HOST:PORT with a port"),
        ({"SENTINELS": "h:1,", "MASTER_NAME": "m"}, "redis.sentinels.1: must be HOST:PORT with a port"),
        ({"SENTINELS": "[a: 1: 2]", "MASTER_NAME": "m"}, "redis.sentinels: must be a list, separated by commas or"),
        ({"SENTINELS": "[{h: 1}]", "MASTER_NAME": "m"}, "redis.sentinels.0: "),
    ],
)
def test_what_does_not_go_together(env: dict[str, str], said: str) -> None:
    (problem,) = problems(**env)
    assert problem.startswith(said)
    assert "(MOORAGE_REDIS_" in problem


def test_a_password_among_the_sentinels_is_not_repeated() -> None:
    for text in ("redis://:hush@h", "user:hush@h"):
        (problem,) = problems(SENTINELS=text, MASTER_NAME="m")
        assert "hush" not in problem


def test_embedded_overrules_a_store_named_below_and_the_other_way_round() -> None:
    env = {"MOORAGE_REDIS_SENTINELS": "h:1", "MOORAGE_REDIS_MASTER_NAME": "m"}
    settings = load_settings(None, {"embedded": True}, env)
    assert settings.embedded
    assert settings.redis.sentinels == ()
    assert settings.redis.master_name is None
    assert not load_settings(None, {"redis_url": "redis://:pw@"}, env).embedded


@pytest.mark.parametrize(
    ("url", "cluster", "said"),
    [
        ("redis://h/3", True, "database 0 only"),
        ("unix:///socket", True, "redis:// or rediss://"),
        ("unix:///socket", False, "redis:// or rediss://"),
        ("ftp://h", False, "scheme"),
    ],
)
async def test_urls_that_will_not_do(url: str, cluster: bool, said: str) -> None:
    sentinels = () if cluster else (("h", 1),)
    with pytest.raises(ValueError, match=said):
        await open_store(url, embedded=False, sentinels=sentinels, master_name="m", cluster=cluster)
