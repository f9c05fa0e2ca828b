"""The gRPC server of one process: options, health, reflection, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moorage.v1 import inspector_pb2, operator_pb2, scheduler_pb2
from moorage_server import limits
from moorage_server.api.decision_log import DecisionLog
from moorage_server.api.interceptors import CallInterceptor
from moorage_server.api.item_calls import Tracer
from moorage_server.api.rpc_stats import RpcStats
from moorage_server.meters import Meters
from moorage_server.runtime.security import Security
from moorage_server.runtime.settings import Settings
from moorage_server.runtime.tasks import end

#: Serves as long as the loop turns, whatever the store does: an outage must not restart every replica.
LIVENESS = "liveness"
#: Serves while the store answers. The nameless service says the same.
READINESS = "readiness"

SERVICE_NAMES = (
    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name,
    inspector_pb2.DESCRIPTOR.services_by_name["InspectorService"].full_name,
    operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name,
)

#: Time that a drain gets even where there is no grace, seconds.
_LEAST_DRAIN_S = 1.0

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_log = structlog.get_logger("moorage.server")


class AddressInUse(Exception):
    """The address to listen on can not be had."""


class MoorageServer:
    """A server that is built, started once, and stopped once.

    ``register`` adds the servicers; ``ping`` raises, or answers too late, while the store is unreachable. ``security``
    is what the settings say unless given; ``meters`` count decisions; ``tracer`` gives every unary method a span.
    Raises SettingsError where the security is unusable.
    """

    def __init__(
        self,
        settings: Settings,
        register: Callable[[grpc.aio.Server], None],
        ping: Callable[[], Awaitable[object]],
        security: Security | None = None,
        meters: Meters | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
        self._security = security or Security(settings)
        self._ping = ping
        self._tasks: list[asyncio.Task[None]] = []
        self.stats = RpcStats()
        self.ready = False
        self.health = health.aio.HealthServicer()
        self.grpc = grpc.aio.server(
            interceptors=[
                CallInterceptor(self.stats, DecisionLog(_decisions(settings)), self._security.guard, meters, tracer)
            ],
            options=server_options(settings),
            maximum_concurrent_rpcs=settings.limits.max_concurrent_rpcs,
        )
        register(self.grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        if settings.reflects:
            names = (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.grpc)

    def bind(self) -> str:
        """Takes the address and answers it with the port that was given. Raises AddressInUse."""
        try:
            port = self._security.bind(self.grpc)
        except RuntimeError:
            port = 0
        if port == 0:
            raise AddressInUse(f"can not listen on {self._settings.listen}: in use, not ours, or not permitted")
        return f"{self._settings.listen.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        """Begins to answer: alive at once, ready when the store answers."""
        await self._set_ready(False)
        await self.health.set(LIVENESS, _SERVING)
        await self.grpc.start()
        self._tasks = [
            asyncio.create_task(self._follow_store(), name="readiness"),
            asyncio.create_task(self._security.follow(), name="security"),
        ]

    async def stop(self, drain: Callable[[], Awaitable[object]] | None = None) -> None:
        """Ends in order: not ready, a pause for load balancers, no new calls, grace for those under way.

        ``drain`` runs as the grace begins; it lets waiting calls and streams finish by themselves.
        """
        await end(self._tasks)
        await self._set_ready(False)
        await asyncio.sleep(self._settings.shutdown.pre_stop_delay_s)
        ending = asyncio.create_task(self.grpc.stop(self._settings.shutdown.grace_s))
        # One turn of the loop closes the listener before the drain begins.
        await asyncio.sleep(0)
        if drain is not None:
            await self._drain_within_grace(drain)
        await ending

    async def _drain_within_grace(self, drain: Callable[[], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(max(_LEAST_DRAIN_S, self._settings.shutdown.grace_s)):
                await drain()
        except TimeoutError:
            _log.warning("the drain did not end within the grace")

    async def _follow_store(self) -> None:
        ready = False
        while True:
            answers = await self._store_answers()
            if answers != ready:
                ready = answers
                await self._set_ready(ready)
                if ready:
                    _log.info("the store answers: ready")
                else:
                    _log.warning("the store does not answer: not ready")
            await asyncio.sleep(self._settings.health.check_interval_s)

    async def _store_answers(self) -> bool:
        try:
            async with asyncio.timeout(self._settings.health.check_timeout_s):
                await self._ping()
        except Exception as error:
            _log.debug("ping failed", error=repr(error))
            return False
        return True

    async def _set_ready(self, ready: bool) -> None:
        self.ready = ready
        for name in (READINESS, ""):
            await self.health.set(name, _SERVING if ready else _NOT_SERVING)


def server_options(settings: Settings) -> list[tuple[str, Any]]:
    """Channel arguments of the server."""
    options: list[tuple[str, Any]] = [
        # Only processes of one server share its port: two servers would split the calls between two ledgers.
        ("grpc.so_reuseport", int(settings.processes > 1)),
        ("grpc.max_receive_message_length", settings.limits.max_message_bytes),
        ("grpc.max_send_message_length", settings.limits.max_message_bytes),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ]
    if settings.limits.max_connection_age_s is not None:
        options += [
            ("grpc.max_connection_age_ms", round(settings.limits.max_connection_age_s * 1000)),
            # The longest wait of an Admit still ends by itself.
            ("grpc.max_connection_age_grace_ms", (limits.MAX_WAIT_S + 10) * 1000),
        ]
    return options


def _decisions(settings: Settings) -> Any:
    # Decisions are logged at info: above that they need not even be put together.
    return settings.log.decisions if settings.log.level in ("debug", "info") else "none"
