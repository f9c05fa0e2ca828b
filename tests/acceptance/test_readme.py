"""The README keeps its word: every block of it that can be run is run, against a real server on a real Redis."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import promql_parser
import pytest
import yaml
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from moorage import AsyncClient
from moorage.cli.options import duration
from moorage.cli.proxy import proxy as proxy_command
from moorage.proxy.rules import Rules
from moorage.v1 import inspector_pb2 as ipb
from moorage_server.api.callers import Rate
from moorage_server.runtime.credentials import read_callers
from moorage_server.runtime.security_settings import AuthSettings
from moorage_server.runtime.settings_sources import environment_variables, load_settings
from tests.conftest import RedisServer
from tests.integration.engines import Engines, ReplayedEngine
from tests.integration.openai_engine import OpenAIEngine, beating
from tests.integration.processes import PATIENCE_S, Server, environment, eventually, moorage
from tests.unit.server.exposed import served

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS: dict[str, str] = dict(
    re.findall(r"<!-- check: (\w+) -->\n```\w+\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
)
ADDRESS = "127.0.0.1:50061"

#: What the Python block leaves to the reader.
ENGINE_CALLS = """
from types import SimpleNamespace

async def generate(endpoint, prompt):
    assert endpoint.startswith("http://engine-"), endpoint
    return SimpleNamespace(tokens=[1] * 40, cached_tokens=len(prompt) // 16 * 16)

async def run_tool(answer):
    await asyncio.sleep(0.05)
    return [2] * 10
"""


@pytest.fixture
def server(redis_server: RedisServer, tmp_path: Path) -> Iterator[Server]:
    """A server with an empty ledger and two engines that take a few sessions of the README's size."""
    env = {"MOORAGE_REDIS_URL": redis_server.url, "MOORAGE_REDIS_KEY_PREFIX": f"a{uuid.uuid4().hex}"}
    running = Server.start(tmp_path / "serve.log", **env)
    eventually(running.api.ready)
    with Engines(running.api, "engine-0", "engine-1", blocks=8192):
        yield running
    running.end()
    assert "Traceback" not in running.log()


def _bash(block: str, server: Server) -> str:
    """Runs a block of commands, with the `moorage` of this environment; its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        env=environment({"MOORAGE_SERVER": server.address, "PATH": path}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_blocks_are_there() -> None:
    assert set(BLOCKS) == {
        "make",
        "serve",
        "python",
        "dispatch",
        "proxy",
        "proxyyaml",
        "grpcurl",
        "observe",
        "cli",
        "yaml",
        "tokens",
        "tls",
        "promql",
        "measured",
    }


@pytest.mark.parametrize("block", ["make", "measured"])
def test_make_knows_its_targets(block: str) -> None:
    commands = [line for line in BLOCKS[block].splitlines() if line.startswith("make ")]
    modules = {"run": "bench.demo", "test": "pytest"}
    for command in commands:
        _, target, *arguments = shlex.split(command, comments=True)
        planned = subprocess.run(
            ["make", "-n", target, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert f"-m {modules.get(target, target.replace('-', '.'))}" in planned
        for argument in arguments:
            assert argument.removeprefix("ARGS=") in planned
    assert len(commands) >= 2


def test_every_benchmark_named_is_a_target() -> None:
    named = set(re.findall(r"make bench-([a-z]+)", README))
    assert {"ablation", "calibrate", "dispatch", "peers", "shifts"} <= named
    assert [name for name in named if not (ROOT / "bench" / f"{name}.py").exists()] == []
    offered = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert named <= set(offered.split("Run one of bench/ with ARGS: ")[1].split())


def test_the_measuring_commands_have_their_options() -> None:
    for command in BLOCKS["measured"].splitlines():
        _, target, *arguments = shlex.split(command, comments=True)
        module = target.replace("bench-", "bench.")
        usage = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for flag in re.findall(r"--[a-z-]+", " ".join(arguments)):
            assert flag in usage


def test_serve_and_collect(redis_server: RedisServer, tmp_path: Path) -> None:
    serve, collect = (shlex.split(line) for line in BLOCKS["serve"].splitlines())
    assert (serve[:2], collect[:3]) == (["moorage", "serve"], ["moorage", "collect", "vllm"])
    # The same flags, on this test's ports.
    mine = {"redis://127.0.0.1:6379/0": f"{redis_server.url.rpartition('/')[0]}/9", "127.0.0.1:9464": "127.0.0.1:0"}
    flags = [mine.get(part, part) for part in serve[2:] if part not in ("--listen", ADDRESS)]
    running = Server.start(tmp_path / "serve.log", *flags)
    engines = [ReplayedEngine(), ReplayedEngine()]
    swapped = {ADDRESS: running.address, "http://127.0.0.1:8000": engines[0].url}
    arguments = [swapped.get(part, part.replace("http://127.0.0.1:8001", engines[1].url)) for part in collect[3:]]
    collector = subprocess.Popen(
        [sys.executable, "-m", "moorage.cli.main", *collect[1:3], *arguments],
        env=environment({}), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        eventually(lambda: len(_instances(running)) == 2)
        names = {instance.snapshot.instance_id for instance in _instances(running)}
        assert names == {engines[0].url.removeprefix("http://"), "gpu2"}
        assert '"metrics": "127.0.0.1:' in running.log()
    finally:
        collector.kill()
        collector.wait()
        running.end()
        for engine in engines:
            engine.leave()


def _instances(server: Server) -> list[ipb.Instance]:
    # There is no pool before the first snapshot.
    with contextlib.suppress(grpc.RpcError):
        return list(server.api.inspector.ListInstances(ipb.ListInstancesRequest(), timeout=PATIENCE_S).instances)
    return []


def test_the_python_block(server: Server) -> None:
    program, call = BLOCKS["python"].replace(ADDRESS, server.address).split("asyncio.run(")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{program}{ENGINE_CALLS}asyncio.run({call}"],
        env=environment({}), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pool = server.api.inspector.GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S)
    assert dict(pool.completed_by_class) == {"agentic": 8}
    assert (pool.active_sessions, pool.held_sessions) == (0, 0)


async def test_the_block_of_a_router(server: Server) -> None:
    program: dict[str, Any] = {}
    exec(BLOCKS["dispatch"], program)
    async with AsyncClient(server.address) as client:
        await program["route"](client, "s-1")
    pool = server.api.inspector.GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S)
    assert dict(pool.completed_by_class) == {"rlvr": 1}
    assert pool.active_sessions == 0


def _proxy(flags: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A running proxy, and its URL."""
    command = [sys.executable, "-m", "moorage.cli.main", "proxy", *flags]
    process = subprocess.Popen(command, env=environment({}), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split(" on ")[1].split(",")[0]


async def test_the_proxy_block(tmp_path: Path) -> None:
    proxy, curl = (shlex.split(line) for line in BLOCKS["proxy"].replace("\\\n", " ").splitlines())
    assert (proxy[:2], curl[0]) == (["moorage", "proxy"], "curl")
    running, engine = Server.start(tmp_path / "serve.log", "--embedded"), OpenAIEngine("engine-0")
    swapped = {ADDRESS: running.address, "127.0.0.1:8080": "127.0.0.1:0"}
    process, url = _proxy([swapped.get(part, part) for part in proxy[2:]])
    try:
        values = [value for flag, value in pairwise(curl) if flag == "-H"]
        headers = dict(value.split(": ") for value in values)
        async with beating(running, "default", engine), aiohttp.ClientSession() as http:
            target = curl[1].replace("http://127.0.0.1:8080", url)
            async with http.post(target, headers=headers, data=curl[curl.index("-d") + 1]) as answer:
                assert (answer.status, answer.headers["X-Moorage-Session"]) == (200, "s-1")
            async with http.post(f"{url}/finish_session?session_id=s-1") as answer:
                assert (await answer.json())["released"] is True
    finally:
        process.kill()
        process.communicate()
        running.end()


def test_the_rules_of_the_proxy() -> None:
    content = yaml.safe_load(BLOCKS["proxyyaml"])
    rules = Rules.parse(content, duration=duration)
    assert rules.class_of("/v1/chat/completions", "judge-7b", {}) == "judge"
    assert rules.class_of("/v1/completions", "main", {"X-Team": "math-2"}) == "rlvr"
    assert rules.class_of("/v1/completions", "main", {}) == "agentic"
    assert (rules.policy_of("agentic").idle_s, rules.policy_of("judge").single_turn) == (600, True)
    assert {"session_fields", "default_class"} <= {parameter.name for parameter in proxy_command.params}


def test_the_grpcurl_block(server: Server) -> None:
    """Does what grpcurl does: learns the types by reflection, and parses the JSON into them."""
    block = BLOCKS["grpcurl"].replace("\\\n", " ")
    calls = re.findall(r"grpcurl -plaintext -d '(.*?)'\s+(\S+)\s+([\w.]+)/(\w+)", block, re.DOTALL)
    assert [method for *_, method in calls] == ["Admit", "Place", "Release"]
    assert len(calls) == block.count("grpcurl ")
    types = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(server.api.channel))
    answers: list[Any] = []
    for body, address, service, method in calls:
        assert address == ADDRESS
        known = types.FindServiceByName(service).methods_by_name[method]
        request = message_factory.GetMessageClass(known.input_type)()
        json_format.Parse(body.replace("TOKEN", answers[0].lease.token if answers else ""), request)
        invoke: Any = server.api.channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(known.output_type).FromString,
        )
        answers.append(invoke(request, timeout=60))
    admitted, placed, released = answers
    assert admitted.decision == placed.decision == 1
    assert placed.placement.instance_id == admitted.placement.instance_id
    assert released.released


