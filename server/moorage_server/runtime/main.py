"""``moorage serve``: from configuration to a running server, and to its end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import grpc
import structlog

from moorage.v1 import inspector_pb2_grpc, operator_pb2_grpc, scheduler_pb2_grpc
from moorage_server.runtime.exits import EXIT_CONFIGURATION, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from moorage_server.runtime.logs import configure_logging
from moorage_server.runtime.redaction import mask_url, redact_text
from moorage_server.runtime.security import Security
from moorage_server.runtime.server import AddressInUse, MoorageServer
from moorage_server.runtime.settings import Settings
from moorage_server.runtime.settings_sources import SettingsError, load_settings, unknown_variables
from moorage_server.runtime.tasks import end

if TYPE_CHECKING:
    from moorage_server.runtime.control import ControlPlane
    from moorage_server.runtime.tracing import Tracing

_log = structlog.get_logger("moorage.server")


def serve(overrides: Mapping[str, object], config_file: str | None) -> int:
    """Runs a server until SIGTERM or SIGINT; returns the exit code of the process.

    ``overrides`` holds what flags set, by the keys of settings_sources.FLAGS.
    A second signal ends the process without grace.
    """
    try:
        settings = load_settings(config_file, overrides, os.environ)
    except SettingsError as error:
        return _unusable(error)
    configure_logging(settings.log)
    for variable, meant in unknown_variables(os.environ).items():
        _log.warning("unknown variable, ignored", variable=variable, **({"did_you_mean": meant} if meant else {}))
    if settings.processes == 1:
        return run_server(settings, _print, _on_signals)
    from moorage_server.runtime.workers import supervise

    return supervise(settings, _print)


def run_server(settings: Settings, announce: Callable[[str], None], signals: Callable[[], asyncio.Event]) -> int:
    """Runs the server of this process until the event of ``signals`` is set; returns the exit code.

    ``announce`` is told once, when it serves, where it listens. ``signals`` is called inside the event loop.
    """
    try:
        security = Security(settings)
    except SettingsError as error:
        return _unusable(error)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_run(settings, security, announce, signals))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _print(line: str) -> None:
    print(line, flush=True)


def _unusable(error: SettingsError) -> int:
    print("moorage serve: unusable configuration", *error.problems, sep="\n  ", file=sys.stderr)
    return EXIT_CONFIGURATION


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _run(
    settings: Settings, security: Security, announce: Callable[[str], None], signals: Callable[[], asyncio.Event]
) -> int:
    # The store's libraries and numpy are most of the start-up time: not before the configuration is known to be good.
    from moorage_server.runtime.control import ControlPlane
    from moorage_server.runtime.side_doors import SideDoors
    from moorage_server.store.connect import open_store

    try:
        tracing = _tracing(settings)
    except ModuleNotFoundError as error:
        print(f"moorage serve: tracing.otlp_endpoint: needs moorage[tracing]; {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    url = settings.redis_url
    try:
        store = await open_store(
            url,
            embedded=settings.embedded,
            prefix=settings.redis.key_prefix,
            sentinels=settings.sentinels,
            master_name=settings.redis.master_name,
            cluster=settings.redis.cluster,
        )
    except ValueError as error:
        print(f"moorage serve: redis.url: {redact_text(str(error))}, got {mask_url(url or '')!r}", file=sys.stderr)
        return EXIT_CONFIGURATION
    control = ControlPlane(store, settings.pool_configs())
    services = Services(control)
    server = MoorageServer(settings, services.register, store.ping, security, control.meters, tracing)
    doors = SideDoors(settings, control, server, store.meter)
    try:
        address = server.bind()
        doors.bind()
    except AddressInUse as error:
        print(f"moorage serve: {error}", file=sys.stderr)
        await doors.stop()
        await server.grpc.stop(None)
        await store.close()
        return EXIT_ERROR
    if tracing is not None:
        store.meter.listener = tracing.script
    stopping = signals()
    await control.start()
    await server.start()
    await doors.start()
    announce(_where(settings, address))
    _log_listening(settings, address, security, doors.addresses())
    _spare_the_collector()
    await stopping.wait()
    _log.info("stopping", grace_s=settings.shutdown.grace_s)
    await server.stop(services.drain)
    # To the end, probes are told that we are not ready, and what the drain counted can be scraped.
    await doors.stop()
    await store.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.stop)
    # What is left (reads that nobody waits for any more) must not keep the process.
    await end(asyncio.all_tasks() - {asyncio.current_task()})
    _log.info("stopped")
    return EXIT_OK


class Services:
    """The servicers of one control plane, and how they end."""

    def __init__(self, control: ControlPlane) -> None:
        from moorage_server.api.inspector import InspectorServicer
        from moorage_server.api.operator import OperatorServicer
        from moorage_server.api.scheduler import SchedulerServicer

        self._control = control
        self._scheduler = SchedulerServicer(control)
        self._inspector = InspectorServicer(control)
        self._operator = OperatorServicer(control)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers to a server."""
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self._scheduler, server)
        inspector_pb2_grpc.add_InspectorServiceServicer_to_server(self._inspector, server)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(self._operator, server)

    async def drain(self) -> None:
        """Ends watches with a last word, waits with where they stand, streams, and hands the epochs over."""
        self._scheduler.drain()
        self._inspector.close()
        await self._control.stop()


def _tracing(settings: Settings) -> Tracing | None:
    """Traces where they are asked for. Raises ModuleNotFoundError where OpenTelemetry is not installed."""
    if settings.tracing.otlp_endpoint is None:
        return None
    from moorage_server.runtime.tracing import Tracing

    return Tracing.to(settings.tracing.otlp_endpoint)


def _spare_the_collector() -> None:
    """What was loaded stays: the garbage collector need not walk it again, nor the ledger's mirror at every turn."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def _on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the next one finds the system's default in place."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def stop() -> None:
        stopping.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


def _where(settings: Settings, address: str) -> str:
    """Says where the server listens and where the ledger lives."""
    if settings.embedded:
        where = "embedded store: ALL STATE IS LOST AT EXIT, one process only; --redis-url keeps it"
    else:
        where = f"store {settings.store}"
    if settings.processes > 1:
        where = f"{settings.processes} processes, {where}"
    return f"moorage listens on {address}, {where}"


def _log_listening(settings: Settings, address: str, security: Security, doors: Mapping[str, str]) -> None:
    _log.info(
        "listening",
        address=address,
        store=settings.store,
        pools=sorted(settings.pools),
        reflection=settings.reflects,
        **security.facts(),
        **doors,
    )
    security.warn()
