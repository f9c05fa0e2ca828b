"""Configuration of a server: sources, precedence, and what is said of unusable values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from moorage.cli.main import cli
from moorage.cli.options import GlobalOption
from moorage_server.core.config import ClassConfig, PoolConfig
from moorage_server.runtime.section import Section
from moorage_server.runtime.settings import ClassSettings, PoolSettings, Settings
from moorage_server.runtime.settings_sources import (
    CLIENT_VARIABLES,
    FLAGS,
    SettingsError,
    environment_variables,
    load_settings,
    unknown_variables,
)

EXAMPLE = Path(__file__).parents[3] / "server" / "moorage.example.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "moorage.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def problems(
    file: str | None = None, flags: dict[str, object] | None = None, env: dict[str, str] | None = None
) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(file, flags or {}, env or {})
    return list(caught.value.problems)


def test_defaults() -> None:
    settings = load_settings(None, {}, {})
    assert settings.listen == "127.0.0.1:50061"
    assert settings.embedded
    assert settings.redis_url is None
    assert settings.reflects
    assert settings.pool_configs() == {}


def test_flags_win_over_variables_over_the_file_over_defaults(config: Any) -> None:
    file = config("log: {level: debug, format: json, decisions: all}\nshutdown: {grace_s: 3}")
    env = {"MOORAGE_LOG_LEVEL": "warning", "MOORAGE_LOG_FORMAT": "console"}
    settings = load_settings(file, {"log_level": "error", "listen": None}, env)
    assert settings.log.level == "error"
    assert settings.log.format == "console"
    assert settings.log.decisions == "all"
    assert settings.shutdown.grace_s == 3
    assert settings.shutdown.pre_stop_delay_s == 0


def test_a_variable_may_name_the_file(config: Any) -> None:
    env = {"MOORAGE_CONFIG": config("listen: 127.0.0.1:1")}
    assert load_settings(None, {}, env).listen == "127.0.0.1:1"


def test_every_flag_sets_its_key() -> None:
    values: dict[str, object] = {
        "listen": "0.0.0.0:1",
        "redis_url": "redis://h",
        "metrics_listen": "127.0.0.1:9464",
        "log_format": "json",
        "log_level": "error",
        "reflection": True,
        "insecure_listen": True,
        "processes": 2,
    }
    settings = load_settings(None, values, {})
    assert (settings.listen, settings.processes) == ("0.0.0.0:1", 2)
    assert settings.redis_url == "redis://h"
    assert settings.metrics.listen == "127.0.0.1:9464"
    assert (settings.log.format, settings.log.level, settings.reflection) == ("json", "error", True)
    assert load_settings(None, {"embedded": True}, {}).redis.embedded is True
    assert set(FLAGS) == {*values, "embedded"}


def test_a_misspelt_variable_is_found() -> None:
    given = dict.fromkeys(("MOORAGE_METRIC_LISTEN", "MOORAGE_TOKN", "MOORAGE_XYZZY", "MOORAGE_LISTEN", "HOME"), "1")
    assert unknown_variables(given) == {
        "MOORAGE_METRIC_LISTEN": "MOORAGE_METRICS_LISTEN",
        "MOORAGE_TOKN": "MOORAGE_TOKEN",
        "MOORAGE_XYZZY": "",
    }
    known = [*environment_variables(), *CLIENT_VARIABLES, "MOORAGE_POOLS", "MOORAGE_CONFIG"]
    assert unknown_variables(dict.fromkeys(known, "1")) == {}


def test_what_the_command_line_reads_is_known() -> None:
    read = {str(param.envvar) for param in cli.params if isinstance(param, GlobalOption) and param.envvar}
    assert read == CLIENT_VARIABLES


def test_what_kubernetes_sets_for_a_service_is_not_ours() -> None:
    links = {
        "MOORAGE_SERVICE_HOST": "10.0.0.7",
        "MOORAGE_SERVICE_PORT_GRPC": "50061",
        "MOORAGE_PORT": "tcp://10.0.0.7:50061",
        "MOORAGE_PORT_50061_TCP_ADDR": "10.0.0.7",
    }
    assert unknown_variables(links) == {}
    assert unknown_variables({"MOORAGE_PORT": "50061"}).keys() == {"MOORAGE_PORT"}


def test_every_key_outside_pools_has_a_variable() -> None:
    keys = {".".join(path) for path in environment_variables().values()}
    assert keys == {key for key, _ in leaves(Settings) if not key.startswith(("pools", "auth.certificates"))}
    env = {
        "MOORAGE_LISTEN": "[::1]:7",
        "MOORAGE_REFLECTION": "false",
        "MOORAGE_REDIS_URL": "redis://h",
        "MOORAGE_REDIS_KEY_PREFIX": "m",
        "MOORAGE_LOG_DECISIONS": "none",
        "MOORAGE_LIMITS_MAX_CONCURRENT_RPCS": "10",
        "MOORAGE_HEALTH_CHECK_TIMEOUT_S": "0.5",
        "MOORAGE_HEALTH_LISTEN": "127.0.0.1:1",
        "MOORAGE_METRICS_LISTEN": "127.0.0.1:2",
        "MOORAGE_TRACING_OTLP_ENDPOINT": "http://h:3",
        "MOORAGE_SHUTDOWN_PRE_STOP_DELAY_S": "5",
    }
    settings = load_settings(None, {}, env)
    assert settings.reflection is False
    assert settings.limits.max_concurrent_rpcs == 10
    assert settings.health.check_timeout_s == 0.5
    assert (settings.health.listen, settings.metrics.listen) == ("127.0.0.1:1", "127.0.0.1:2")
    assert settings.tracing.otlp_endpoint == "http://h:3"
    assert settings.shutdown.pre_stop_delay_s == 5.0
    assert settings.redis.key_prefix == "m"


def test_an_empty_variable_is_not_set_and_others_are_not_ours() -> None:
    env = {"MOORAGE_LISTEN": "", "MOORAGE_SERVER": "h:1", "MOORAGE_PORT_50061_TCP": "tcp://x"}
    assert load_settings(None, {}, env) == Settings()


def test_pools_from_a_variable_lie_on_top_of_the_file(config: Any) -> None:
    file = config("pools: {a: {static_cap: 3, headroom: 0.5}}")
    env = {"MOORAGE_POOLS": "{a: {headroom: 0.25}, b: {}}"}
    pools = load_settings(file, {}, env).pool_configs()
    assert pools == {"a": PoolConfig(static_cap=3, headroom=0.25), "b": PoolConfig()}


def test_pools_become_the_cores_configuration(config: Any) -> None:
    file = config(
        """
        pools:
          "p {1}":
            policy: static
            mode: observe
            lease_ttl_s: 5
            max_policy_lag: 2
            classes:
              rlvr: {target_share: 3, prior_context_tokens: 100, prior_residency_s: 1.5, refused: true, aliases: [m]}
              tools: {shared_prefix_tokens: 512}
              agentic:
        """
    )
    (pool,) = load_settings(file, {}, {}).pool_configs().items()
    assert pool == (
        "p {1}",
        PoolConfig(
            policy="static",
            mode="observe",
            lease_ttl_s=5.0,
            max_policy_lag=2,
            classes={
                "rlvr": ClassConfig(3.0, 100, 1.5, True, ("m",)),
                "tools": ClassConfig(shared_prefix_tokens=512),
                "agentic": ClassConfig(),
            },
        ),
    )


def test_pools_have_the_cores_fields_and_defaults() -> None:
    assert PoolSettings().to_core() == PoolConfig()
    assert set(PoolSettings.model_fields) == set(PoolConfig.__dataclass_fields__)
    assert set(ClassSettings.model_fields) == set(ClassConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("below", "flags", "env", "url", "embedded"),
    [
        ("redis: {url: 'redis://file'}", {"embedded": True}, {}, None, True),
        ("redis: {embedded: true}", {"redis_url": "redis://flag"}, {}, "redis://flag", False),
        ("redis: {embedded: true}", {}, {"MOORAGE_REDIS_URL": "redis://env"}, "redis://env", False),
        ("redis: {url: 'redis://file'}", {}, {"MOORAGE_REDIS_EMBEDDED": "true"}, None, True),
        ("redis: {url: 'redis://file'}", {"embedded": False}, {}, "redis://file", False),
        ("redis: {url: null}", {"embedded": True}, {"MOORAGE_REDIS_URL": "redis://env"}, None, True),
        ("redis:", {}, {}, None, True),
    ],
)
def test_whoever_names_a_store_last_decides(
    config: Any, below: str, flags: dict[str, object], env: dict[str, str], url: str | None, embedded: bool
) -> None:
    settings = load_settings(config(below), flags, env)
    assert settings.redis_url == url
    assert settings.embedded is embedded


def test_a_store_is_named_once() -> None:
    both: dict[str, object] = {"redis_url": "redis://:hush@h", "embedded": True}
    assert problems(flags=both) == ["redis: url and embedded exclude each other (--redis-url)"]
    neither = {"MOORAGE_REDIS_EMBEDDED": "false"}
    assert problems(env=neither) == ["redis: url is needed where embedded is false (MOORAGE_REDIS_EMBEDDED)"]


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:0", True),
        ("127.9.9.9:65535", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("moorage.example:1", False),
    ],
)
def test_reflection_is_on_by_default_on_loopback_only(listen: str, loopback: bool) -> None:
    assert Settings(listen=listen).reflects is loopback
    assert Settings(listen=listen, reflection=True).reflects
    assert not Settings(listen=listen, reflection=False).reflects


@pytest.mark.parametrize("listen", ["", "h", ":1", "h:", "h:x", "h:65536", "h:-1", "::1:5", "h:١"])
def test_unusable_addresses(listen: str) -> None:
    (problem,) = problems(flags={"listen": listen or " "})
    assert problem.startswith("listen: must be HOST:PORT")
    assert problem.endswith("(--listen)")


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("limits.max_message_bytes", [65_536, 4_194_304], [65_535, 4_194_305, "much"]),
        ("limits.max_concurrent_rpcs", [1, 1_000_000], [0, 1_000_001]),
        ("limits.max_connection_age_s", [1, 604_800], [0.99, 604_801, ".nan"]),
        ("health.listen", ["127.0.0.1:0", "'[::1]:1'", "null"], ["50062", "h", "'::1:5'"]),
        ("metrics.listen", ["0.0.0.0:9464", "null"], ["h:65536", "':1'"]),
        ("tracing.otlp_endpoint", ["http://h:4317", "https://h", "null"], ["h:4317", "http://h/v1/traces", "''"]),
        ("health.check_interval_s", [0.05, 60], [0.04, 61, ".inf"]),
        ("health.check_timeout_s", [0.05, 60], [0.04, 61]),
        ("shutdown.pre_stop_delay_s", [0, 300], [-1, 301]),
        ("shutdown.grace_s", [0, 600], [-1, 601]),
        ("redis.key_prefix", ["x", "p" * 64], ["''", "p" * 65, "'a{b}'", "'a b'"]),
        ("log.level", ["debug", "error"], ["loud"]),
        ("log.format", ["auto", "json", "console"], ["xml"]),
        ("log.decisions", ["all", "none"], ["some"]),
    ],
)
def test_bounds(config: Any, key: str, good: list[object], bad: list[object]) -> None:
    section, name = key.split(".")
    for value in good:
        load_settings(config(f"{section}: {{{name}: {value}}}"), {}, {})
    for value in bad:
        (problem,) = problems(config(f"{section}: {{{name}: {value}}}"))
        assert problem.startswith(f"{key}: must ")
        assert "moorage.yaml" in problem


def test_bounds_of_pools_are_the_cores(config: Any) -> None:
    found = problems(config("pools: {p: {headroom: 1.5, classes: {'a.b': {target_share: 0}}}}"))
    assert [line.partition(" (")[0] for line in found] == [
        "pools.p.headroom: must be above 0 and at most 1, got '1.5'",
        "pools.p.classes.a.b.target_share: must be a finite number above 0, got '0.0'",
    ]
    assert all(line.endswith("moorage.yaml)") for line in found)
    (problem,) = problems(config("pools: {p: {max_policy_lag: -1}}"))
    assert problem.startswith("pools.p.max_policy_lag: must be greater than or equal to 0, got '-1'")


def test_names_in_pools_follow_the_rule_for_ids(config: Any) -> None:
    load_settings(config(f"pools: {{{'p' * 256}: {{classes: {{{'c' * 256}: {{aliases: [{'a' * 256}]}}}}}}}}"), {}, {})
    for text in (
        f"{{{'p' * 257}: {{}}}}",
        "{'': {}}",
        f"{{p: {{classes: {{{'c' * 257}: {{}}}}}}}}",
        f"{{p: {{classes: {{c: {{aliases: [{'a' * 257}]}}}}}}}}",
        "{p: {classes: {c: {aliases: ['']}}}}",
    ):
        (problem,) = problems(env={"MOORAGE_POOLS": text})
        assert "must be 1 to 256 bytes of UTF-8" in problem


def test_unknown_keys_are_named_with_a_suggestion(config: Any) -> None:
    found = problems(config("listne: x\nredis: {passwrd: hush}\npools: {p: {classes: {c: {target_shar: 1}}}}"))
    assert [line.partition(" (")[0] for line in found] == [
        "redis.passwrd: unknown key; known here: url, embedded, sentinels, master_name, cluster, key_prefix",
        "pools.p.classes.c.target_shar: unknown key; did you mean target_share?",
        "listne: unknown key; did you mean listen?",
    ]
    assert "hush" not in str(found)


def test_problems_of_all_sources_are_told_at_once(config: Any) -> None:
    found = problems(
        config("shutdown: {grace_s: soon}"),
        {"listen": "nowhere"},
        {"MOORAGE_LOG_LEVEL": "loud", "MOORAGE_LOG_FORMAT": "xml"},
    )
    assert sorted(line.rpartition("(")[2] for line in found)[0] == "--listen)"
    assert any("(MOORAGE_LOG_LEVEL)" in line and "'loud'" in line for line in found)
    assert any("(MOORAGE_LOG_FORMAT)" in line for line in found)
    assert any("moorage.yaml)" in line and "'soon'" in line for line in found)


def test_passwords_are_in_no_error_and_no_text_form() -> None:
    settings = load_settings(None, {"redis_url": "redis://user:hush@h:1/0"}, {})
    assert "hush" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.redis_url == "redis://user:hush@h:1/0"
    for text in problems(env={"MOORAGE_REDIS_URL": "redis://:hush@h", "MOORAGE_REDIS_EMBEDDED": "yes"}):
        assert "hush" not in text


def test_a_url_in_the_wrong_place_is_masked(config: Any) -> None:
    (problem,) = problems(config("redis: redis://user:hush@h"))
    assert problem.startswith("redis: must be a valid dictionary")
    assert "hush" not in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "must hold keys and values, got a list"),
        ("a: [", "not YAML"),
        ("a: 1\na: 2", "key 'a' is given twice (line 2, column 1)"),
        ("a: \x01", "not YAML"),
    ],
)
def test_unreadable_files(config: Any, text: str, said: str) -> None:
    (problem,) = problems(config(text))
    assert said in problem


def test_a_missing_file(tmp_path: Path) -> None:
    (problem,) = problems(str(tmp_path / "none.yaml"))
    assert problem.endswith("none.yaml: can not be read: No such file or directory")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    (problem,) = problems(str(path))
    assert "can not be read" in problem


def test_settings_are_final() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().listen = "x:1"  # type: ignore[misc]


def leaves(section: type[BaseModel], above: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from leaves(field.annotation, f"{above}{name}.")
        else:
            yield f"{above}{name}", field.description


def test_every_key_is_described() -> None:
    for section in (Settings, PoolSettings, ClassSettings):
        for key, description in leaves(section):
            assert description, key


def test_the_example_shows_every_key_with_its_default() -> None:
    assert load_settings(str(EXAMPLE), {}, {}) == Settings(pools={"default": PoolSettings()})
    shown = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    for key, _ in leaves(Settings):
        section = shown
        for part in key.split("."):
            assert part in section, key
            section = section[part]
    assert set(shown["pools"]["default"]) == set(PoolSettings.model_fields)


def test_the_example_comments_every_key() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    for above, line in pairwise(lines):
        if line and not line.strip().startswith("#"):
            assert above.strip().startswith("#") or above.endswith("pools:"), line
    text = "\n".join(lines)
    for name in ClassSettings.model_fields:
        assert f"#     {name}: " in text
