"""The command as a process: entry points, imports, terminals, signals, pipes."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moorage.v1 import inspector_pb2 as inspector
from tests.unit.cli import samples
from tests.unit.cli.fake import FakeServer

COMMAND = [sys.executable, "-m", "moorage.cli.main"]
HEAVY = ("grpc", "google.protobuf", "redis", "fakeredis", "moorage_server", "yaml", "numpy", "asyncio")


def _environment(server: FakeServer | None, **changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    address = {"MOORAGE_SERVER": server.address} if server is not None else {}
    return {**kept, **address, **changes}


def _run(*args: str, server: FakeServer | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], env=_environment(server), capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(
    "args", [["--help"], ["get", "sessions", "--help"], ["completion", "zsh"], ["serve", "--help"]]
)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    script = (
        "import sys\nfrom moorage.cli.main import cli\n"
        f"code = None\ntry:\n    cli({args!r})\nexcept SystemExit as end:\n    code = end.code\n"
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert result.stderr == "0 []\n"
    assert result.stdout


def test_the_module_runs_as_a_program(server: FakeServer) -> None:
    server.answers["GetPool"] = samples.pool()
    result = _run("get", "pool", "-o", "name", server=server)
    assert (result.returncode, result.stdout, result.stderr) == (0, "default\n", "")


def test_errors_alone_go_to_stderr(server: FakeServer) -> None:
    result = _run("get", "pool", server=server)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: UNIMPLEMENTED: no answer for GetPool\n")


def test_the_version_is_told() -> None:
    result = _run("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("moorage, version ")


def test_no_terminal_no_escapes(server: FakeServer) -> None:
    _watched(server)
    result = _run("top", "--iterations", "2", "--interval", "10ms", server=server)
    assert result.returncode == 0
    assert result.stdout.count("Thrashing?") == 2
    assert "\x1b" not in result.stdout


def _watched(server: FakeServer) -> None:
    server.answers.update(
        GetPool=samples.pool(pressure=0.5),
        ListInstances=samples.instances(),
        ListClasses=samples.classes(),
        ListSessions=inspector.ListSessionsResponse(sessions=[samples.held_session()]),
    )


def _on_terminal(server: FakeServer, *args: str, **environment: str) -> str:
    """What the command writes to a terminal."""
    outside, inside = pty.openpty()
    process = subprocess.Popen([*COMMAND, *args], env=_environment(server, **environment), stdout=inside, stdin=inside)
    os.close(inside)
    written = b""
    while select.select([outside], [], [], 20)[0]:
        try:
            chunk = os.read(outside, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        written += chunk
    os.close(outside)
    assert process.wait(20) == 0
    return written.decode()


def test_a_terminal_is_redrawn_in_place_and_coloured(server: FakeServer) -> None:
    _watched(server)
    text = _on_terminal(server, "top", "--iterations", "2", "--interval", "10ms", TERM="xterm")
    assert text.count("\x1b[2J") == 1
    assert text.count("\x1b[H") == 2
    assert "\x1b[31m\x1b[1mYES\x1b[0m" in text


def test_no_color_keeps_the_redrawing_but_not_the_colours(server: FakeServer) -> None:
    _watched(server)
    text = _on_terminal(server, "top", "--iterations", "2", "--interval", "10ms", TERM="xterm", NO_COLOR="1")
    assert text.count("\x1b[H") == 2
    assert "\x1b[31m" not in text


def test_a_dumb_terminal_gets_frames(server: FakeServer) -> None:
    _watched(server)
    text = _on_terminal(server, "top", "--iterations", "2", "--interval", "10ms", TERM="dumb")
    assert text.count("Thrashing?") == 2
    assert "\x1b" not in text


def _start_watch(server: FakeServer) -> subprocess.Popen[str]:
    """A watch that has printed its first event and waits for the next."""

    def answer(_: Any) -> Iterator[Any]:
        yield samples.event("1")
        time.sleep(5)

    server.answers["WatchEvents"] = answer
    process = subprocess.Popen(
        [*COMMAND, "watch"], env=_environment(server), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("2026-03-01T12:00:00.000Z admit")
    return process


def test_ctrl_c_exits_with_130(server: FakeServer) -> None:
    process = _start_watch(server)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (130, "", "")


def test_a_closed_pipe_ends_without_a_traceback(server: FakeServer) -> None:
    server.answers["WatchEvents"] = [samples.event(str(number)) for number in range(2000)]
    process = subprocess.Popen(
        [*COMMAND, "watch"], env=_environment(server), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(20) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = _run("completion", shell)
    assert result.returncode == 0
    assert "_MOORAGE_COMPLETE" in result.stdout


def test_completion_completes() -> None:
    environment = _environment(None, _MOORAGE_COMPLETE="zsh_complete", COMP_WORDS="moorage ge", COMP_CWORD="1")
    result = subprocess.run([*COMMAND], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert "get" in result.stdout.split()


def test_the_collector_ends_in_good_order_on_sigterm(server: FakeServer) -> None:
    process = subprocess.Popen(
        [*COMMAND, "collect", "vllm", "--url", "http://127.0.0.1:1"],
        env=_environment(server), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert "event=collector_started" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in rest
