"""The health service alone, in plain text: for probes that can not speak the main port's TLS."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2_grpc

from moorage_server.runtime.addresses import with_port
from moorage_server.runtime.server import AddressInUse


class HealthListener:
    """Shows a server's health on an address of its own. Built, which takes the address, then started, and stopped once.

    With ``shared`` the processes of one server answer there in turns. Raises AddressInUse.
    """

    def __init__(self, listen: str, health: health_pb2_grpc.HealthServicer, shared: bool = False) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", int(shared))])
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if port == 0:
            raise AddressInUse(f"can not listen on {listen}: in use, not ours, or not permitted")
        self.address = with_port(listen, port)

    async def start(self) -> None:
        """Begins to answer."""
        await self._server.start()

    async def stop(self) -> None:
        """Ends at once: watchers hear no more."""
        await self._server.stop(None)
