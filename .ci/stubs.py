"""Generates the committed stubs in other languages than Python, or checks them: stubs.py [--check].

Each client/LANGUAGE/generate.sh does one, with protoc as PYTHON has it. A language whose tools are missing is left out;
in CI that is an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.integration.languages import CLIENTS, LANGUAGES, environment, wanted


def main() -> int:
    """The exit code: 0 where all is up to date."""
    check = "--check" in sys.argv[1:]
    failed = False
    for language in LANGUAGES:
        home = CLIENTS / language.directory
        if not (home / "generate.sh").exists():
            continue
        if wanting := "; ".join(wanted(language).values()):
            print(f"client/{language.directory}: not generated: {wanting}", file=sys.stderr)
            failed |= bool(os.environ.get("CI"))
            continue
        with tempfile.TemporaryDirectory() as out:
            done = subprocess.run([home / "generate.sh", out if check else home], env=environment(), check=False)
            old = stale(Path(out), home) if check and done.returncode == 0 else []
        for name in old:
            print(f"error: client/{language.directory}/{name} is stale: run `make stubs`", file=sys.stderr)
        if done.returncode != 0:
            print(f"error: client/{language.directory}/generate.sh failed", file=sys.stderr)
        elif not old:
            print(f"client/{language.directory}: generated code is up to date")
        failed |= bool(old) or done.returncode != 0
    return 1 if failed else 0


def stale(fresh: Path, home: Path) -> list[str]:
    """Files that differ, are missing, or are generated no more: of the kinds, and where, that are generated."""
    names = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    kinds = {(name.parent, "".join(name.suffixes)) for name in names if name.suffix}
    there = {path.relative_to(home) for parent, suffix in kinds for path in (home / parent).glob(f"*{suffix}")}
    return sorted(
        str(name)
        for name in names | there
        if name not in names or name not in there or (fresh / name).read_bytes() != (home / name).read_bytes()
    )


if __name__ == "__main__":
    sys.exit(main())
