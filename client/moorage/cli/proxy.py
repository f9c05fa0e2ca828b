"""moorage proxy: an OpenAI-compatible front for clients that know nothing of moorage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moorage.cli import options
from moorage.cli.errors import CliError

if TYPE_CHECKING:
    from moorage.proxy.settings import ProxySettings

DEFAULT_LISTEN = "127.0.0.1:8080"
_SPAN = options.duration


def _read_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Flags go over the environment, which goes over the file: its values become the defaults."""
    if value is None:
        return None
    import yaml

    try:
        content = yaml.safe_load(Path(value).read_text("utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise click.BadParameter(f"{value}: {error}") from None
    if not isinstance(content, dict):
        raise click.BadParameter(f"{value}: must be a mapping")
    flags = {str(param.name) for param in ctx.command.params} - {"config"}
    known = flags | {"rules", "classes"}
    if unknown := sorted(set(map(str, content)) - known):
        raise click.BadParameter(f"{value}: unknown key {unknown[0]!r}")
    ctx.default_map = {**(ctx.default_map or {}), **{name: content[name] for name in flags & content.keys()}}
    ctx.meta["proxy_file"] = content
    return value


def _env(name: str) -> str:
    return f"MOORAGE_PROXY_{name}"


@click.command(cls=options.Verb)
@click.option(
    "--config", is_eager=True, callback=_read_file, expose_value=False, envvar=_env("CONFIG"),
    type=click.Path(exists=True, dir_okay=False),
    help="YAML with rules and classes, and any of these options with underscores.",
)  # fmt: skip
@click.option(
    "--listen", default=DEFAULT_LISTEN, envvar=_env("LISTEN"), metavar="HOST:PORT",
    help=f"Address to listen on [default {DEFAULT_LISTEN}].",
)  # fmt: skip
@click.option("--default-class", envvar=_env("DEFAULT_CLASS"), help="Class of requests that match no rule.")
@click.option(
    "--session-header", "session_headers", multiple=True, envvar=_env("SESSION_HEADERS"), metavar="NAME",
    help="Header that names the session, before the usual ones; repeat.",
)  # fmt: skip
@click.option(
    "--session-field", "session_fields", multiple=True, envvar=_env("SESSION_FIELDS"), metavar="PATH",
    help="Field of the body that does, such as user or metadata.rollout; repeat.",
)  # fmt: skip
@click.option("--idle", type=_SPAN, default="5m", envvar=_env("IDLE"), help="Silence that ends a session [default 5m].")
@click.option(
    "--max-hold", type=_SPAN, default="5m", envvar=_env("MAX_HOLD"),
    help="Longest wait for a place, then 429 [default 5m].",
)  # fmt: skip
@click.option("--lease", type=_SPAN, envvar=_env("LEASE"), help="Lease to ask for [default: the pool's].")
@click.option("--connect-timeout", type=_SPAN, default="5s", envvar=_env("CONNECT_TIMEOUT"), help="[default 5s]")
@click.option(
    "--first-byte-timeout", type=_SPAN, default="1h", envvar=_env("FIRST_BYTE_TIMEOUT"),
    help="Until an engine's answer begins, 0 for ever [default 1h].",
)  # fmt: skip
@click.option(
    "--idle-timeout", type=_SPAN, default="10m", envvar=_env("IDLE_TIMEOUT"),
    help="Between two pieces of an answer, 0 for ever [default 10m].",
)  # fmt: skip
@click.option(
    "--total-timeout", type=_SPAN, default="0", envvar=_env("TOTAL_TIMEOUT"),
    help="Of an engine's whole answer, 0 for ever [default 0].",
)  # fmt: skip
@click.option(
    "--retries", type=click.IntRange(0, 10), default=2, envvar=_env("RETRIES"),
    help="Other placements after a refused connection [default 2].",
)  # fmt: skip
@click.option(
    "--on-unavailable", type=click.Choice(["fail", "admit"]), default="fail", envvar=_env("ON_UNAVAILABLE"),
    help="While moorage is away: answer 503, or forward to the fallback engines [default fail].",
)  # fmt: skip
@click.option("--fallback", multiple=True, envvar=_env("FALLBACK"), metavar="URL", help="Such an engine; repeat.")
@click.option(
    "--grace", type=_SPAN, default="30s", envvar=_env("GRACE"),
    help="Time for running requests after SIGTERM [default 30s].",
)  # fmt: skip
@click.option(
    "--on-exit", type=click.Choice(["leave", "release"]), default="leave", envvar=_env("ON_EXIT"),
    help="Sessions at the end: left to other proxies, or ended [default leave].",
)  # fmt: skip
@click.option(
    "--require-token-file", type=click.Path(exists=True, dir_okay=False), envvar=_env("REQUIRE_TOKEN_FILE"),
    help="Bearer tokens, one a line: clients need one of them.",
)  # fmt: skip
@click.option(
    "--max-body", type=click.IntRange(1), default=64 << 20, envvar=_env("MAX_BODY"), metavar="BYTES",
    help="Largest request [default 64 MiB].",
)  # fmt: skip
@click.pass_context
def proxy(ctx: click.Context, /, **flags: Any) -> None:
    """Serve OpenAI's API in front of the pool's engines, until SIGTERM or Ctrl-C.

    Sessions come from X-Session-ID, session_id and the like, classes from X-Workload-Class or the rules. A request
    without a session is one of its own. POST /finish_session?session_id= ends one, X-Session-End: true with an answer.
    Every option has a variable, MOORAGE_PROXY_MAX_HOLD and so on.
    """
    import asyncio
    import logging

    try:
        import aiohttp  # noqa: F401
    except ModuleNotFoundError as error:
        raise CliError(
            f"the proxy is not installed: module {error.name!r} is missing",
            details=["hint: pip install 'moorage[proxy]'"],
        ) from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        settings = _settings(ctx.obj, flags, ctx.meta.get("proxy_file", {}))
        with asyncio.Runner(loop_factory=_fast_loop()) as runner:
            runner.run(_serve(settings))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise CliError(f"can not listen on {flags['listen']}: {error.strerror or error}") from None


def _settings(shared: options.Settings, flags: dict[str, Any], content: dict[str, Any]) -> ProxySettings:
    from moorage.proxy.rules import Rules
    from moorage.proxy.settings import ProxySettings, Timeouts

    return ProxySettings(
        listen=flags["listen"],
        server=shared.server,
        pool=shared.pool,
        proof=shared.proof(),
        rules=Rules.parse(content, default_class=flags["default_class"], idle_s=flags["idle"], duration=_SPAN),
        session_headers=flags["session_headers"],
        session_fields=flags["session_fields"],
        max_hold=flags["max_hold"],
        lease=flags["lease"],
        timeouts=Timeouts(
            connect=flags["connect_timeout"],
            first_byte=flags["first_byte_timeout"] or None,
            idle=flags["idle_timeout"] or None,
            total=flags["total_timeout"] or None,
        ),
        retries=flags["retries"],
        on_unavailable=flags["on_unavailable"],
        fallback=flags["fallback"],
        grace=flags["grace"],
        leave_sessions=flags["on_exit"] == "leave",
        require_token_file=flags["require_token_file"],
        max_body=flags["max_body"],
    )


def _fast_loop() -> Any:
    """uvloop where it is; None is asyncio's own."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


async def _serve(settings: ProxySettings) -> None:
    import asyncio
    import signal

    from moorage.proxy.main import run

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def ready(address: str) -> None:
        click.echo(f"moorage proxy on http://{address}, server {settings.server}, pool {settings.pool}")

    await run(settings, stop=stop, on_ready=ready)
