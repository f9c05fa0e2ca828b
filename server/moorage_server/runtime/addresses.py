"""Addresses to listen on, HOST:PORT with an IPv6 host in brackets."""

from __future__ import annotations


def checked(value: str) -> str:
    """``value`` where it is an address to listen on. Raises ValueError."""
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ValueError("must be HOST:PORT with a port from 0 to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("must be HOST:PORT, an IPv6 address in brackets")
    return value


def host_and_port(listen: str) -> tuple[str, int]:
    """The parts of a checked address, the host without brackets."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def with_port(listen: str, port: int) -> str:
    """The address with the port that was given for 0."""
    return f"{listen.rpartition(':')[0]}:{port}"


def shifted(listen: str, by: int) -> str:
    """The address ``by`` ports above; port 0 stays, for any is taken there."""
    port = host_and_port(listen)[1]
    return with_port(listen, port + by if port else 0)