def test_the_command_line_block(server: Server) -> None:
    output = _bash(BLOCKS["cli"], server)
    assert "session/demo admitted instance=engine-" in output
    assert "session/demo evicted" in output
    assert "Thrashing?" in output


def test_the_observe_block(server: Server) -> None:
    output = _bash(BLOCKS["observe"], server)
    assert output.count("configured: mode") == 2
    assert server.api.inspector.GetPool(ipb.GetPoolRequest(), timeout=PATIENCE_S).config.mode == 1


def test_the_configuration_block(tmp_path: Path) -> None:
    file = tmp_path / "moorage.yaml"
    file.write_text(BLOCKS["yaml"])
    settings = load_settings(str(file), {}, {})
    assert settings.redis_url == "redis://redis.internal:6379/0"
    assert settings.pool_configs()["default"].class_in_force("math") == "rlvr"


def test_the_queries_ask_for_what_is_measured() -> None:
    known, selectors = served(), 0

    def check(part: Any) -> None:
        nonlocal selectors
        if isinstance(part, promql_parser.VectorSelector):
            selectors += 1
            assert {matcher.name for matcher in part.matchers.matchers} <= known[str(part.name)]

    for line in BLOCKS["promql"].splitlines():
        if not line.startswith("#"):
            promql_parser.walk(promql_parser.parse(line), check)
    assert selectors == 5


