"""Engines behind a DNS name, one per address: a headless Service, for example."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from moorage.collect.discovery import DiscoveryFailed
from moorage.collect.targets import Target, target_at

# All addresses of a name. Raises OSError when it can not be resolved.
Resolver = Callable[[str], Awaitable[Sequence[str]]]


class SystemResolver:
    """All IPv4 and IPv6 addresses that the system's resolver knows. It looks up one name at a time, on a thread of its
    own: a look that hangs can not be broken off, and must not use up the threads that engines' names need.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "moorage-dns")

    async def __call__(self, host: str) -> Sequence[str]:
        """Raises OSError."""
        look = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._thread, look)
        return [str(address[0]) for *_, address in found]


class DnsDiscovery:
    """One engine at `port` of each address of a name. Instances are called ADDRESS:PORT, so they keep their name for
    as long as they keep their address.
    """

    def __init__(self, name_and_port: str, resolve: Resolver | None = None) -> None:
        """`resolve` is the system's unless given. Raises ValueError on anything but NAME:PORT."""
        host, _, port = name_and_port.strip().rpartition(":")
        if not host or set(host) & set(":/[]@ ") or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"not a DNS name and port, such as engines.example:8000: {name_and_port!r}")
        self._host, self._port = host, int(port)
        self._resolve = resolve or SystemResolver()

    @property
    def name(self) -> str:
        """See Discovery."""
        return f"dns {self._host}:{self._port}"

    async def find(self) -> Sequence[Target]:
        """See Discovery. A name without any address is a failure: resolvers say so, too, when they do not know yet."""
        try:
            addresses = {ipaddress.ip_address(address) for address in await self._resolve(self._host)}
        except (OSError, ValueError) as error:
            raise DiscoveryFailed(f"{self._host} can not be resolved: {error}") from error
        if not addresses:
            raise DiscoveryFailed(f"{self._host} has no address")
        return [target_at(str(address), self._port) for address in sorted(addresses, key=lambda a: (a.version, int(a)))]
