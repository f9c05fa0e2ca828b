"""The scripts as texts: what the store's linter says, and what their headers promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from moorage_server.store import scripts

_FOLDER = resources.files("moorage_server.store") / "lua"
_HELPERS = sorted(f.name.removesuffix(".lua") for f in _FOLDER.iterdir() if f.name.startswith("_"))


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def _header(name: str) -> str:
    return "\n".join(line for line in _text(name).splitlines() if line.startswith("--"))


@pytest.mark.parametrize("name", scripts.names())
def test_luacheck(name: str, tmp_path: Path) -> None:
    """Undefined globals pass unseen in fakeredis, and raise in Redis. What an include brings may go unused."""
    luacheck = shutil.which("luacheck")
    if luacheck is None:
        if os.environ.get("CI"):
            pytest.fail("luacheck is not installed")
        pytest.skip("luacheck is not installed")
    whole = tmp_path / f"{name}.lua"
    whole.write_text(scripts.source(name), encoding="utf-8")
    options = ("--std", "lua51", "--globals", "redis", "KEYS", "ARGV", "cjson", "--no-color", "--no-unused")
    checked = subprocess.run([luacheck, str(whole), *options], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", scripts.names())
def test_every_argument_is_declared_in_the_header(name: str) -> None:
    """ARGV[1] is the prefix of the pool's keys, in every script."""
    declared = {int(n) for n in re.findall(r"(?:ARGV|--|  )\s*(\d+) ", _header(name))}
    used = {int(n) for n in re.findall(r"ARGV\[(\d+)\]", _text(name))}
    assert used <= declared


@pytest.mark.parametrize("name", scripts.names())
def test_the_header_says_what_comes_back(name: str) -> None:
    assert "Returns" in _header(name)


@pytest.mark.parametrize("name", scripts.names())
def test_every_include_is_needed(name: str) -> None:
    (line,) = [line for line in _text(name).splitlines() if line.startswith("-- include:")]
    parts = line.removeprefix("-- include:").split()
    assert len(set(parts)) == len(parts)
    texts = {part: _text(part) for part in parts} | {name: _text(name)}
    for part in parts:
        offers = re.findall(r"^local (?:function )?([\w, ]+)", texts[part], re.MULTILINE)
        names = {n for offer in offers for n in re.findall(r"\w+", offer)}
        others = "\n".join(text for other, text in texts.items() if other != part)
        assert any(re.search(rf"\b{n}\b", others) for n in names), f"{name}.lua does not need {part}"


def test_every_helper_is_used() -> None:
    """Nothing is kept that no script calls."""
    texts = {name: _text(name) for name in [*scripts.names(), *_HELPERS]}
    for helper in _HELPERS:
        for name in re.findall(r"^local function (\w+)", texts[helper], re.MULTILINE):
            calls = sum(len(re.findall(rf"\b{name}\(", text)) for text in texts.values())
            assert calls > 1, f"{helper}.lua: nobody calls {name}"


@pytest.mark.parametrize("name", [*scripts.names(), *_HELPERS])
def test_no_client_clock_no_scan_and_nothing_but_the_common_subset(name: str) -> None:
    text = _text(name)
    for banned in ("'KEYS'", "'SCAN'", r"\bcmsgpack\b", r"\bstruct\b", r"\bbit\.", r"\bos\.", r"\bio\.", "pcall", "#!"):
        assert not re.search(banned, text), banned
    assert ("'TIME'" in text) == (name == "_base")


@pytest.mark.parametrize("name", scripts.names())
def test_no_script_hides_behind_its_length(name: str) -> None:
    lines = [line for line in _text(name).splitlines() if not line.startswith("--")]
    assert len(lines) <= (130 if name == "admit" else 80)
