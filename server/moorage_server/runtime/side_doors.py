"""The listeners beside the main one, each where the settings ask for it: metrics, and health in plain text."""

from __future__ import annotations

import asyncio

from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.exposition import MetricsListener, Sampler
from moorage_server.runtime.probes import HealthListener
from moorage_server.runtime.server import MoorageServer
from moorage_server.runtime.settings import Settings
from moorage_server.store.meter import ScriptMeter


class SideDoors:
    """Bound, started once, and stopped once, after the main listener."""

    def __init__(self, settings: Settings, control: ControlPlane, server: MoorageServer, scripts: ScriptMeter) -> None:
        self._settings = settings
        self._server = server
        self._sampler = Sampler(control, server.stats, scripts, lambda: server.ready)
        self._metrics: MetricsListener | None = None
        self._health: HealthListener | None = None

    def bind(self) -> None:
        """Takes the addresses. Raises AddressInUse."""
        if self._settings.metrics.listen is not None:
            self._metrics = MetricsListener(self._settings.metrics.listen, self._sampler, asyncio.get_running_loop())
        if self._settings.health.listen is not None:
            shared = self._settings.processes > 1
            self._health = HealthListener(self._settings.health.listen, self._server.health, shared)

    def addresses(self) -> dict[str, str]:
        """Where they listen, by "metrics" and "health"."""
        doors = {"metrics": self._metrics, "health": self._health}
        return {name: door.address for name, door in doors.items() if door is not None}

    async def start(self) -> None:
        """Begins to answer."""
        if self._metrics is not None:
            self._metrics.start()
        if self._health is not None:
            await self._health.start()

    async def stop(self) -> None:
        """Ends those that were bound."""
        if self._metrics is not None:
            await self._metrics.stop()
        if self._health is not None:
            await self._health.stop()
