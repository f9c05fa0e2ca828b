"""The fake server, and a runner that calls the command against it."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import pytest
from click.testing import CliRunner, Result

from moorage.cli.main import cli
from tests.unit.cli.fake import FakeServer, running

#: click before 8.2 has to be told to keep stdout and stderr apart; click since then always does.
_APART: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}


class Run(Protocol):
    """Calls the command; checks its exit code; returns what it printed."""

    def __call__(self, *args: str, code: int = 0, stdin: str | None = None) -> Result: ...


@pytest.fixture(scope="session")
def _served() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture
def server(_served: FakeServer) -> FakeServer:
    """The fake server, without answers and requests of other tests."""
    _served.answers.clear()
    _served.requests.clear()
    _served.metadata.clear()
    _served.deadlines.clear()
    return _served


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MOORAGE_SERVER", "MOORAGE_POOL", "MOORAGE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, with MOORAGE_SERVER naming the fake server."""
    monkeypatch.setenv("MOORAGE_SERVER", server.address)

    def call(*args: str, code: int = 0, stdin: str | None = None) -> Result:
        result = CliRunner(**_APART).invoke(cli, args, input=stdin, prog_name="moorage")
        assert result.exit_code == code, f"exit {result.exit_code}, not {code}:\n{result.output}\n{result.exception!r}"
        return result

    return call
