"""`moorage serve` with TLS and tokens, and the other commands as its callers, as processes."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.integration.engines import ReplayedEngine
from tests.integration.processes import COMMAND, Server, Start, environment, eventually, moorage

ROLES = ("collector", "operator", "router", "viewer")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A CA, certificates of the server and of a client, and a token per role, each in a file of its own."""
    ca = Authority()
    (tmp_path / "ca.pem").write_bytes(ca.pem)
    ca.server().write(tmp_path, "server")
    ca.issue("client").write(tmp_path, "client")
    for role in ROLES:
        (tmp_path / role).write_text(f"{role}-secret-0123456789\n")
    entries = [{"name": role, "token": f"{role}-secret-0123456789", "roles": [role]} for role in ROLES]
    (tmp_path / "tokens.yaml").write_text(json.dumps(entries))
    return tmp_path


def secure(start: Start, files: Path) -> Server:
    return start(
        MOORAGE_TLS_CERT_FILE=str(files / "server.pem"),
        MOORAGE_TLS_KEY_FILE=str(files / "server.key"),
        MOORAGE_TLS_CLIENT_CA_FILE=str(files / "ca.pem"),
        MOORAGE_AUTH_TOKENS_FILE=str(files / "tokens.yaml"),
    )


def caller(server: Server, files: Path, role: str) -> dict[str, str]:
    """Variables of a command that calls in a role."""
    return {
        "MOORAGE_SERVER": server.address,
        "MOORAGE_CA": str(files / "ca.pem"),
        "MOORAGE_CERT": str(files / "client.pem"),
        "MOORAGE_KEY": str(files / "client.key"),
        "MOORAGE_TOKEN_FILE": str(files / role),
    }


def test_every_command_gets_in_by_its_role(start: Start, files: Path) -> None:
    server = secure(start, files)
    assert moorage("ping", "--wait", "20s", env=caller(server, files, "viewer")).returncode == 0
    engine = ReplayedEngine()
    collector = subprocess.Popen(
        [*COMMAND, "collect", "vllm", "--url", f"engine-a={engine.url}", "--interval", "100ms"],
        env=environment(caller(server, files, "collector")),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        viewer = caller(server, files, "viewer")
        eventually(lambda: "engine-a" in moorage("get", "instances", env=viewer).stdout)
        assert moorage("cordon", "engine-a", env=caller(server, files, "operator")).returncode == 0
        refused = moorage("uncordon", "engine-a", env=viewer)
        assert refused.returncode != 0
        assert "reason: ROLE_MISSING" in refused.stderr
        stranger = {name: value for name, value in viewer.items() if name != "MOORAGE_TOKEN_FILE"}
        assert "the certificate is not known here, and there is no token" in moorage("get", "pool", env=stranger).stderr
        collector.send_signal(signal.SIGTERM)
        assert collector.wait(20) == 0
    finally:
        collector.kill()
        collector.communicate()
        engine.leave()
    assert "secret" not in server.log()
    listening = next(line for line in map(json.loads, server.log().splitlines()) if line["event"] == "listening")
    assert (listening["tls"], listening["callers"]) == ("mutual", 4)


def test_nobody_listens_beyond_loopback_unprotected(start: Start, files: Path) -> None:
    refused = moorage("serve", "--listen", "0.0.0.0:0")
    assert refused.returncode == 2
    for way_out in ("auth.tokens_file", "tls.client_ca_file", "--insecure-listen"):
        assert way_out in refused.stderr
    open_to_all = start("--listen", "0.0.0.0:0", "--insecure-listen")
    assert open_to_all.terminate() == 0
    assert "whoever reaches this server may do everything" in open_to_all.log()
    in_clear_text = start("--listen", "0.0.0.0:0", MOORAGE_AUTH_TOKENS_FILE=str(files / "tokens.yaml"))
    assert in_clear_text.terminate() == 0
    assert "tokens travel in clear text" in in_clear_text.log()


def test_unusable_credentials_stop_the_start_with_their_place(files: Path) -> None:
    (files / "tokens.yaml").write_text("[{name: a, token: hush, roles: [router]}]")
    refused = moorage("serve", "--listen", "127.0.0.1:0", env={"MOORAGE_AUTH_TOKENS_FILE": str(files / "tokens.yaml")})
    assert refused.returncode == 2
    assert "0.token" in refused.stderr
    assert "hush" not in refused.stderr
