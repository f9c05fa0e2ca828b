"""Loads the Lua scripts: each file with the helpers it includes, as one text. Included helpers start with ``_``."""

from __future__ import annotations

from functools import cache
from importlib import resources

_INCLUDE = "-- include:"


@cache
def _file(name: str) -> str:
    return (resources.files(__package__) / "lua" / f"{name}.lua").read_text(encoding="utf-8")


@cache
def source(name: str) -> str:
    """Whole text of the script ``name``.

    Raises ValueError where the file does not say what it includes.
    """
    text = _file(name)
    lines = [line for line in text.splitlines() if line.startswith(_INCLUDE)]
    if len(lines) != 1:
        raise ValueError(f"{name}.lua: one line '{_INCLUDE} ...' is expected, found {len(lines)}")
    return "\n".join([*(_file(part) for part in lines[0].removeprefix(_INCLUDE).split()), text])


def names() -> list[str]:
    """All scripts, helpers left out."""
    folder = resources.files(__package__) / "lua"
    stems = (entry.name.removesuffix(".lua") for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return sorted(stem for stem in stems if not stem.startswith("_"))
