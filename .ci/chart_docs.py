"""The table of values in the chart's README, from the comments in values.yaml: chart_docs.py [--write].

A comment that begins with `# --` documents the value below it; lines that go on start with `#`. Values without one are
listed without a word. Prints the README as it should be, or writes it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "helm/moorage"
BEGIN, END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
#: These are shown whole, whatever they hold.
WHOLE = {
    "autoscaling.behavior", "config", "topologySpread", "podSecurityContext", "securityContext", "resources",
    "redis.bundled.resources", "collector.resources", "dashboard.labels",
}  # fmt: skip


def readme() -> str:
    """The README with the table that values.yaml makes."""
    head, _, rest = (CHART / "README.md").read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def table() -> str:
    """One row per value."""
    text = (CHART / "values.yaml").read_text("utf-8")
    told = _comments(text)
    rows = ["| value | default | |", "|---|---|---|"]
    for path, value in _values(yaml.safe_load(text), ""):
        rows.append(f"| `{path}` | `{json.dumps(value, ensure_ascii=False)}` | {told.get(path, '')} |")
    return "\n".join(rows) + "\n"


def _values(values: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value and path not in WHOLE:
            yield from _values(value, f"{path}.")
        else:
            yield path, value


def _comments(text: str) -> dict[str, str]:
    """What is said of each path. Keys are found by their indentation, two blanks a level."""
    told: dict[str, str] = {}
    above: list[str] = []
    said: list[str] | None = None
    for line in text.splitlines():
        comment = re.match(r"\s*# (-- )?(.*)", line)
        key = re.match(r"( *)([\w./-]+):", line)
        if comment and comment[1]:
            said = [comment[2]]
        elif comment and said is not None:
            said.append(comment[2])
        elif key:
            above = [*above[: len(key[1]) // 2], key[2]]
            if said is not None:
                told[".".join(above)] = " ".join(said).replace("|", r"\|")
            said = None
        else:
            said = None
    return told


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        (CHART / "README.md").write_text(readme(), "utf-8")
    else:
        print(readme(), end="")
