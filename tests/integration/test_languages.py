"""The stubs for other languages: each builds, plays the conformance table, and runs its example on a live server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.languages import BUILD_S, LANGUAGES, TEST_S, Language, Tool, run, toolchain, wanted

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
