"""CPU seconds by process."""

import os
import socket
import sys
import time
from pathlib import Path

from bench import cpu
from bench.children import running


def test_a_child_counts_under_its_name_and_this_process_as_the_player(tmp_path: Path) -> None:
    work = "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    with running("worker", [sys.executable, "-c", work], tmp_path / "log") as child:
        meter = cpu.Meter()
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        for _ in range(100):
            if meter.seconds()["worker"] >= 0.3:
                break
            child.require_alive()
            time.sleep(0.1)
        used = meter.seconds()
    assert used["worker"] >= 0.3
    assert 0.1 <= used[cpu.PLAYER] < 5.0
    assert set(used) == {"worker", cpu.PLAYER, cpu.ELSEWHERE}


def test_a_listener_is_found_by_its_port() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert cpu.listener(port) is None
        listening.listen()
        assert cpu.listener(port) == os.getpid()
