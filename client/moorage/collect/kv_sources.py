"""Where an engine publishes its KV events: as it says itself, or as the command line does."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

# An address that stands for all of a host's: the engine listens there, and is to be found at its own host.
WILDCARDS = frozenset({"*", "0.0.0.0", "::"})

HELP = "NAME=tcp://HOST:PORT[,tcp://HOST:PORT], NAME=off or off"


@dataclass(frozen=True, slots=True)
class Advertised:
    """Where one data-parallel rank publishes, as told. Hosts may be wildcards; they are of the engine's network."""

    host: str
    port: int
    # Where it answers questions for a replay; None where it does not.
    replay: tuple[str, int] | None = None
    topic: str = ""
    # The command line's host says where to connect, or (a wildcard) that the engine connects to us.
    explicit: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A publisher as its subscriber needs it: an address to connect to, or to bind, in ZeroMQ's spelling."""

    endpoint: str
    bind: bool
    replay: str | None
    topic: str


class NoSource(Exception):
    """There is no way to listen there; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class EventOptions:
    """What the command line says of KV events: nothing at all, of some instances, or that there are none."""

    off: bool = False
    # By instance. None: do not listen to it.
    instances: Mapping[str, Advertised | None] | None = None

    def of(self, instance_id: str) -> Advertised | None:
        """The address given for an instance; of rank 0, the next rank's is one higher."""
        return (self.instances or {}).get(instance_id)

    def is_off(self, instance_id: str) -> bool:
        """Whether not to listen to it."""
        named = self.instances or {}
        return self.off or (instance_id in named and named[instance_id] is None)


def parse_options(values: Sequence[str]) -> EventOptions:
    """Reads the values of --kv-events. Raises ValueError for one that makes no sense."""
    off = False
    instances: dict[str, Advertised | None] = {}
    for value in values:
        name, _, where = value.rpartition("=")
        if value == "off":
            off = True
        elif not name:
            raise ValueError(f"KV events are given as {HELP}, not {value!r}")
        elif where == "off":
            instances[name] = None
        else:
            publish, _, replay = where.partition(",")
            host, port = parse_tcp(publish)
            instances[name] = Advertised(host, port, parse_tcp(replay) if replay else None, explicit=True)
    return EventOptions(off, instances)


def parse_tcp(endpoint: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT. Raises ValueError for anything else."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    known = endpoint.startswith("tcp://") and colon and host and port.isdecimal() and 0 < int(port) < 65536
    if not known or "/" in host:
        raise ValueError(f"not an address of KV events: {endpoint!r} (tcp://HOST:PORT)")
    return host, int(port)


def read_vllm_sources(answer: object) -> dict[int, Advertised]:
    """Publishers by rank, of vLLM's GET /kv_event_sources; none where events are off or do not travel over TCP."""
    found = {}
    for rank, config in answer.items() if isinstance(answer, dict) else ():
        if not isinstance(config, dict) or config.get("publisher") != "zmq" or not str(rank).isdecimal():
            continue
        replay, topic = config.get("replay_endpoint"), config.get("topic")
        try:
            host, port = parse_tcp(str(config.get("endpoint")))
            again = parse_tcp(str(replay)) if replay else None
        except ValueError:
            continue
        found[int(rank)] = Advertised(host, port, again, topic if isinstance(topic, str) else "")
    return found


def read_sglang_sources(answer: object) -> dict[int, Advertised]:
    """Publishers by rank, of SGLang's GET /server_info: one port after the other. Not every version tells of replay."""
    config = answer.get("kv_events") if isinstance(answer, dict) else None
    if not isinstance(config, dict) or config.get("publisher") != "zmq":
        return {}
    host, port, ranks = config.get("endpoint_host"), config.get("endpoint_port_base"), config.get("dp_size", 1)
    replay, topic = config.get("replay_endpoint_port_base"), config.get("topic")
    if not isinstance(host, str) or not isinstance(port, int) or not isinstance(ranks, int):
        return {}
    return {
        rank: Advertised(
            host,
            port + rank,
            (host, replay + rank) if isinstance(replay, int) else None,
            topic if isinstance(topic, str) else "",
        )
        for rank in range(min(ranks, 1024))
    }


async def locate(told: Advertised, engine_url: str) -> Source:
    """How to listen to a publisher of the engine at `engine_url`. Raises NoSource.

    An engine that is given a concrete host connects there, so that we must listen; but it also names a concrete host
    after it chose a port by itself (`tcp://*:0`). If that address is ours and free, the engine connects to it; if it
    is taken, or the engine's own, the engine listens there.
    """
    engine_host = urlsplit(engine_url).hostname or ""
    replay = None
    if told.replay is not None:
        host, port = told.replay
        replay = await _resolved(engine_host if host in WILDCARDS else host, port)
    if told.host in WILDCARDS and told.explicit:
        return Source(_tcp("*", told.port), True, replay, told.topic)
    if told.host in WILDCARDS or told.explicit:
        host = engine_host if told.host in WILDCARDS else told.host
        return Source(await _resolved(host, told.port), False, replay, told.topic)
    addresses = await _addresses(told.host, told.port)
    for address in addresses:
        if _is_free(address, told.port):
            return Source(_tcp(address, told.port), True, replay, told.topic)
        if _is_ours(address):
            return Source(_tcp(address, told.port), False, replay, told.topic)
    if set(addresses) & set(await _addresses(engine_host, told.port)):
        return Source(_tcp(addresses[0], told.port), False, replay, told.topic)
    raise NoSource(
        f"the engine sends KV events to {_tcp(told.host, told.port)}, which is not this host: "
        "let it listen (tcp://*:PORT), or say with --kv-events where they are"
    )


async def _resolved(host: str, port: int) -> str:
    """Endpoint at the first address of a host: ZeroMQ would ask for it in the thread that serves all engines."""
    return _tcp((await _addresses(host, port))[0], port)


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def _addresses(host: str, port: int) -> list[str]:
    """Addresses of a host. Raises NoSource when it has none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoSource(f"the host of its KV events, {host!r}, is not known here: {error}") from None
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def _is_ours(address: str) -> bool:
    return _is_free(address, 0)


def _is_free(address: str, port: int) -> bool:
    """Whether we could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
