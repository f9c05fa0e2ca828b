"""TLS and mTLS with real certificates: identities, rotation, and what is unusable."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from structlog.testing import capture_logs

from moorage.v1 import inspector_pb2
from moorage_server.runtime import security
from moorage_server.runtime.security import Security
from moorage_server.runtime.settings import Settings
from moorage_server.runtime.settings_sources import SettingsError, load_settings
from tests.certificates import Authority, Pair
from tests.unit.server.conftest import Open, Refusal, until

ASK = inspector_pb2.GetPoolRequest()


def files(folder: Path, authority: Authority, pair: Pair) -> dict[str, Any]:
    """The section `tls`, for mTLS."""
    certificate, key = pair.write(folder, "server")
    (folder / "ca.pem").write_bytes(authority.pem)
    return {"cert_file": certificate, "key_file": key, "client_ca_file": str(folder / "ca.pem")}


def trusting(authority: Authority, own: Pair | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(authority.pem, own and own.key, own and own.certificate)


async def reason(channel: grpc.aio.Channel, address: str = "", credentials: Any = None) -> str:
    """Why GetPool of an unknown pool fails, over `channel` or a new connection."""
    if credentials is not None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.secure_channel(address, credentials, options=options) as fresh:
            return await reason(fresh)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/moorage.v1.InspectorService/GetPool")(b"", timeout=5)
    return Refusal(caught.value).reason or caught.value.code().name


def shown(address: str) -> str:
    """Common name in the certificate that a new connection gets to see."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain, context.wrap_socket(plain) as tls:
        found = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    return found.subject.rfc4514_string()


async def test_a_client_certificate_is_an_identity(world: Open, tmp_path: Path) -> None:
    ca = Authority()
    tls = files(tmp_path, ca, ca.server())
    certificates = {
        "viewer.rl": {"roles": ["viewer"]},
        "spiffe://rl/collector": {"name": "collector", "roles": ["collector"]},
    }
    viewer = trusting(ca, ca.issue("anything", x509.DNSName("viewer.rl")))
    async with world(credentials=viewer, tls=tls, auth={"certificates": certificates}) as w:
        assert await reason(w.channel) == "POOL_UNKNOWN"
        by_common_name = trusting(ca, ca.issue("viewer.rl"))
        assert await reason(w.channel, w.address, by_common_name) == "POOL_UNKNOWN"
        collector = trusting(ca, ca.issue("c", x509.UniformResourceIdentifier("spiffe://rl/collector")))
        assert await reason(w.channel, w.address, collector) == "ROLE_MISSING"
        unknown = trusting(ca, ca.issue("somebody"))
        assert await reason(w.channel, w.address, unknown) == "CREDENTIAL_INVALID"
        nobody = trusting(ca)
        assert await reason(w.channel, w.address, nobody) == "UNAVAILABLE"
        foreign = trusting(ca, Authority("other").issue("viewer.rl"))
        assert await reason(w.channel, w.address, foreign) == "UNAVAILABLE"


async def test_a_ca_alone_lets_its_holders_do_everything(world: Open, tmp_path: Path) -> None:
    ca = Authority()
    async with world(credentials=trusting(ca, ca.issue("x")), tls=files(tmp_path, ca, ca.server())) as w:
        assert await reason(w.channel) == "POOL_UNKNOWN"
        assert await reason(w.channel, w.address, trusting(ca)) == "UNAVAILABLE"


async def test_tokens_go_with_plain_tls(world: Open, tmp_path: Path) -> None:
    ca = Authority()
    tls = files(tmp_path, ca, ca.server()) | {"require_client_cert": False}
    tokens = tmp_path / "tokens"
    tokens.write_text("[{name: v, token: 0123456789abcdefX, roles: [viewer]}]")
    async with world(credentials=trusting(ca), tls=tls, auth={"tokens_file": str(tokens)}) as w:
        assert await reason(w.channel) == "CREDENTIAL_MISSING"
        call = w.inspector.GetPool(ASK, metadata=(("authorization", "Bearer 0123456789abcdefX"),), timeout=5)
        assert await call.code() is grpc.StatusCode.NOT_FOUND


