"""Which engine to read, and under which name it is reported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_ID_BYTES = 256


@dataclass(frozen=True, slots=True)
class Target:
    """One engine: the instance it is reported as, and the base of its URLs (no slash at the end)."""

    instance_id: str
    endpoint: str


def parse_target(text: str) -> Target:
    """Reads `URL` or `NAME=URL`. Without a name the instance is called HOST:PORT (and the path, if the URL has one).

    The scheme may be left out (http), and a trailing `/metrics` is dropped. Raises ValueError on anything that is not
    the base of an HTTP URL, and on credentials in the URL, which would end up in placements and logs.
    """
    name, url = _split_name(text.strip())
    if "://" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {text!r}")
    if parts.query or parts.fragment:
        raise ValueError(f"a query or fragment makes no sense in an engine's URL: {text!r}")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"credentials in an engine's URL are not supported: {parts.hostname!r}")
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/metrics")
    return Target(_checked(name or f"{host}:{port}{path}"), f"{parts.scheme}://{parts.netloc}{path}")


def target_at(host: str, port: int, name: str = "") -> Target:
    """The engine at an address (IPv4, IPv6 or a host name), called HOST:PORT unless named."""
    netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Target(_checked(name or netloc), f"http://{netloc}")


def resolve_targets(urls: Sequence[str], names: Mapping[str, str] | None = None) -> list[Target]:
    """Parses all `urls`; `names` maps a URL, written as in `urls` or as an endpoint, to the name that overrides.

    Raises ValueError when two engines would share a name.
    """
    targets: dict[str, Target] = {}
    for url in urls:
        target = parse_target(url)
        override = (names or {}).get(url) or (names or {}).get(target.endpoint)
        if override:
            target = Target(_checked(override), target.endpoint)
        if target.instance_id in targets:
            raise ValueError(f"two engines are called {target.instance_id!r}: name them with NAME=URL")
        targets[target.instance_id] = target
    return list(targets.values())


def _split_name(text: str) -> tuple[str, str]:
    """A `=` separates a name only when it stands before the scheme."""
    head, separator, tail = text.partition("=")
    return (head, tail) if separator and "://" not in head else ("", text)


def _checked(instance_id: str) -> str:
    if not 1 <= len(instance_id.encode()) <= MAX_ID_BYTES:
        raise ValueError(f"an instance's name has 1 to {MAX_ID_BYTES} bytes: {instance_id!r}")
    return instance_id
