"""moorage serve, collect and ping: what they hand over to the parts that do the work."""

from __future__ import annotations

import builtins
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moorage.collect import runner
from moorage.credentials import Proof
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake import Code, Failure, FakeServer


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mapping[str, object], str | None]]:
    """What moorage_server.runtime.main.serve was called with; it answers 7."""
    calls: list[tuple[Mapping[str, object], str | None]] = []

    def serve(overrides: Mapping[str, object], config_file: str | None) -> int:
        calls.append((overrides, config_file))
        return 7

    module = ModuleType("moorage_server.runtime.main")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moorage_server.runtime.main", module)
    return calls


def test_serve_hands_over_only_what_was_given(run: Run, served: list[Any], tmp_path: Path) -> None:
    (tmp_path / "moorage.yaml").touch()
    run("serve", code=7)
    run(
        "serve", "--listen", "0.0.0.0:1", "--redis-url", "redis://r", "--config", "moorage.yaml",
        "--metrics-listen", "127.0.0.1:9464", "--log-format", "json", "--log-level", "DEBUG", "--reflection", code=7,
    )  # fmt: skip
    run("serve", "--embedded", "--no-reflection", code=7)
    assert served == [
        ({}, None),
        (
            {
                "listen": "0.0.0.0:1", "redis_url": "redis://r", "metrics_listen": "127.0.0.1:9464",
                "log_format": "json", "log_level": "debug", "reflection": True,
            },
            "moorage.yaml",
        ),
        ({"embedded": True, "reflection": False}, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--redis-url", "redis://r", "--embedded"], "exclude each other"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--log-format", "xml"], "--log-format"),
        (["--server", "x"], "--server"),
    ],
)
def test_serve_usage_errors(run: Run, served: list[Any], args: list[str], complaint: str) -> None:
    assert complaint in run("serve", *args, code=2).stderr
    assert served == []


def _hide(monkeypatch: pytest.MonkeyPatch, importing: str, missing: str) -> None:
    """Make `importing` fail as it does where the package `missing` is not installed."""
    genuine = builtins.__import__

    def hidden(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == importing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", hidden)


def test_serve_without_the_server_says_how_to_install_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(monkeypatch, "moorage_server.runtime.main", "redis")
    assert run("serve", code=1).stderr.splitlines() == [
        "error: the server is not installed: module 'redis' is missing",
        "  hint: pip install 'moorage[server]'",
    ]


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[runner.CollectorSettings]:
    """What the collector was started with."""
    calls: list[runner.CollectorSettings] = []

    async def collect(settings: runner.CollectorSettings, *, stop: object = None) -> None:
        assert stop is not None
        calls.append(settings)

    monkeypatch.setattr(runner, "run", collect)
    return calls


def test_collect_takes_urls_in_both_ways(
    run: Run, server: FakeServer, collected: list[runner.CollectorSettings]
) -> None:
    run("collect", "vllm", "--url", "a=http://h:1", "http://h:2", "--url", "http://h:3")
    assert collected == [
        runner.CollectorSettings(urls=("a=http://h:1", "http://h:3", "http://h:2"), server=server.address)
    ]


def test_collect_passes_its_options_on(run: Run, collected: list[runner.CollectorSettings]) -> None:
    run(
        "collect", "vllm", "--url", "http://h:1", "--pool", "p", "--server", "s:1", "--interval", "500ms", "--timeout",
        "200ms", "--token", "t",
    )  # fmt: skip
    assert collected == [
        runner.CollectorSettings(
            urls=("http://h:1",), pool="p", server="s:1", interval=0.5, timeout=0.2, proof=Proof("t"), engine="vllm"
        )
    ]


def test_collect_is_told_where_kv_events_are(run: Run, server: FakeServer, collected: list[Any]) -> None:
    where = ("a=tcp://h:5557,tcp://h:5558", "b=off")
    run("collect", "sglang", "--url", "http://h:1", "--kv-events", where[0], "--kv-events", where[1])
    assert collected == [
        runner.CollectorSettings(urls=("http://h:1",), server=server.address, engine="sglang", kv_events=where)
    ]
    refused = run("collect", "vllm", "--url", "http://h:1", "--kv-events", "h:5557", code=2)
    assert "KV events are given as NAME=tcp://HOST:PORT" in refused.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_collect_finds_engines(
    run: Run, server: FakeServer, collected: list[runner.CollectorSettings], engine: str
) -> None:
    run(
        "collect", engine, "--dns", "a.example:8000", "--dns", "b.example:8000", "--kube-selector", "app=x",
        "--kube-namespace", "rl", "--kube-port", "9000", "--discovery-interval", "30s",
    )  # fmt: skip
    assert collected == [
        runner.CollectorSettings(
            urls=(),
            server=server.address,
            engine=engine,
            dns=("a.example:8000", "b.example:8000"),
            kube_selector="app=x",
            kube_namespace="rl",
            kube_port=9000,
            discovery_interval=30.0,
        )
    ]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "no engine"),
        (["--dns", "engines.example"], "not a DNS name and port"),
        (["--kube-selector", "app=x"], "KUBERNETES_SERVICE_HOST is not set"),
        (["--kube-port", "8000"], "only with a label selector"),
        (["--kube-selector", "app=x", "--kube-port", "0"], "--kube-port"),
        (["--url", "http://h:1", "--interval", "0"], "interval must be"),
        (["--url", "http://h:1", "--server", "h:1", "--token", "t"], "in clear text"),
        (["--url", "http://h:1", "--key", __file__], "--cert and --key go together"),
        (["--url", "ftp://h"], "ftp://h"),
    ],
)
def test_collect_usage_errors(run: Run, args: list[str], complaint: str) -> None:
    assert complaint in run("collect", "vllm", *args, code=2).stderr


def test_collect_without_its_extra_says_how_to_install_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(monkeypatch, "moorage.collect.runner", "httpx")
    assert "hint: pip install 'moorage[collect]'" in run("collect", "vllm", "--url", "http://h", code=1).stderr


def test_ping_tells_ready_from_alive(run: Run, server: FakeServer) -> None:
    server.set_health("SERVING")
    assert run("ping").stdout.startswith(f"{server.address} ready in ")
    answer = json.loads(run("ping", "-o", "json").stdout)
    assert (answer["server"], answer["liveness"], answer["readiness"]) == (server.address, "SERVING", "SERVING")
    assert answer["milliseconds"] > 0
    server.set_health("NOT_SERVING")
    assert run("ping", code=5).stdout.startswith(f"{server.address} alive, not ready (NOT_SERVING) in ")


def test_ping_waits_until_the_server_is_ready(run: Run, server: FakeServer) -> None:
    server.set_health("NOT_SERVING")
    later = threading.Timer(0.3, server.set_health, ["SERVING"])
    later.start()
    started = time.monotonic()
    run("ping", "--wait", "10s")
    assert 0.2 < time.monotonic() - started < 5
    later.join()


def test_ping_of_nobody_is_unavailable_after_the_wait(run: Run) -> None:
    started = time.monotonic()
    assert "UNAVAILABLE" in run("ping", "--server", "127.0.0.1:1", "--wait", "300ms", code=5).stderr
    assert time.monotonic() - started > 0.3


def test_ping_of_something_else_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.cli.ping._check", _unimplemented)
    run("ping", "--wait", "10s", code=1)


def _unimplemented(*_: object) -> str:
    from moorage.cli.errors import RpcFailure

    raise RpcFailure("UNIMPLEMENTED", Failure(Code.UNIMPLEMENTED).message)
