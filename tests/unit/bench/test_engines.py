"""Child processes start, answer, and are gone afterwards; a command's end is the engines' end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bench.children import running, wait_healthy
from bench.control_plane import free_port
from bench.engines import parse, vllm_engines

# Stands in for the script that serves an engine: answers 200 to everything on the port given.
SCRIPT = f"""exec {sys.executable} -c '
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(" ".join(sys.argv[1:]).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
' "$@"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "serve.sh"
    path.write_text(SCRIPT, "utf-8")
    return path


def test_engines_answer_while_the_block_lasts(script: Path, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    with vllm_engines(tmp_path, script, ports, blocks=64) as urls:
        texts = [httpx.get(url, trust_env=False).text for url in urls]
    assert texts == [f"{tmp_path} {port} 64" for port in ports]
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, trust_env=False)


def test_an_engine_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "serve.sh"
    broken.write_text("echo no such model; exit 3", "utf-8")
    with pytest.raises(RuntimeError, match=r"exit code 3:\nno such model"), vllm_engines(tmp_path, broken, [9], 64):
        raise AssertionError("not ready")


def test_a_child_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    sleeper = running("sleeper", ["sleep", "60"], tmp_path / "log")
    with pytest.raises(RuntimeError, match="did not answer"), sleeper as child:
        wait_healthy(child, f"http://127.0.0.1:{free_port()}/health", timeout_s=0.6)
    assert child.process.poll() is not None


def test_grandchildren_end_with_their_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = ["bash", "-c", f"sleep 60 & echo $! > {pid_file}; wait"]
    with running("parent", command, tmp_path / "log"):
        deadline = time.monotonic() + 5.0
        while not (pid_file.exists() and pid_file.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.02)
        grandchild = int(pid_file.read_text())
    time.sleep(0.1)
    state = Path(f"/proc/{grandchild}/stat")
    # Where nobody reaps orphans the killed process stays as a zombie.
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_command_runs_while_the_engines_do(script: Path, tmp_path: Path) -> None:
    port = free_port()
    fetch = f"import httpx; print(httpx.get('http://127.0.0.1:{port}', trust_env=False).status_code)"
    flags = ["--vllm-dir", str(tmp_path), "--serve-script", str(script), "--ports", str(port)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.engines", *flags, "--", sys.executable, "-c", fetch],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert (done.returncode, done.stdout.strip()) == (0, "200"), done.stderr
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}", trust_env=False)


def test_flags_default_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORAGE_VLLM_DIR", "/srv/vllm")
    monkeypatch.setenv("MOORAGE_VLLM_SERVE", "/srv/serve.sh")
    options, command = parse(["--ports", "1", "2", "--", "run", "--ports", "3"])
    assert (options.vllm_dir, options.serve_script) == (Path("/srv/vllm"), Path("/srv/serve.sh"))
    assert (options.ports, command) == ([1, 2], ["run", "--ports", "3"])
    assert parse([])[1] == []
    assert os.environ["MOORAGE_VLLM_DIR"] == "/srv/vllm"
