"""Exit codes and error lines, and the global options on every side of the verb."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import click
import grpc
import pytest

from moorage.cli import exits, options
from moorage.cli.main import cli
from moorage.cli.options import GlobalOption, Verb, VerbGroup
from moorage.v1 import inspector_pb2 as inspector
from tests.unit.cli import samples
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake import Code, Failure, FakeServer


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (Code.INVALID_ARGUMENT, exits.USAGE),
        (Code.FAILED_PRECONDITION, exits.REFUSED),
        (Code.ABORTED, exits.REFUSED),
        (Code.NOT_FOUND, exits.NOT_FOUND),
        (Code.UNAVAILABLE, exits.UNAVAILABLE),
        (Code.INTERNAL, exits.ERROR),
        (Code.UNAUTHENTICATED, exits.ERROR),
        (Code.PERMISSION_DENIED, exits.ERROR),
        (Code.RESOURCE_EXHAUSTED, exits.ERROR),
    ],
)
def test_status_codes_become_exit_codes(run: Run, server: FakeServer, code: grpc.StatusCode, exit_code: int) -> None:
    server.answers["GetPool"] = Failure(code, "sorry")
    result = run("get", "pool", code=exit_code)
    assert result.stderr.startswith(f"error: {code.name}: sorry\n")
    assert result.stdout == ""


def test_the_exit_codes_are_those_promised() -> None:
    names = ("OK", "ERROR", "USAGE", "REFUSED", "NOT_FOUND", "UNAVAILABLE", "DEADLINE", "INTERRUPTED")
    assert [getattr(exits, name) for name in names] == [0, 1, 2, 3, 4, 5, 6, 130]


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("failed to connect; last error: ipv4:10.0.0.7:1: Socket closed", "hangs up: where it has TLS, give --ca"),
        ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: unable to get", "is not trusted: name its CA with --ca"),
        ("Tls handshake failed: WRONG_VERSION_NUMBER: Invalid", "speaks no TLS: leave out --tls, --ca"),
        ("Failed to connect to remote host: Connection refused", "is `moorage serve` running at"),
    ],
)
def test_a_connection_that_fails_at_tls_says_which_flag(run: Run, server: FakeServer, said: str, hint: str) -> None:
    server.answers["GetPool"] = Failure(Code.UNAVAILABLE, said)
    assert hint in run("get", "pool", code=5).stderr


def test_errors_say_code_reason_fields_and_hint(run: Run, server: FakeServer) -> None:
    server.answers["Place"] = Failure(
        Code.ABORTED, "stale\x1b[31m", reason="LEASE_STALE", metadata={"pool": "p", "session_id": "s"},
        violations={"lease_token": "must be the last one"}, retry_after_ms=1500,
    )  # fmt: skip
    assert run("place", "s", "--lease-token", "secret-lease", code=3).stderr.splitlines() == [
        "error: ABORTED: stale\\x1b[31m",
        "  reason: LEASE_STALE pool=p session_id=s",
        "  field lease_token: must be the last one",
        "  retry after: 1.5s",
        "  hint: another call moved or re-admitted the session: take the token of the last answer, or admit again",
    ]


def test_details_of_another_make_are_left_alone(run: Run, server: FakeServer) -> None:
    server.answers["GetPool"] = Failure(Code.INTERNAL, "odd", raw_details=b"\xff\xff\xff")
    assert run("get", "pool", code=1).stderr == "error: INTERNAL: odd\n"


def test_nobody_listens(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: refused, and nobody else can take it
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("get", "pool", "--server", address, code=5)
    assert result.stderr.startswith("error: UNAVAILABLE: ")
    assert f"is `moorage serve` running at {address}?" in result.stderr


def test_a_deadline_passes(run: Run, server: FakeServer) -> None:
    def slow(_: object) -> inspector.GetPoolResponse:
        time.sleep(0.3)
        return samples.pool()

    server.answers["GetPool"] = slow
    result = run("get", "pool", "--timeout", "50ms", code=6)
    assert "hint: allow more time with --timeout" in result.stderr


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_says_nothing_and_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.cli.channel.Api.call", _interrupted)
    result = run("get", "pool", code=130)
    assert (result.stdout, result.stderr) == ("", "")


def test_unknown_verbs_and_flags_are_usage_errors(run: Run) -> None:
    run("fly", code=2)
    run("get", "pool", "--fly", code=2)
    run("get", "pool", "-o", "xml", code=2)


@pytest.mark.parametrize(
    "arrange",
    [
        lambda flags: [*flags, "get", "pool"],
        lambda flags: ["get", *flags, "pool"],
        lambda flags: ["get", "pool", *flags],
    ],
)
def test_global_options_stand_anywhere(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch, arrange: Callable[[list[str]], list[str]]
) -> None:
    server.answers["GetPool"] = samples.pool()
    monkeypatch.setenv("MOORAGE_SERVER", "127.0.0.1:1")
    monkeypatch.setenv("MOORAGE_POOL", "env")
    monkeypatch.setenv("MOORAGE_TOKEN", "env-token")
    flags = ["--server", server.address, "-p", "flag", "--token", "flag-token", "--timeout", "5s"]
    run(*arrange(flags))
    assert server.last("GetPool").pool == "flag"
    assert server.metadata[-1]["authorization"] == "Bearer flag-token"
    deadline = server.deadlines[-1]
    assert deadline is not None
    assert deadline < 6.0


def test_the_environment_goes_over_the_defaults(run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers["GetPool"] = samples.pool()
    run("get", "pool")
    assert server.last("GetPool").pool == "default"
    assert "authorization" not in server.metadata[-1]
    monkeypatch.setenv("MOORAGE_POOL", "env")
    monkeypatch.setenv("MOORAGE_TOKEN", "env-token")
    run("get", "pool")
    assert server.last("GetPool").pool == "env"
    assert server.metadata[-1]["authorization"] == "Bearer env-token"


def test_the_token_is_never_printed(run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORAGE_TOKEN", "hush-hush")
    server.answers["GetPool"] = Failure(Code.UNAUTHENTICATED, "who are you")
    assert "hush-hush" not in run("get", "pool", code=1).output
    assert "hush-hush" not in run("get", "pool", "--help").output
    assert "hush-hush" not in run("--help").output


def _all_commands(command: click.Command) -> list[click.Command]:
    if not isinstance(command, click.Group):
        return [command]
    return [command, *(found for name in command.commands for found in _all_commands(command.commands[name]))]


@pytest.mark.parametrize("command", _all_commands(cli), ids=lambda command: str(command.name))
def test_every_verb_that_calls_the_server_takes_the_global_options(command: click.Command) -> None:
    names = {param.name for param in command.params if isinstance(param, GlobalOption)}
    if command.name in ("serve", "completion"):
        assert names == set()
    else:
        assert isinstance(command, Verb | VerbGroup)
        assert names == set(options.Settings.__dataclass_fields__) - {"given"}
    own = [param.name for param in command.params if not isinstance(param, GlobalOption)]
    # One of the same name would be taken for the global option's value.
    assert not names & set(own)
    assert command.help


def test_cert_and_key_go_together(run: Run, server: FakeServer) -> None:
    result = run("get", "pool", "--cert", __file__, code=2)
    assert "--cert and --key go together" in result.stderr
    assert server.requests == []


def test_tls_is_used_where_any_of_its_options_is_given(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[tuple[bytes | None, bytes | None, bytes | None]] = []

    def credentials(
        root_certificates: bytes | None, private_key: bytes | None, certificate_chain: bytes | None
    ) -> grpc.ChannelCredentials:
        given.append((root_certificates, private_key, certificate_chain))
        return genuine()

    genuine = grpc.ssl_channel_credentials
    monkeypatch.setattr(grpc, "ssl_channel_credentials", credentials)
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(name)
    server.answers["GetPool"] = samples.pool()
    for flags in (["--tls"], ["--ca", "ca"], ["--cert", "cert", "--key", "key", "--ca", "ca"]):
        run("get", "pool", *flags, code=exits.UNAVAILABLE)  # the fake server speaks plain text
    assert given == [(None, None, None), (b"ca", None, None), (b"ca", b"key", b"cert")]
    assert server.requests == []
