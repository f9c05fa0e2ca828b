"""`moorage proxy` as a process: its settings, and how it ends."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.openai_engine import OpenAIEngine, beating, free_address
from tests.integration.processes import COMMAND, PATIENCE_S, Server, environment, moorage
from tests.integration.proxies import COMPLETIONS, Caller, Ledger, soon

#: Starts a proxy with flags and MOORAGE_* variables; the process, and its URL.
Launch = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
async def engine(server: Server, pool: str) -> AsyncIterator[OpenAIEngine]:
    made = OpenAIEngine("engine-0")
    async with beating(server, pool, made):
        yield made


@pytest.fixture
def launch(server: Server, pool: str, tmp_path: Path) -> Iterator[Launch]:
    """Afterwards none may have logged a traceback."""
    processes: list[subprocess.Popen[str]] = []
    log = tmp_path / "proxy.log"

    def run(*flags: str, **env: str) -> tuple[subprocess.Popen[str], str]:
        command = [*COMMAND, "proxy", "--listen", "127.0.0.1:0", "--server", server.address, "--pool", pool, *flags]
        with log.open("ab") as errors:
            process = subprocess.Popen(command, env=environment(env), stdout=subprocess.PIPE, stderr=errors, text=True)
        processes.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("moorage proxy on http://"), log.read_text()
        return process, said.split(" on ")[1].split(",")[0]

    yield run
    for process in processes:
        process.kill()
        process.communicate()
    assert "Traceback" not in log.read_text()


async def test_who_asks_in_http_2_is_no_failure(launch: Launch, engine: OpenAIEngine, tmp_path: Path) -> None:
    _, url = await asyncio.to_thread(launch)
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    assert b" 400 " in await reader.readline()
    writer.close()
    async with Caller(url) as caller:
        assert (await caller.post()).status == 200
    # That it is no traceback is what `launch` looks for.
    assert "not_understood" in (tmp_path / "proxy.log").read_text()


@pytest.mark.parametrize("on_exit", ["leave", "release"])
async def test_sigterm_lets_streams_finish(
    launch: Launch, engine: OpenAIEngine, server: Server, pool: str, on_exit: str
) -> None:
    ledger = Ledger(server, pool)
    process, url = await asyncio.to_thread(launch, "--on-exit", on_exit)
    async with Caller(url) as caller, Caller(url) as other:
        # Connections that stand already are told as well as they can be.
        assert (await other.get("/health")).status == 200
        stream = asyncio.create_task(caller.post(COMPLETIONS, "s-1", stream=True, max_tokens=20, fake_pause=0.1))
        await soon(lambda: engine.pieces > 1)
        process.terminate()
        await asyncio.sleep(0.3)
        refused = await other.post()
        assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
        assert "Retry-After" in refused.headers
        assert (await other.get("/health")).json["status"] == "draining"
        whole = await stream
        assert (whole.status, len(whole.events)) == (200, 20)
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    left = ledger.session("s-1")
    assert (left is not None) == (on_exit == "leave")
    if left is not None:
        # Its last report went out before the process ended.
        assert left.context_tokens == 24


async def test_the_grace_ends(launch: Launch, engine: OpenAIEngine) -> None:
    process, url = await asyncio.to_thread(launch, "--grace", "300ms")
    async with Caller(url) as caller:
        stream = asyncio.create_task(caller.post(stream=True, max_tokens=1000, fake_pause=0.1))
        await soon(lambda: engine.pieces > 1)
        process.terminate()
        with pytest.raises(aiohttp.ClientError):
            await stream
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    await soon(lambda: engine.running == 0)


async def test_flags_go_over_variables_over_the_file(
    launch: Launch, engine: OpenAIEngine, server: Server, pool: str, tmp_path: Path
) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "default_class: from-file\nmax_hold: 200ms\nsession_fields: [user]\n"
        "rules:\n- {model: 'judge-*', class: judge}\n- {header: {X-Team: eval}, class: eval}\n"
        "classes:\n  judge: {single_turn: true}\n"
    )
    ledger = Ledger(server, pool)
    ledger.cap(3)
    _, url = await asyncio.to_thread(
        launch, "--default-class", "from-flag", MOORAGE_PROXY_DEFAULT_CLASS="from-env", MOORAGE_PROXY_CONFIG=str(file)
    )
    async with Caller(url) as caller:
        await caller.post(COMPLETIONS, user="u-1")
        await caller.post(COMPLETIONS, "s-1", headers={"X-Team": "eval"})
        await caller.post(COMPLETIONS, "s-2", model="judge-7b")
        await soon(lambda: ledger.state().completed_by_class["judge"] == 1)
        assert {s.session_id: s.workload_class for s in ledger.sessions()} == {"u-1": "from-flag", "s-1": "eval"}
        assert (await caller.post(COMPLETIONS, "s-3")).status == 200
        assert (await caller.post()).status == 429


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("rules: [{model: a}]", "rules[0]: class is missing"),
        ("classes: {a: {idle: soon}}", "classes.a.idle"),
        ("max_wait: 3", "unknown key 'max_wait'"),
        ("- a", "must be a mapping"),
    ],
)
def test_a_file_that_makes_no_sense_is_a_usage_error(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(content)
    done = moorage("proxy", "--config", str(file))
    assert (done.returncode, named in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--listen", "nowhere"),
        ("--on-unavailable", "admit"),
        ("--fallback", "http://e"),
        ("--idle", "0"),
        ("--lease", "10ms"),
    ],
)
def test_flags_that_make_no_sense_are_usage_errors(flags: tuple[str, ...]) -> None:
    assert moorage("proxy", *flags).returncode == 2


def test_a_port_in_use_is_an_error(server: Server) -> None:
    done = moorage("proxy", "--listen", server.address, "--server", free_address())
    assert (done.returncode, "can not listen" in done.stderr) == (1, True), done.stderr
