"""Installs what builds and tests the stubs in other languages, where it is missing or too old: toolchains.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.languages import LANGUAGES, wanted

PACKAGES = Path(__file__).with_name("debian-packages")


def main() -> int:
    """The exit code: 0 where every tool is there now."""
    tools = {tool: problem for language in LANGUAGES for tool, problem in wanted(language).items()}
    # Named so that none of them is there: debian-packages leaves alone what it finds, however old.
    if packages := [f"{tool.program}-{tool.least}={tool.debian}" for tool in tools if tool.debian]:
        subprocess.run([PACKAGES, *packages], check=False)
    if wheels := [tool.wheel for tool in tools if tool.wheel]:
        print(f"==> installing beside {sys.executable}: {' '.join(wheels)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, *wheels], check=False)
    left = [problem for language in LANGUAGES for problem in wanted(language).values()]
    for problem in left:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
