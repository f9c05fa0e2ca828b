"""server/Dockerfile, without Docker: what a linter says, and that what it copies is enough to install and to serve."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.integration.processes import environment
from tests.unit.helm.chart import ROOT

TEXT = (ROOT / "server/Dockerfile").read_text("utf-8")
#: Instructions as (name, words), without comments.
STEPS = [
    (line.split()[0], shlex.split(line)[1:])
    for line in re.sub(r"\\\n", " ", TEXT).splitlines()
    if line and not line.startswith("#")
]
_STAGE = [index for index, (name, _) in enumerate(STEPS) if name == "FROM"]
BUILD, FINAL = STEPS[_STAGE[0] : _STAGE[1]], STEPS[_STAGE[1] :]


def _ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path of the repository out: the last rule that matches counts."""
    out = False
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if re.match(rf"{expression}(/|$)", path):
                out = not line.startswith("!")
    return out


def _copies() -> list[tuple[str, str]]:
    """(source, destination) of what the build stage takes from the repository."""
    copies = [words for name, words in BUILD if name == "COPY"]
    return [(source, words[-1]) for words in copies for source in words[:-1]]


def test_hadolint() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which("hadolint", path=path)
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("hadolint is not installed")
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [program, "server/Dockerfile"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_the_final_stage_has_nothing_to_build_with_and_no_root() -> None:
    assert ["--from=build", "/opt/moorage", "/opt/moorage"] in [words for name, words in FINAL if name == "COPY"]
    assert [words for name, words in FINAL if name == "USER"] == [["65532:65532"]]
    assert [words for name, words in FINAL if name == "RUN"] == [
        ["python", "-m", "pip", "uninstall", "--yes", "--root-user-action", "ignore", "pip"]
    ]
    assert re.search(r"^FROM python:\S+-slim-\w+$", TEXT, re.MULTILINE)
    assert 'ENTRYPOINT ["moorage"]' in TEXT


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sources = [source for source, _ in _copies()]
    assert len(sources) == 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not _ignored(source), source
    for left_out in (".git", ".venv/bin/python", "tests/conftest.py", "bench/demo.py", "proto/buf.yaml"):
        assert _ignored(left_out), left_out
    for left_out in ("client/moorage/__pycache__/errors.pyc", "server/moorage.example.yaml", "helm/moorage/Chart.yaml"):
        assert _ignored(left_out), left_out


def test_the_extra_that_is_installed_exists() -> None:
    ((requirement,),) = ([words[-1]] for name, words in BUILD if name == "RUN" and "install" in words)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert requirement == ".[proxy,server]"
    assert {"proxy", "server"} <= set(project["optional-dependencies"])
    low = int(project["requires-python"].removeprefix(">=3."))
    (version,) = re.findall(r"^ARG PYTHON_VERSION=3\.(\d+)$", TEXT, re.MULTILINE)
    assert int(version) >= low


def test_what_is_copied_installs_and_serves(tmp_path: Path) -> None:
    """As the image does it, but for the dependencies, which are those of this environment."""
    context, installed = tmp_path / "src", tmp_path / "installed"
    for source, destination in _copies():
        target = context / destination / (Path(source).name if destination.endswith("/") else "")
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, target)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(installed), str(context)],
        check=True, timeout=100, capture_output=True,
    )  # fmt: skip
    script = (
        "import moorage, moorage_server\n"
        "from moorage_server.store import scripts\n"
        "print(moorage.__file__, moorage_server.__file__, sum(map(len, map(scripts.source, scripts.names()))))\n"
        "from moorage.cli.main import cli\n"
        "cli(['serve', '--listen', 'nowhere'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment({"PYTHONPATH": str(installed)}), cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    client, server, characters = done.stdout.split()
    assert client == str(installed / "moorage/__init__.py")
    assert server == str(installed / "moorage_server/__init__.py")
    assert int(characters) > 10_000
    # As far as the configuration, which it finds unusable.
    assert done.returncode == 2, done.stderr
    assert "listen: must be HOST:PORT" in done.stderr
