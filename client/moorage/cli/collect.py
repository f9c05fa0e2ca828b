"""moorage collect: read engines and report them to the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from moorage.cli import options
from moorage.cli.errors import CliError

if TYPE_CHECKING:
    from moorage.collect.runner import CollectorSettings


@click.group(cls=options.VerbGroup)
def collect() -> None:
    """Read engines and report them to the server, until interrupted."""


@collect.command()
@click.option("--url", "urls", multiple=True, metavar="[NAME=]URL", help="Engine to read; repeat, or add more behind.")
@click.argument("more_urls", nargs=-1, metavar="[[NAME=]URL]...")
@click.option("--interval", type=options.duration, help="Time between two readings [default: as the server says].")
@click.pass_obj
def vllm(settings: options.Settings, urls: tuple[str, ...], more_urls: tuple[str, ...], interval: float | None) -> None:
    """Read vLLM engines at their base URLs.

    Instances are called HOST:PORT unless named with NAME=URL. --timeout bounds one reading [default: 0.8 intervals].
    """
    _collect("vllm", settings, (*urls, *more_urls), interval)


def _collect(engine: str, settings: options.Settings, urls: tuple[str, ...], interval: float | None) -> None:
    """Run the collector until SIGTERM, which is a clean end, or Ctrl-C."""
    import asyncio
    import logging

    if settings.tls or settings.ca or settings.cert:
        raise click.UsageError("the collector calls the server in plain text: leave the TLS options out")
    try:
        from moorage.collect.runner import CollectorSettings
    except ModuleNotFoundError as error:
        raise CliError(
            f"the collector is not installed: module {error.name!r} is missing",
            details=["hint: pip install 'moorage[collect]'"],
        ) from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    try:
        collector = CollectorSettings(
            urls=urls,
            pool=settings.pool,
            server=settings.server,
            interval=interval,
            timeout=settings.timeout if "timeout" in settings.given else None,
            token=settings.token,
            engine=engine,
        )
        asyncio.run(_until_terminated(collector))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


async def _until_terminated(collector: CollectorSettings) -> None:
    import asyncio
    import signal

    from moorage.collect.runner import run

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run(collector, stop=stop)
