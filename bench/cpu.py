"""CPU seconds of the processes that take part in a run, descendants included. Linux only: read from /proc."""

import os
from collections.abc import Mapping
from pathlib import Path

from bench import children

TICK = os.sysconf("SC_CLK_TCK")

PLAYER, ELSEWHERE = "player", "elsewhere"
"""This process, and what the machine did outside all processes that are named."""


class Meter:
    """Measures from its making on. Children that were started by then count under their names."""

    def __init__(self, others: Mapping[int, str] | None = None) -> None:
        """`others` names processes, by id, that are no children of this one."""
        self._names = {**children.started(), **(others or {})}
        self._start = self._read()

    def seconds(self) -> dict[str, float]:
        """Return CPU seconds since the start, by name."""
        return {name: round(value - self._start.get(name, 0.0), 2) for name, value in self._read().items()}

    def _read(self) -> dict[str, float]:
        parents, used = _processes()
        seconds = dict.fromkeys([PLAYER, *self._names.values()], 0.0)
        for pid, spent in used.items():
            name = PLAYER if pid == os.getpid() else self._name(pid, parents)
            if name is not None:
                seconds[name] += spent
        seconds[ELSEWHERE] = _machine() - sum(seconds.values())
        return seconds

    def _name(self, pid: int, parents: Mapping[int, int]) -> str | None:
        while pid > 1:
            if pid in self._names:
                return self._names[pid]
            pid = parents.get(pid, 0)
        return None


def listener(port: int) -> int | None:
    """Return the process that listens on a TCP port of this machine; None where none can be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in _process_directories():
        try:
            if any(os.readlink(handle) in inodes for handle in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            # It ended meanwhile, or is somebody else's.
            continue
    return None


def _processes() -> tuple[dict[int, int], dict[int, float]]:
    """Return parent and CPU seconds of each process."""
    parents, used = {}, {}
    for process in _process_directories():
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(process.name)
        parents[pid] = int(fields[1])
        # Time of children that ended counts too: engines have helpers.
        used[pid] = sum(map(int, fields[11:15])) / TICK
    return parents, used


def _process_directories() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _machine() -> float:
    """CPU seconds that the machine worked since it started: user, nice, system, interrupts."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq = map(int, fields[1:8])
    return (user + nice + system + irq + softirq) / TICK
