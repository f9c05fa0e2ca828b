"""Real vLLM engines for a benchmark: starts them, each on a core of its own, and stops them again.

`python -m bench.engines --vllm-dir DIR --serve-script SCRIPT --ports 8101 8102` runs them until Ctrl-C; with a command
after `--`, until that command ends. The script is called as `SCRIPT DIR PORT BLOCKS` and must become the server.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.children import Child, running, wait_healthy

READY_SECONDS = 180.0


def start_engine(
    stack: ExitStack, vllm_dir: Path, serve_script: Path, port: int, blocks: int, number: int, log: Path
) -> Child:
    """Start the `number`-th engine, on a core of its own, for as long as `stack` is open; it is not ready yet."""
    command = [*_pin(number), "bash", str(serve_script), str(vllm_dir), str(port), str(blocks)]
    return stack.enter_context(running(f"engine {port}", command, log))


@contextmanager
def vllm_engines(vllm_dir: Path, serve_script: Path, ports: Sequence[int], blocks: int) -> Iterator[list[str]]:
    """Run one engine per port and yield their URLs once all of them answer; RuntimeError if one does not."""
    logs = Path(tempfile.mkdtemp(prefix="bench-engines-"))
    with ExitStack() as stack:
        started: list[tuple[Child, str]] = []
        for number, port in enumerate(ports):
            child = start_engine(stack, vllm_dir, serve_script, port, blocks, number, logs / f"{port}.log")
            started.append((child, f"http://127.0.0.1:{port}"))
        for child, url in started:
            wait_healthy(child, f"{url}/health", READY_SECONDS)
        yield [url for _, url in started]


def _pin(number: int) -> list[str]:
    """Return the prefix that keeps a command on one core, where that can be had."""
    if shutil.which("taskset") is None:
        return []
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[number % len(cores)])]


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the command after `--` (empty without one)."""
    dashes = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description="Run vLLM engines until Ctrl-C.")
    add_options(parser)
    return parser.parse_args(arguments[:dashes]), list(arguments[dashes + 1 :])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which engines to start."""
    for flag, variable, text in (
        ("--vllm-dir", "MOORAGE_VLLM_DIR", "directory with the installation"),
        ("--serve-script", "MOORAGE_VLLM_SERVE", "script that serves one engine"),
    ):
        default = os.environ.get(variable)
        parser.add_argument(flag, type=Path, default=default, required=default is None, help=f"{text} [{variable}]")
    parser.add_argument("--ports", type=int, nargs="+", default=[8101, 8102], help="one engine per port [8101 8102]")
    parser.add_argument("--blocks", type=int, default=768, help="KV blocks of each engine [768]")


def main() -> int:
    """Run engines until Ctrl-C, or while a command runs; return the exit code."""
    options, command = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with vllm_engines(options.vllm_dir, options.serve_script, options.ports, options.blocks) as urls:
            print("engines ready:", *urls, file=sys.stderr, flush=True)
            if command:
                return subprocess.call(command)
            signal.pause()
    except KeyboardInterrupt:
        print("engines stopped", file=sys.stderr)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
