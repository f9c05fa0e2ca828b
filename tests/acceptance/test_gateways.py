"""GATEWAYS.md keeps its word. Its routers and its Envoy run in tests/integration; here is the rest of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage import AsyncClient
from tests.integration.engines import Engines
from tests.integration.gateways import BLOCKS, DOCUMENT
from tests.integration.processes import Server, eventually, moorage
from tests.integration.proxies import Ledger, soon

FOLDER = Path(__file__).parents[2] / "client/moorage/proxy"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server with two engines that take one session each."""
    running = Server.start(tmp_path / "serve.log", "--embedded")
    eventually(running.api.ready)
    Ledger(running, "default").cap(1)
    with Engines(running.api, "engine-0", "engine-1", blocks=8192):
        yield running
    running.end()


async def test_the_router_that_makes_two_calls(server: Server) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS["python"].replace("max_wait=30", "max_wait=1"), names)
    ledger = Ledger(server, "default")
    async with AsyncClient(server.address) as client:
        one, two = names["Placements"](client), names["Placements"](client)
        homes = {name: await one.target(name, "agentic") for name in ("s-1", "s-2")}
        assert set(homes.values()) == {"http://engine-0:8000", "http://engine-1:8000"}
        # Another router, without a word from the first.
        assert {name: await two.target(name, "agentic") for name in homes} == homes
        assert ledger.state().active_sessions == 2
        with pytest.raises(names["Busy"]) as busy:
            await one.target("s-3", "agentic")
        assert busy.value.args[0] > 0
        waiting = asyncio.create_task(two.target("s-3", "agentic"))
        await asyncio.sleep(0.2)
        await two.finish("s-1")
        assert await waiting == homes["s-1"]
        for name in ("s-2", "s-3"):
            await two.finish(name)
        await soon(lambda: ledger.sessions() == [])
        assert dict(ledger.state().completed_by_class) == {"agentic": 3}


async def test_that_router_does_not_ask_again_for_what_is_refused(server: Server) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS["python"], names)
    assert moorage("config", "class", "judge", "--refuse", env={"MOORAGE_SERVER": server.address}).returncode == 0
    async with AsyncClient(server.address) as client:
        with pytest.raises(names["Refused"], match="judge"):
            await names["Placements"](client).target("s-1", "judge")


def test_links_and_blocks_are_there() -> None:
    assert set(BLOCKS) == {"vllm-front", "sglang-front", "vllm-behind", "envoy", "python"}
    assert len(re.findall(r"^```\w+$", DOCUMENT, re.MULTILINE)) == len(BLOCKS)
    links = re.findall(r"\]\(([^)]+)\)", DOCUMENT)
    headings = {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in DOCUMENT.splitlines()}
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings
        elif not link.startswith("https:"):
            assert (FOLDER / link).exists()
