"""moorage collect: read engines and report them to the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import click

from moorage.cli import options
from moorage.cli.errors import CliError

if TYPE_CHECKING:
    from moorage.collect.runner import CollectorSettings

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Engines(TypedDict):
    """Which engines to read, and how often. Times in seconds."""

    urls: tuple[str, ...]
    more_urls: tuple[str, ...]
    dns: tuple[str, ...]
    kube_selector: str | None
    kube_namespace: str | None
    kube_port: int | None
    discovery_interval: float
    interval: float | None
    kv_events: tuple[str, ...]


def _engine_options(port: int) -> Callable[[_Command], _Command]:
    """The options that fill _Engines; `port` is where such an engine listens unless told otherwise."""
    decorators = (
        click.option(
            "--url", "urls", multiple=True, metavar="[NAME=]URL", help="Engine to read; repeat, or add more behind."
        ),
        click.argument("more_urls", nargs=-1, metavar="[[NAME=]URL]..."),
        click.option(
            "--dns", multiple=True, metavar="NAME:PORT", help="Engines at all addresses of a DNS name; repeat."
        ),
        click.option(
            "--kube-selector", metavar="LABELS", help="Engines in the ready pods with these labels (a=b,c=d)."
        ),
        click.option("--kube-namespace", metavar="NS", help="Namespace of the pods [default: the collector's own]."),
        click.option("--kube-port", type=click.IntRange(1, 65535), help=f"Port of the pods [default {port}]."),
        click.option(
            "--discovery-interval",
            type=options.duration,
            default="5s",
            help="Time between two looks for DNS addresses and pods [default 5s].",
        ),
        click.option(
            "--interval", type=options.duration, help="Time between two readings [default: as the server says]."
        ),
        click.option(
            "--kv-events",
            multiple=True,
            metavar="NAME=tcp://HOST:PORT[,tcp://HOST:PORT]",
            help="Where an instance publishes KV events, and replays them; NAME=off or off: do not listen; repeat "
            "[default: as the engine says].",
        ),
    )

    def decorate(command: _Command) -> _Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


@click.group(cls=options.VerbGroup)
def collect() -> None:
    """Read engines and report them to the server, until interrupted."""


@collect.command()
@_engine_options(port=8000)
@click.pass_obj
def vllm(settings: options.Settings, **engines: Unpack[_Engines]) -> None:
    """Read vLLM engines at their base URLs, or wherever they are found.

    Instances are called HOST:PORT, or as their pods, unless named with NAME=URL. --timeout bounds one reading
    [default: 0.8 intervals].
    """
    _collect("vllm", settings, engines)


@collect.command()
@_engine_options(port=30000)
@click.pass_obj
def sglang(settings: options.Settings, **engines: Unpack[_Engines]) -> None:
    """Read SGLang engines at their base URLs, or wherever they are found. They need --enable-metrics.

    Instances are called HOST:PORT, or as their pods, unless named with NAME=URL. --timeout bounds one reading
    [default: 0.8 intervals].
    """
    _collect("sglang", settings, engines)


def _collect(engine: str, settings: options.Settings, engines: _Engines) -> None:
    """Run the collector until SIGTERM, which is a clean end, or Ctrl-C."""
    import asyncio
    import logging

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
            urls=(*engines["urls"], *engines["more_urls"]),
            pool=settings.pool,
            server=settings.server,
            interval=engines["interval"],
            timeout=settings.timeout if "timeout" in settings.given else None,
            proof=settings.proof(),
            engine=engine,
            dns=engines["dns"],
            kube_selector=engines["kube_selector"],
            kube_namespace=engines["kube_namespace"],
            kube_port=engines["kube_port"],
            discovery_interval=engines["discovery_interval"],
            kv_events=engines["kv_events"],
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