async def test_certificates_are_replaced_while_it_runs(
    world: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "LOOK_EVERY_S", 0.02)
    old, new = Authority("old"), Authority("new")
    tls = files(tmp_path, old, old.server("first"))
    mine = trusting(old, old.issue("x"))

    async def shows(name: str) -> bool:
        return await asyncio.to_thread(shown, w.address) == f"CN={name}"

    async def lets_in(credentials: grpc.ChannelCredentials) -> bool:
        return await reason(w.channel, w.address, credentials) == "POOL_UNKNOWN"

    async with world(credentials=mine, tls=tls) as w:
        assert await reason(w.channel) == "POOL_UNKNOWN"
        assert await shows("first")
        with capture_logs() as logs:
            (tmp_path / "server.key").write_bytes(b"no key")
            await until(lambda: any(entry["event"].startswith("unusable files") for entry in logs))
        assert await lets_in(mine)
        assert await shows("first")
        new.server("second").write(tmp_path, "server")
        (tmp_path / "ca.pem").write_bytes(new.pem)
        await until(lambda: shows("second"))
        await until(lambda: lets_in(trusting(new, new.issue("y"))))
        assert not await lets_in(trusting(new, old.issue("x")))
        # A connection keeps what it began with.
        assert await reason(w.channel) == "POOL_UNKNOWN"


def test_links_that_are_swapped_are_a_change(tmp_path: Path) -> None:
    ca, calls = Authority(), []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        files(tmp_path / name, ca, ca.server(name))
    (tmp_path / "now").symlink_to(tmp_path / "one")
    watched = security.WatchedFiles("x", [str(tmp_path / "now" / "server.pem")], lambda: calls.append(1))
    watched.look()
    (tmp_path / "next").symlink_to(tmp_path / "two")
    os.replace(tmp_path / "next", tmp_path / "now")
    watched.look()
    watched.look()
    assert calls == [1]


def test_unusable_certificates_are_told_at_the_start(tmp_path: Path) -> None:
    ca = Authority()
    tls = files(tmp_path, ca, ca.server())
    other = ca.server().write(tmp_path, "other")[1]
    (tmp_path / "rubbish").write_bytes(b"rubbish")
    locked = _locked(tmp_path)
    for change, complaint in (
        ({"key_file": other}, "tls.cert_file, tls.key_file"),
        ({"key_file": locked}, "without a passphrase"),
        ({"cert_file": str(tmp_path / "rubbish")}, "tls.cert_file, tls.key_file"),
        ({"cert_file": str(tmp_path / "absent")}, "tls.cert_file: "),
        ({"client_ca_file": str(tmp_path / "rubbish")}, "tls.client_ca_file: "),
    ):
        with pytest.raises(SettingsError, match=complaint):
            Security(Settings.model_validate({"tls": tls | change}))


def _locked(folder: Path) -> str:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    path = folder / "locked.key"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"pass")))
    return str(path)


@pytest.mark.parametrize(
    ("tls", "complaint"),
    [
        ({"cert_file": "c"}, "cert_file and key_file go together"),
        ({"client_ca_file": "c"}, "client_ca_file needs cert_file and key_file"),
        ({"cert_file": "c", "key_file": "k", "require_client_cert": True}, "require_client_cert needs client_ca_file"),
    ],
)
def test_halves_are_refused(tls: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Settings.model_validate({"tls": tls})


WIDE = {"MOORAGE_LISTEN": "0.0.0.0:50061"}
FILES = {"MOORAGE_TLS_CERT_FILE": "c", "MOORAGE_TLS_KEY_FILE": "k"}


@pytest.mark.parametrize(
    "env",
    [
        {"MOORAGE_LISTEN": "127.0.0.1:1"},
        {"MOORAGE_LISTEN": "[::1]:1"},
        {**WIDE, "MOORAGE_INSECURE_LISTEN": "true"},
        {**WIDE, "MOORAGE_AUTH_TOKENS_FILE": "t"},
        {**WIDE, **FILES, "MOORAGE_TLS_CLIENT_CA_FILE": "a"},
    ],
)
def test_a_server_listens_where_it_is_safe(env: dict[str, str]) -> None:
    assert not load_settings(None, {}, env).exposed


@pytest.mark.parametrize(
    "env",
    [
        WIDE,
        {"MOORAGE_LISTEN": "[::]:1"},
        {"MOORAGE_LISTEN": "moorage.rl:1"},
        {**WIDE, **FILES},
        {**WIDE, **FILES, "MOORAGE_TLS_CLIENT_CA_FILE": "a", "MOORAGE_TLS_REQUIRE_CLIENT_CERT": "false"},
    ],
)
def test_a_server_that_anybody_may_call_is_refused_beyond_loopback(env: dict[str, str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, {}, env)
    (problem,) = caught.value.problems
    assert problem.startswith("listen: is beyond loopback")
    for way_out in ("auth.tokens_file", "tls.client_ca_file", "--insecure-listen"):
        assert way_out in problem
