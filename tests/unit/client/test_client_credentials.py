"""Tokens and certificates of clients: where they come from, how they are replaced, and where they do not go."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from moorage import AsyncClient, Client
from moorage.credentials import Proof, Token, is_local
from tests.certificates import Authority
from tests.unit.client.fake_scheduler import FakeScheduler, serve


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replace(path: Path, content: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(content)
    os.replace(fresh, path)


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "token", Clock()
    path.write_text("first\n")
    token = Token(file=str(path), clock=clock)
    assert token.header() == ("authorization", "Bearer first")
    replace(path, "second")
    assert token.header()[1] == "Bearer first"
    clock.now = 2.0
    assert token.header()[1] == "Bearer second"
    for unusable in ("", "two words hush"):
        replace(path, unusable)
        clock.now += 2.0
        assert token.header()[1] == "Bearer second"
    path.unlink()
    clock.now += 2.0
    assert token.header()[1] == "Bearer second"
    assert len(caplog.records) == 3
    assert "hush" not in caplog.text
    assert "second" not in repr(token) + caplog.text


@pytest.mark.parametrize("wrong", ["", "hush hush", "hush\n", "hush\x00", "hüsh"])
def test_a_token_that_no_header_takes_is_refused_and_not_shown(wrong: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        Token(wrong)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("dns:localhost:1", True),
        ("dns://8.8.8.8/localhost:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("unix:/run/moorage", True),
        ("moorage:1", False),
        ("dns:1", False),
        ("10.0.0.1:1", False),
        ("[::]:1", False),
        ("dns:///moorage.rl:1", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("xds:///moorage", False),
        ("localhost.example:1", False),
        ("", False),
    ],
)
def test_what_is_this_machine(target: str, local: bool) -> None:
    assert is_local(target) is local


def test_a_token_does_not_leave_in_clear_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(ValueError, match="moorage:1 in clear text"):
            make("moorage:1", token="secret")
        monkeypatch.setenv("MOORAGE_TOKEN", "secret")
        with pytest.raises(ValueError, match="in clear text"):
            make("moorage:1")
        monkeypatch.delenv("MOORAGE_TOKEN")
        make("moorage:1", token="secret", tls=True)
        make("moorage:1", token="secret", plaintext_token=True)
        make("moorage:1", token="secret", credentials=grpc.ssl_channel_credentials())
        make("moorage:1")
        monkeypatch.setenv("MOORAGE_PLAINTEXT_TOKEN", "1")
        make("moorage:1", token="secret")
        monkeypatch.delenv("MOORAGE_PLAINTEXT_TOKEN")


def test_the_environment_completes_what_the_caller_leaves_out(tmp_path: Path) -> None:
    env = {"MOORAGE_TOKEN": "t", "MOORAGE_TOKEN_FILE": "f", "MOORAGE_CA": "a", "MOORAGE_CERT": "c", "MOORAGE_KEY": "k"}
    assert Proof().resolved(env) == Proof("t", None, True, "a", "c", "k")
    assert Proof().resolved({"MOORAGE_TOKEN_FILE": "f"}) == Proof(token_file="f")
    assert Proof(token_file="mine").resolved(env) == Proof(None, "mine", True, "a", "c", "k")
    assert Proof("mine", ca="b", cert="d", key="l").resolved(env) == Proof("mine", None, True, "b", "d", "l")
    assert Proof().resolved({"MOORAGE_TLS": "true"}).tls
    assert Proof().resolved({}) == Proof()
    for wrong in (Proof("t", "f"), Proof(cert="c"), Proof(key="k")):
        with pytest.raises(ValueError, match=r"together|not both"):
            wrong.resolved({})
    with pytest.raises(ValueError, match="can not be read"):
        Proof(ca=str(tmp_path / "absent"), tls=True).to_credentials()
    with pytest.raises(ValueError, match="can not be read"):
        Proof(token_file=str(tmp_path / "absent")).to_token("localhost:1", secure=False)
    assert "secret" not in repr(Proof("secret"))


async def test_both_clients_prove_themselves_by_files(fake: FakeScheduler, tmp_path: Path) -> None:
    ca = Authority()
    certificate, key = ca.issue("client").write(tmp_path, "client")
    (tmp_path / "ca.pem").write_bytes(ca.pem)
    (tmp_path / "token").write_text("secret\n")
    server = ca.server()
    credentials = grpc.ssl_server_credentials([(server.key, server.certificate)], ca.pem, require_client_auth=True)
    files = {"ca": str(tmp_path / "ca.pem"), "cert": certificate, "key": key, "token_file": str(tmp_path / "token")}
    with serve(fake, credentials=credentials) as target:
        with Client(target, **files) as client:
            assert client.admit("a").lease.token
        async with AsyncClient(target, **files) as aio_client:
            assert (await aio_client.admit("b")).lease.token
    assert [value for name, value in fake.metadata if name == "authorization"] == ["Bearer secret"] * 2
