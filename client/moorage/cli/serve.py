"""moorage serve: run the server."""

from __future__ import annotations

from typing import Any

import click

from moorage.cli.errors import CliError
from moorage.cli.options import DEFAULT_SERVER


@click.command()
@click.option("--listen", metavar="HOST:PORT", help=f"Address to listen on [default {DEFAULT_SERVER}].")
@click.option("--processes", type=int, help="Processes that share the address, for one Redis [default 1].")
@click.option("--redis-url", metavar="URL", help="Redis or Valkey that keeps the state.")
@click.option(
    "--embedded", is_flag=True, default=None, help="Keep the state in this process; it is lost at exit. The default."
)
@click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False), help="Configuration file.")
@click.option("--metrics-listen", metavar="HOST:PORT", help="Address of the metrics for Prometheus [default none].")
@click.option("--log-format", type=click.Choice(["auto", "json", "console"]), help="Format of the log.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False), help="Least level."
)
@click.option("--reflection/--no-reflection", default=None, help="Offer gRPC reflection.")
@click.option(
    "--insecure-listen",
    is_flag=True,
    default=None,
    help="Listen beyond loopback without credentials: whoever reaches the server may do everything.",
)
@click.pass_context
def serve(ctx: click.Context, /, config_file: str | None, **flags: Any) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    Flags go over the environment, which goes over the configuration file.
    """
    if flags["redis_url"] is not None and flags["embedded"]:
        raise click.UsageError("--redis-url and --embedded exclude each other")
    try:
        from moorage_server.runtime.main import serve as run
    except ModuleNotFoundError as error:
        raise CliError(
            f"the server is not installed: module {error.name!r} is missing",
            details=["hint: pip install 'moorage[server]'"],
        ) from None
    ctx.exit(run({name: value for name, value in flags.items() if value is not None}, config_file))
