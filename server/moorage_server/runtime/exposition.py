"""Metrics for Prometheus, on an HTTP listener of their own.

A scrape takes what it shows inside the event loop, in a moment, and is written out by the listener's thread. It reads
pools as decisions do, from the cached view, so that no scraper makes the store work. While the store is away, pools
have no samples, for what is unknown is not zero; what the process counts goes on.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moorage_server.api.rpc_stats import RpcStats
from moorage_server.core.view import Pool
from moorage_server.errors import StoreUnavailable
from moorage_server.meters import OTHER, Labels
from moorage_server.runtime.addresses import host_and_port, with_port
from moorage_server.runtime.control import ControlPlane
from moorage_server.runtime.desk import Desk
from moorage_server.runtime.pool_metrics import CLASSES, PoolMetrics
from moorage_server.runtime.process_metrics import ProcessSample, families
from moorage_server.runtime.server import AddressInUse
from moorage_server.store.meter import ScriptMeter

#: How long a pool's view, and the event loop, may keep a scrape waiting, seconds.
_VIEW_S, _LOOP_S = 1.0, 5.0
#: A scraper that says nothing for this long is sent away, seconds.
_SILENCE_S = 10.0


class ScrapeFailed(Exception):
    """The event loop did not answer in time."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one scrape shows: views of its own, and counters."""

    process: ProcessSample
    pools: list[tuple[Pool, Labels]]


class Sampler:
    """Takes samples of one server process. Inside its event loop."""

    def __init__(self, control: ControlPlane, stats: RpcStats, scripts: ScriptMeter, ready: Callable[[], bool]) -> None:
        self._control = control
        self._stats = stats
        self._scripts = scripts
        self._ready = ready
        self._version = version("moorage")
        self._classes: dict[str, Labels] = {}

    async def sample(self) -> Sample:
        """What a scrape shows now."""
        desks = [desk for desk, _ in self._control.serving()]
        views = await asyncio.gather(*map(_view, desks))
        known = self._control.meters.pools
        pools = [
            # Decisions book on views as they are made; a thread needs one that stands still.
            (view.copy(), self._classes.setdefault(view.name, Labels(CLASSES)))
            for view in views
            if view is not None and known.of(view.name) != OTHER
        ]
        return Sample(self._process(), pools)

    def _process(self) -> ProcessSample:
        meters = self._control.meters
        nothing = dict.fromkeys(meters.pools.known(), 0)
        waiting, holders = Counter(nothing), Counter(nothing)
        for desk, holds in self._control.serving():
            waiting[meters.pools.of(desk.pool)] += desk.waiting
            holders[meters.pools.of(desk.pool)] += holds
        methods = {method.rpartition("/")[2]: stats for method, stats in self._stats.methods().items()}
        return ProcessSample(
            version=self._version,
            ready=self._ready(),
            decisions=dict(meters.decisions),
            rpcs={(rpc, code): row.copy() for rpc, stats in methods.items() for code, row in stats.latencies.items()},
            under_way={rpc: stats.under_way for rpc, stats in methods.items()},
            waits=meters.waits.rows(),
            scripts=self._scripts.seconds.rows(),
            store_errors=dict(self._scripts.errors),
            expiries=nothing | meters.expiries,
            epochs=nothing | meters.epochs,
            holders=holders,
            waiting=waiting,
        )


async def _view(desk: Desk) -> Pool | None:
    try:
        async with asyncio.timeout(_VIEW_S):
            return await desk.view()
    except (StoreUnavailable, TimeoutError):
        return None


class LoopCollector(Collector):
    """Shows samples to threads. One scrape at a time: several would keep the loop from the interpreter."""

    def __init__(self, sampler: Sampler, loop: asyncio.AbstractEventLoop) -> None:
        self._sampler = sampler
        self._loop = loop
        self._turn = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Nothing: a sample can be taken only once the loop turns."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics. Raises ScrapeFailed."""
        with self._turn:
            future = asyncio.run_coroutine_threadsafe(self._sampler.sample(), self._loop)
            try:
                sample = future.result(_LOOP_S)
            except TimeoutError:
                future.cancel()
                raise ScrapeFailed from None
            pools = PoolMetrics()
            for view, classes in sample.pools:
                pools.add(view, classes)
            yield from families(sample.process)
            yield from pools.families()


class MetricsListener:
    """Serves metrics over HTTP from a thread. Built, which takes the address, then started, and stopped once.

    Raises AddressInUse.
    """

    def __init__(self, listen: str, sampler: Sampler, loop: asyncio.AbstractEventLoop) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(LoopCollector(sampler, loop))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        host, port = host_and_port(listen)
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), _Quiet)
        except OSError as error:
            raise AddressInUse(f"can not listen on {listen}: {error.strerror or error}") from None
        self._server.set_app(_unavailable_where_it_fails(make_wsgi_app(registry)))
        self.address = with_port(listen, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    async def stop(self) -> None:
        """Ends; a scrape under way is not waited for."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


def _unavailable_where_it_fails(app: Any) -> Any:
    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            return app(environ, start_response)
        except ScrapeFailed:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the server is busy\n"]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    # Two servers on one port would answer in turns, each for itself.
    allow_reuse_port = False

    def server_bind(self) -> None:
        """Takes the address. The base class would ask the network for its name, and wait."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever goes away before the end of the answer is nobody's trouble."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, *_: Any) -> None:
        """Scrapes are not logged."""
