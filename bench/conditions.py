"""What may befall a simulated run half way through: other work, other weights, a lost engine, a blind collector."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from bench.backends import EmulatedBackend
from bench.emulator import EmulatedEngine
from bench.workload import Workload, WorkloadConfig
from moorage.v1 import scheduler_pb2
from moorage_server.core.config import PoolConfig
from moorage_server.store import records
from moorage_server.store.base import Store
from moorage_server.store.parse import encode_config
from moorage_server.store.records import Request, WeightUpdate

HEARTBEAT_S = 0.5
LOOKS_BEFORE_STOPPED = 3
"""A collector whose engine refuses so many looks in a row reports it stopped."""

SERVING = scheduler_pb2.INSTANCE_STATE_SERVING


@dataclass(frozen=True, slots=True)
class Shift:
    """One change at `at_s` after the start of the run. Times in seconds; what is not given stays as it was."""

    at_s: float = 0.0
    workload: WorkloadConfig | None = None
    """What the trainer starts from then on; its mixture becomes the pool's target."""
    load_s: float = 0.0
    """A weight update: all engines stand still for so long and then serve another version."""
    clears_cache: bool = False
    """The weight update leaves nothing in the caches."""
    away_s: float = 0.0
    """The first engine dies, and comes back empty after so long, as another incarnation."""
    silent_s: float = 0.0
    """No snapshot arrives for so long."""
    late_s: float = 0.0
    """Every snapshot arrives so much after it was taken, from then on."""

    @property
    def lasts_s(self) -> float:
        """How long until the world is at rest again; 0 where it just stays changed."""
        return max(self.load_s, self.away_s, self.silent_s)


@dataclass(slots=True)
class _Seen:
    """An engine as its collector sees it."""

    backend: EmulatedBackend
    incarnation: int = 1
    state: "scheduler_pb2.InstanceState.ValueType" = SERVING
    version: int = 0
    cache_epoch: int = 0
    refused: int = 0
    lost: bool = False


@dataclass(slots=True)
class Collector:
    """Sends snapshots of emulated engines, or keeps them back."""

    store: Store
    pool: str
    engines: dict[str, _Seen]
    clock: Callable[[], float]
    silent: bool = False
    late_s: float = 0.0
    _sequence: int = 0
    _under_way: deque[tuple[float, records.Snapshot]] = field(default_factory=deque)

    async def run(self) -> None:
        """Look at every engine twice per second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._sequence += 1
            for key, seen in self.engines.items():
                snapshot = self._look(key, seen)
                if snapshot is not None and not self.silent:
                    self._under_way.append((loop.time() + self.late_s, snapshot))
            while self._under_way and self._under_way[0][0] <= loop.time() + 1e-6:
                _, snapshot = self._under_way.popleft()
                await self.store.snapshot(self.pool, snapshot)
            await asyncio.sleep(HEARTBEAT_S)

    def _look(self, key: str, seen: _Seen) -> records.Snapshot | None:
        state = seen.state
        if seen.lost:
            seen.refused += 1
            if seen.refused != LOOKS_BEFORE_STOPPED:
                return None
            state = scheduler_pb2.INSTANCE_STATE_STOPPED
        message = seen.backend.engine.snapshot(self.clock())
        message.state, message.incarnation = state, str(seen.incarnation)
        message.weight_version, message.cache_epoch = str(seen.version), seen.cache_epoch
        return records.Snapshot(
            key,
            message.incarnation,
            self._sequence,
            scheduler_pb2.InstanceState.Name(state).removeprefix("INSTANCE_STATE_"),
            message.block_size,
            message.SerializeToString(),
            age_ms=round(1000 * self.late_s),
            weight_version=message.weight_version,
            cache_epoch=message.cache_epoch,
        )


def collector(store: Store, pool: str, engines: Mapping[str, EmulatedBackend], clock: Callable[[], float]) -> Collector:
    """Return a collector of these engines; `clock` gives Unix time."""
    return Collector(store, pool, {key: _Seen(backend) for key, backend in engines.items()}, clock)


async def carry_out(shift: Shift, workload: Workload, collecting: Collector, config: PoolConfig) -> None:
    """Let a shift happen, counted from now; returns when it is over."""
    await asyncio.sleep(shift.at_s)
    collecting.late_s = shift.late_s
    if shift.workload is not None:
        workload.change(shift.workload)
        classes = {
            name: replace(known, target_share=workload.target.get(name)) for name, known in config.classes.items()
        }
        wanted = encode_config(replace(config, classes=classes))
        await collecting.store.configure(collecting.pool, Request(), wanted, None)
    if shift.load_s:
        await _update_weights(shift, collecting)
    if shift.away_s:
        await _lose_one(shift.away_s, next(iter(collecting.engines.values())))
    if shift.silent_s:
        collecting.silent = True
        await asyncio.sleep(shift.silent_s)
        collecting.silent = False


async def _update_weights(shift: Shift, collecting: Collector) -> None:
    """As a trainer does it: say so, pause, load, resume, say so."""
    keys = ("", *collecting.engines)
    version = str(1 + max(seen.version for seen in collecting.engines.values()))
    for key in keys:
        await collecting.store.weights(collecting.pool, key, WeightUpdate(True, version, hold=True))
    for seen in collecting.engines.values():
        seen.backend.pause()
        seen.state = scheduler_pb2.INSTANCE_STATE_PAUSED
    await asyncio.sleep(shift.load_s)
    for seen in collecting.engines.values():
        seen.version, seen.state = int(version), SERVING
        if shift.clears_cache:
            seen.backend.engine.pool.forget()
            seen.cache_epoch += 1
        seen.backend.resume()
    for key in keys:
        end = WeightUpdate(False, version, int(version), cleared=shift.clears_cache)
        await collecting.store.weights(collecting.pool, key, end)


async def _lose_one(away_s: float, seen: _Seen) -> None:
    seen.lost, seen.refused = True, 0
    seen.backend.lose()
    await asyncio.sleep(away_s)
    seen.backend.start_again(EmulatedEngine(seen.backend.engine.config))
    seen.incarnation += 1
    seen.lost = False
