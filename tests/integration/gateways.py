"""Gateways of others as processes, started as GATEWAYS.md says."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.openai_engine import free_address
from tests.integration.processes import PATIENCE_S
from tests.integration.proxies import Caller

DOCUMENT = (Path(__file__).parents[2] / "client/moorage/proxy/GATEWAYS.md").read_text("utf-8")
BLOCKS: dict[str, str] = dict(
    re.findall(r"<!-- check: ([\w-]+) -->\n```\w+\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
)


def program(name: str) -> str:
    """Path of a gateway's program, from this environment. Skips the test where it is missing; fails it in CI."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = shutil.which(name, path=path)
    if found is None and os.environ.get("CI"):
        pytest.fail(f"not installed: {name}")
    if found is None:
        pytest.skip(f"not installed: {name}")
    return found


def command(block: str, begins: str, changes: Mapping[str, Sequence[str]]) -> list[str]:
    """The command of a block that begins so, its options given other values."""
    lines = BLOCKS[block].replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if line.startswith(begins))
    words = shlex.split(line, comments=True)
    for option, values in changes.items():
        if option in words:
            start = words.index(option) + 1
            end = next((n for n in range(start, len(words)) if words[n].startswith("--")), len(words))
            words[start:end] = values
        else:
            words += [option, *values]
    return [program(words[0]), *words[1:]]


@asynccontextmanager
async def running(arguments: Sequence[str], url: str, log: Path, ready: str | None) -> AsyncIterator[Caller]:
    """The process, from when `ready` answers 200 until the end of the block, and a client of it at `url`.

    With None, any answer will do.
    """
    with log.open("ab") as output:
        process = await asyncio.to_thread(subprocess.Popen, arguments, stdout=output, stderr=output)
    try:
        async with Caller(url) as caller:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    assert process.poll() is None, await asyncio.to_thread(log.read_text, "utf-8")
                    try:
                        if (await caller.get(ready or "/")).status == 200 or ready is None:
                            break
                    except OSError:
                        pass
                    await asyncio.sleep(0.1)
            yield caller
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


@asynccontextmanager
async def router(block: str, begins: str, log: Path, workers: Sequence[str], **changes: str) -> AsyncIterator[Caller]:
    """A vllm-router or a gateway of SGLang in front of `workers`; `changes` are options without their dashes."""
    address = free_address()
    mine = {
        "--host": ["127.0.0.1"],
        "--port": [address.rpartition(":")[2]],
        "--prometheus-port": [free_address().rpartition(":")[2]],
        "--worker-urls": workers,
        **{f"--{name.replace('_', '-')}": [value] for name, value in changes.items()},
    }
    async with running(command(block, begins, mine), f"http://{address}", log, ready="/readiness") as caller:
        async with asyncio.timeout(PATIENCE_S):
            # Ready is who knows one of them.
            while True:
                if (await caller.get("/readiness")).json["healthy_workers"] == len(workers):
                    break
                await asyncio.sleep(0.05)
        yield caller
