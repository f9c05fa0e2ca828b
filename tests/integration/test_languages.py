"""The stubs for other languages: each builds, plays the conformance table, and runs its example on a live server."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.integration.languages import BUILD_S, CLIENTS, LANGUAGES, TEST_S, Language, Tool, run, toolchain, wanted

pytestmark = pytest.mark.timeout(BUILD_S + TEST_S)


@pytest.mark.parametrize("language", LANGUAGES, ids=[language.directory for language in LANGUAGES])
def test_language(language: Language, conformance_servers: dict[str, str]) -> None:
    toolchain(language)
    run(language, language.build, {}, BUILD_S)
    run(language, language.test, conformance_servers, TEST_S)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("tool version 2.1.9", ""),
        ("tool version 10.0", ""),
        ("tool version 2.0.7", "tool 2.1 or later is needed, this is 'tool version 2.0.7'"),
        ("who knows", "tool 2.1 or later is needed, this is 'who knows'"),
        (None, "not installed: tool 2.1 or later"),
    ],
)
def test_tools_that_will_not_do_are_told(
    said: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    tool = Tool("a-tool-of-this-test", (), (2, 1))
    if said is not None:
        (tmp_path / tool.program).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / tool.program).chmod(0o755)
    expected = problem.replace("tool 2.1", f"{tool.program} 2.1")
    assert wanted(Language("nowhere", (tool,), (), ())) == ({tool: expected} if problem else {})


def test_stale_stubs_are_told(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("stubs", CLIENTS.parent / ".ci/stubs.py")
    assert spec is not None
    assert spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    fresh, home = tmp_path / "fresh", tmp_path / "home"
    for path, text in {
        fresh / "v1/same.pb.go": "1",
        fresh / "v1/changed.pb.go": "2",
        fresh / "v1/new.pb.go": "1",
        home / "v1/same.pb.go": "1",
        home / "v1/changed.pb.go": "1",
        home / "v1/gone.pb.go": "1",
        home / "v1/handwritten.go": "1",
        home / "README.md": "1",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert stubs.stale(fresh, home) == ["v1/changed.pb.go", "v1/gone.pb.go", "v1/new.pb.go"]