def test_the_tokens_block(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(BLOCKS["tokens"])
    callers = read_callers(AuthSettings(tokens_file=str(file)))
    assert len(callers) == 3
    team = callers.holding("at-least-16-characters")
    assert team is not None
    assert (team.roles, team.classes, team.rate) == ({"router"}, {"rlvr"}, Rate(200, 400))


def test_the_block_of_certificates(tmp_path: Path) -> None:
    made, call = BLOCKS["tls"].rsplit("moorage ", 1)
    (tmp_path / "token").write_text("at-least-16-characters\n")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", made], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    entry = {"name": "me", "token_sha256": done.stdout.split()[0], "roles": ["viewer"]}
    (tmp_path / "tokens.yaml").write_text(json.dumps([entry]))
    files = {"TLS_CERT_FILE": "tls.crt", "TLS_KEY_FILE": "tls.key", "AUTH_TOKENS_FILE": "tokens.yaml"}
    env = {f"MOORAGE_{name}": str(tmp_path / file) for name, file in files.items()}
    running = Server.start(tmp_path / "serve.log", **env, MOORAGE_POOLS="default: {policy: misa}")
    try:
        verb, *flags = shlex.split(call)
        paths = [str(tmp_path / flag) if (tmp_path / flag).exists() else flag for flag in flags]
        answers = eventually(lambda: (a := moorage(verb, *paths, env={"MOORAGE_SERVER": running.address})).stdout and a)
        assert "misa" in answers.stdout
        stranger = moorage("get", "pool", env={"MOORAGE_SERVER": running.address})
        assert "give --ca" in stranger.stderr, "who speaks no TLS is told to"
    finally:
        running.end()


def test_variables_and_links_exist() -> None:
    variables = set(re.findall(r"`(MOORAGE_[A-Z_]+)`", README))
    clients = {"MOORAGE_SERVER", "MOORAGE_POOL"} | {f"MOORAGE_{name}" for name in ("TOKEN_FILE", "CA", "CERT", "KEY")}
    known = {*environment_variables(), *clients, "MOORAGE_POOLS"}
    assert variables
    assert variables <= known
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
