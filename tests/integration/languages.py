"""The languages that client/ has stubs for, and what it takes to build and test each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parents[2] / "client"
#: A first build fetches and compiles what the stubs need, on a machine that may be busy: seconds.
BUILD_S = 900.0
#: All cases and the example: seconds.
TEST_S = 300.0

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, the arguments that make it tell its version, and the oldest one that will do."""

    program: str
    asked: tuple[str, ...]
    least: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Language:
    """A directory of client/, and the commands that build and test what is in it.

    The tests read MOORAGE_SERVER and MOORAGE_SERVER_STORE_DOWN: see proto/conformance.
    """

    directory: str
    tools: tuple[Tool, ...]
    build: tuple[str, ...]
    test: tuple[str, ...]


LANGUAGES = (
    Language("go", (Tool("go", ("version",), (1, 24)),), ("go", "vet", "./..."), ("go", "test", "-count=1", "./...")),
)


def toolchain(language: Language) -> None:
    """Skips the test where a tool is missing or too old; fails it in CI."""
    wanting = [problem for tool in language.tools if (problem := _problem(tool))]
    if wanting and os.environ.get("CI"):
        pytest.fail(f"{'; '.join(wanting)}: see .ci/toolchains")
    if wanting:
        pytest.skip("; ".join(wanting))


def run(language: Language, command: tuple[str, ...], servers: Mapping[str, str], timeout_s: float) -> str:
    """Runs a command in the language's directory to its good end; what it said."""
    done = subprocess.run(
        command,
        cwd=CLIENTS / language.directory,
        env=_environment(servers),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)} in client/{language.directory} said:\n{done.stdout}"
    return done.stdout


def _problem(tool: Tool) -> str:
    """What is wrong with a tool, nothing where nothing is."""
    least = ".".join(map(str, tool.least))
    path = shutil.which(tool.program, path=_environment({})["PATH"])
    if path is None:
        return f"not installed: {tool.program} {least} or later"
    done = subprocess.run([path, *tool.asked], env=_environment({}), capture_output=True, text=True, check=False)
    found = _NUMBERS.search(done.stdout + done.stderr)
    if found is None or (int(found[1]), int(found[2])) < tool.least:
        said = (done.stdout or done.stderr).strip().partition("\n")[0]
        return f"{tool.program} {least} or later is needed, this is {said!r}"
    return ""


def _environment(servers: Mapping[str, str]) -> dict[str, str]:
    """Where a machine's own tools are too old, newer ones lie beside the interpreter."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **servers}
