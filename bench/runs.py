"""Plays many simulated cases on several processors and keeps what was played, so that an interrupted sweep goes on.

A run is kept under the digest of its case and of the code that plays it: changed code plays again.
"""

import copyreg
import functools
import gzip
import hashlib
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import structlog

import moorage_server
from bench import quick_lua, simulate
from bench.player import RunRecord
from bench.simulate import Case
from bench.summary import figures

CODE = (
    "backends",
    "blocks",
    "cache_aware",
    "clairvoyant",
    "conditions",
    "control_plane",
    "emulator",
    "player",
    "quick_lua",
    "routers",
    "simulate",
    "virtual_time",
    "workload",
)
"""Modules of the bench that a run depends on; all of the server's are added."""

Say = Callable[[str], None]


def read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    """Return a read-only view."""
    return MappingProxyType(values)


# A case holds configurations, and those hold read-only mappings.
copyreg.pickle(MappingProxyType, lambda mapping: (read_only, (dict(mapping),)))


def default_directory() -> Path:
    """Return where finished runs are kept: outside of the repository."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moorage-bench"


@functools.cache
def code_version() -> str:
    """Return a digest of the code that plays a case."""
    bench = Path(simulate.__file__).parent
    server = Path(moorage_server.__file__).parent
    files = [*(bench / f"{name}.py" for name in CODE), quick_lua.HASHES]
    files += sorted(path for path in server.rglob("*") if path.suffix in (".py", ".lua"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def key(case: Case) -> str:
    """Return the name under which a case's run is kept."""
    return hashlib.sha256(f"{case!r} {code_version()}".encode()).hexdigest()[:32]


def commit() -> str:
    """Return the commit at hand, marked where files differ from it."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def say(text: str) -> None:
    """Tell progress, apart from the report."""
    print(text, file=sys.stderr, flush=True)


def describe(case: Case) -> str:
    """Return a case in a few words."""
    cap = "" if case.cap is None else f" cap {case.cap}"
    shift = "" if case.shift is None else ", shifted"
    return f"{case.router}{cap}, {case.engines} engines, seed {case.seed}{shift}"


class Runs:
    """Plays cases in `jobs` processes, which last until it is left, and keeps what was played in a directory."""

    def __init__(self, jobs: int, directory: Path, say: Say) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Sums over sets of names depend on their order.
        os.environ.setdefault("PYTHONHASHSEED", "0")
        self._directory = directory
        self._say = say
        self._pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_quiet)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def play(self, cases: Sequence[Case]) -> list[RunRecord]:
        """Return the runs of all cases, in order; those not kept yet are played."""
        wanted = {key(case): case for case in cases}
        missing = {name: case for name, case in wanted.items() if not self._path(name).exists()}
        if missing:
            self._play(missing)
        # One record per run, also where a case is asked for twice.
        records = {name: _load(self._path(name)) for name in wanted}
        return [records[key(case)] for case in cases]

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.pickle.gz"

    def _play(self, missing: dict[str, Case]) -> None:
        started = time.monotonic()
        running = {self._pool.submit(_play_one, case, self._path(name)): case for name, case in missing.items()}
        for done, future in enumerate(as_completed(running), 1):
            rate, cpu_s = future.result()
            left_s = (time.monotonic() - started) / done * (len(missing) - done)
            self._say(
                f"[{done}/{len(missing)}] {describe(running[future])}: {rate:.1f} samples/min, {cpu_s:.0f} s CPU, "
                f"about {left_s / 60:.0f} min left"
            )


def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    logging.getLogger("bench.player").setLevel(logging.ERROR)


def _play_one(case: Case, path: Path) -> tuple[float, float]:
    """Play one case and keep it; return its sample rate, warm-up included, and the CPU seconds it took."""
    started = time.process_time()
    record = simulate.run(case)
    partial = path.with_suffix(f".{os.getpid()}")
    with gzip.open(partial, "wb", compresslevel=1) as file:
        pickle.dump(record, file)
    partial.replace(path)
    return figures(record, 0.0, record.end, 32).samples_per_minute or 0.0, time.process_time() - started


def _load(path: Path) -> RunRecord:
    with gzip.open(path, "rb") as file:
        record: RunRecord = pickle.load(file)
    return record
