"""The collector: many engines, each read by its own task, and one line of heartbeats to the server."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from moorage.collect.discovery import Discovery, keep_looking
from moorage.collect.dns import DnsDiscovery
from moorage.collect.fleet import Fleet
from moorage.collect.heartbeat import ServerLine, open_channel
from moorage.collect.kubernetes import ClusterAccess, KubernetesDiscovery
from moorage.collect.kv_follower import CacheFollower
from moorage.collect.kv_sources import parse_options
from moorage.collect.kv_subscriber import open_context
from moorage.collect.logs import line, logger
from moorage.collect.reader import EngineReader
from moorage.collect.sglang_reader import SglangReader
from moorage.collect.targets import Target, resolve_targets
from moorage.collect.vllm_reader import VllmReader
from moorage.collect.worker import Board, EngineWorker, Pace
from moorage.credentials import Proof

# How each engine is read. Another engine is another reader, and a line here and below.
READERS: Mapping[str, Callable[[Target, httpx.AsyncClient], EngineReader]] = {
    "vllm": VllmReader,
    "sglang": SglangReader,
}

# Where each engine listens unless told otherwise.
ENGINE_PORTS: Mapping[str, int] = {"vllm": 8000, "sglang": 30000}

# The engines whose URLs were given.
STATIC = "given"

# Seconds that a heartbeat waits for the engines that answer a little after the first.
SETTLE_SECONDS = 0.1
# Unknown instances are shown to the server again after at most this time.
REREGISTER_SECONDS = 1.0
# Less than the 5 s after which the engines' HTTP server (uvicorn) closes idle connections, so that no request runs
# into a closing one.
KEEPALIVE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """What to collect and where to send it. At least one engine, DNS name or selector is needed.

    `urls` holds URL or NAME=URL; `names` (by URL) overrides. `dns` holds NAME:PORT: an engine at each address.
    `kube_selector` is a label selector: an engine in each ready pod, in `kube_namespace` (the collector's own unless
    given) at `kube_port` (the engine's default). Both are looked up anew every `discovery_interval` seconds.

    `interval` and `timeout` are seconds: without an interval the server's `next_interval` is followed (1 s until it is
    known), without a timeout a scrape may take 0.8 intervals.

    `kv_events` holds `NAME=tcp://HOST:PORT[,tcp://HOST:PORT]`, where an instance publishes KV events and replays them
    (other data-parallel ranks: the ports that follow; host `*`: the engine connects to us), `NAME=off`, or `off`. Other
    instances are asked where they publish.
    """

    urls: Sequence[str] = ()
    pool: str = "default"
    server: str = "127.0.0.1:50061"
    interval: float | None = None
    timeout: float | None = None
    proof: Proof = field(default_factory=Proof)
    names: Mapping[str, str] | None = None
    engine: str = "vllm"
    dns: Sequence[str] = ()
    kube_selector: str | None = None
    kube_namespace: str | None = None
    kube_port: int | None = None
    discovery_interval: float = 5.0
    kv_events: Sequence[str] = ()

    def __post_init__(self) -> None:
        parse_options(self.kv_events)
        if self.engine not in READERS:
            raise ValueError(f"unknown engine {self.engine!r}: one of {sorted(READERS)}")
        spans = {"interval": self.interval, "timeout": self.timeout, "discovery interval": self.discovery_interval}
        for name, seconds in spans.items():
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, not {seconds}")
        if self.kube_selector is not None and not self.kube_selector.strip():
            raise ValueError("an empty label selector would match every pod")
        if self.kube_selector is None and (self.kube_namespace is not None or self.kube_port is not None):
            raise ValueError("a namespace or port of pods makes sense only with a label selector")
        if self.kube_port is not None and not 0 < self.kube_port < 65536:
            raise ValueError(f"not a port: {self.kube_port}")


def discoveries_of(settings: CollectorSettings) -> list[Discovery]:
    """What finds engines besides the URLs. Raises ValueError on a DNS name that is none, and on a selector outside of
    Kubernetes.
    """
    found: list[Discovery] = [DnsDiscovery(name) for name in dict.fromkeys(settings.dns)]
    if settings.kube_selector is not None:
        port = settings.kube_port or ENGINE_PORTS[settings.engine]
        access = ClusterAccess.from_pod(os.environ)
        found.append(KubernetesDiscovery(access, settings.kube_selector, port, settings.kube_namespace))
    return found


async def run(
    settings: CollectorSettings, *, stop: asyncio.Event | None = None, discoveries: Sequence[Discovery] = ()
) -> None:
    """Collects until `stop` is set or the task is cancelled. Raises ValueError on engines that make no sense.

    `discoveries` find engines besides those of the settings. Engines and server may come and go: nothing they do
    ends it.
    """
    targets = resolve_targets(settings.urls, settings.names)
    discoveries = [*discoveries_of(settings), *discoveries]
    if not targets and not discoveries:
        raise ValueError("no engine to read: give at least one URL, a DNS name or a Kubernetes label selector")
    credentials = settings.proof.to_credentials()
    token = settings.proof.to_token(settings.server, secure=credentials is not None)
    stop = stop or asyncio.Event()
    # Engines are asked directly, whatever proxy the environment names, and a hanging one uses up nobody's connections.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
    async with (
        httpx.AsyncClient(limits=limits, trust_env=False) as http,
        open_channel(settings.server, credentials) as channel,
        open_context() as zeromq,
        asyncio.TaskGroup() as group,
    ):
        board, pace = Board(), Pace(settings.interval, settings.timeout)
        read, events = READERS[settings.engine], parse_options(settings.kv_events)

        def hire(target: Target) -> EngineWorker:
            caches = None
            if not events.is_off(target.instance_id):
                caches = CacheFollower(target, settings.engine, http, zeromq, events)
            return EngineWorker(target.instance_id, read(target, http), board, pace, caches=caches)

        fields = {"engines": len(targets), "discoveries": len(discoveries), "pool": settings.pool}
        logger.info(line("collector_started", **fields, server=settings.server))
        fleet = Fleet([STATIC, *(discovery.name for discovery in discoveries)], hire, group, board)
        fleet.update(STATIC, targets)
        server = ServerLine(channel, settings.pool, token)
        tasks = [group.create_task(_beat(server, board, pace, fleet))]
        for discovery in discoveries:
            tasks.append(group.create_task(keep_looking(discovery, fleet, settings.discovery_interval)))
        await stop.wait()
        for task in tasks:
            task.cancel()
        fleet.end()
    logger.info(line("collector_stopped"))


async def _beat(server: ServerLine, board: Board, pace: Pace, fleet: Fleet) -> None:
    """One heartbeat per interval, right after the scrapes, while there is anything to say."""
    clock = asyncio.get_running_loop().time
    while True:
        await board.wait()
        settle = min(SETTLE_SECONDS, pace.interval / 10)
        await asyncio.sleep(settle)
        started = clock()
        snapshots = board.take()
        postings = [posting for worker in fleet.workers.values() for posting in worker.postings()]
        beat = await server.send(snapshots, [update for posting in postings for update in posting.updates])
        acks = iter(beat.prefixes)
        for posting in postings:
            posting.settle([next(acks) for _ in posting.updates])
        pace.suggest(beat.next_interval)
        for instance_id in beat.reregister & fleet.workers.keys():
            fleet.workers[instance_id].look_now()
        pause = pace.interval - settle
        if beat.reregister:
            pause = min(pause, REREGISTER_SECONDS)
        if beat.retry_after is not None:
            pause = beat.retry_after
        await asyncio.sleep(max(0.0, started + pause - clock()))
