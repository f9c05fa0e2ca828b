"""Addresses that all processes of a server listen on (SO_REUSEPORT): the kernel deals connections out to them."""

from __future__ import annotations

import errno
import socket
from typing import Any

from moorage_server.runtime.addresses import host_and_port, with_port
from moorage_server.runtime.server import AddressInUse

_Place = tuple[socket.AddressFamily, Any]


class SharedAddress:
    """An address kept for the processes of one server while this lives. It is bound, never listened on.

    ``listen`` may have port 0; ``address`` has the port that was found. Raises AddressInUse.
    """

    def __init__(self, listen: str) -> None:
        host, port = host_and_port(listen)
        self._sockets: list[socket.socket] = []
        try:
            for family, place in _places(host, port):
                self._keep(family, (place[0], port, *place[2:]))
                port = self._sockets[0].getsockname()[1] if self._sockets else port
            if not self._sockets:
                raise OSError(errno.EADDRNOTAVAIL, "no such address here")
        except OSError as error:
            self.close()
            raise AddressInUse(f"can not listen on {listen}: {error.strerror or error}") from None
        self.address = with_port(listen, port)

    def close(self) -> None:
        """Gives the address up."""
        for one in self._sockets:
            one.close()

    def _keep(self, family: socket.AddressFamily, place: Any) -> None:
        try:
            # Shared with our own processes, not with another server, which would have another ledger: it must be free.
            _bound(family, place, socket.SO_REUSEADDR).close()
            self._sockets.append(_bound(family, place, socket.SO_REUSEADDR, socket.SO_REUSEPORT))
        except OSError as error:
            # A name such as localhost stands for addresses that not every machine has.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise


def _places(host: str, port: int) -> list[_Place]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, place) for family, _, _, _, place in found]


def _bound(family: socket.AddressFamily, place: Any, *options: int) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            one.setsockopt(socket.SOL_SOCKET, option, 1)
        one.bind(place)
    except OSError:
        one.close()
        raise
    return one
