"""The demo end to end: control plane, emulated engines, rollouts, frames, and nothing left behind."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.control_plane import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_the_demo_plays_its_sessions_and_ends_what_it_started() -> None:
    port = free_port()
    command = [sys.executable, "-m", "bench.demo", "--once", "--sessions", "3", "--seed", "230", "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "sessions: 3 completed" in done.stdout
    assert "engine-0" in done.stdout
    assert "\x1b" not in done.stdout, "frames are plain where there is no terminal"
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
