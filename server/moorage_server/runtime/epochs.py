"""Drives one pool's controller: once per pool, whatever the number of server processes.

The epoch is a lease in the store. Its holder mirrors the pool's sessions, runs the controller every epoch, and computes
the needs again in between whenever capacity came free while somebody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid

import structlog

from moorage_server.core import controller, persist
from moorage_server.core.config import PoolConfig
from moorage_server.core.controller import Outcome, State
from moorage_server.core.view import Pool
from moorage_server.errors import StoreUnavailable
from moorage_server.runtime.desk import Desk
from moorage_server.runtime.labelling import Labelling
from moorage_server.runtime.mirror import Mirror
from moorage_server.store import parse
from moorage_server.store.base import Store
from moorage_server.store.records import InstanceUpdate, WeightUpdate

log = structlog.get_logger("moorage.epochs")

#: Least time between two computations of the needs between epochs, seconds.
_REFRESH_S = 0.05
#: The epoch's lease in epochs: long enough for a hiccup, short enough that a lost holder is replaced within two.
_LEASE_EPOCHS = 1.5
#: Grace after an outage, seconds (contract.md, *Start grace*).
_GRACE_S = 30.0
#: Nobody keeping the epoch for this long is an outage, seconds; never less than this many epochs.
_OUTAGE_S, _OUTAGE_EPOCHS = 5.0, 3
#: Silent instances are forgotten after this many times the silence that makes them gone.
_FORGET = 20
#: Sessions read per call, and expired per call.
_READ, _EXPIRE = 500, 100
#: Mass-expiry brake: share of a pool's sessions that may expire per second, and the least number.
_EXPIRE_SHARE, _EXPIRE_LEAST = 0.05, 10
_RETRY_S = 0.5
#: A pool that nobody named and that holds no session is left alone after this long; looked at this often. Seconds.
_EMPTY_S, _EMPTY_LOOK_S = 10.0, 0.25


class Epochs:
    """Runs the epochs of one pool, or stands by for the process that does."""

    def __init__(self, store: Store, desk: Desk, owner: str | None = None) -> None:
        self._store = store
        self._desk = desk
        self._pool = desk.pool
        self._owner = owner or uuid.uuid4().hex
        self._mirror = Mirror()
        self._labelling = Labelling()
        self._state: State | None = None
        self._changed = asyncio.Event()
        self._outcome: Outcome | None = None
        self._decisions: tuple[int, int] | None = None
        self._rate = 0.0
        self._failing = False
        self._empty_since: float | None = None

    @property
    def holds(self) -> bool:
        """Whether this process drives the pool's controller."""
        return self._state is not None

    def wake(self, why: str) -> None:
        """Something changed for those who wait (our own publications aside)."""
        if why != "published":
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled, or until the pool proves to be none: nobody ever named it, and nothing is in it."""
        while True:
            try:
                view = await self._desk.view()
                if view.named or any(c.active or c.held for c in view.classes.values()):
                    self._empty_since = None
                    await self._epoch_and_refreshes()
                elif await self._left_alone():
                    return
                if self._failing:
                    log.info("store_back", pool=self._pool)
                self._failing = False
            except StoreUnavailable as error:
                if not self._failing:
                    log.warning("store_unavailable", pool=self._pool, error=str(error))
                self._failing, self._state = True, None
                await asyncio.sleep(_RETRY_S)
            except Exception:
                log.exception("epoch_failed", pool=self._pool)
                self._state = None
                await asyncio.sleep(_RETRY_S)

    async def stop(self) -> None:
        """Gives the epoch up, so that another process need not wait for the lease to end."""
        self._state = None
        with contextlib.suppress(StoreUnavailable):
            await self._store.resign(self._pool, self._owner)

    async def _left_alone(self) -> bool:
        """Gives a pool that may be about to register some time; True once it is forgotten."""
        now = asyncio.get_running_loop().time()
        if self._empty_since is None:
            self._empty_since = now
        if now - self._empty_since < _EMPTY_S:
            await asyncio.sleep(_EMPTY_LOOK_S)
            return False
        if await self._store.retire(self._pool):
            return True
        # Paused sessions are left, and end some day.
        await self._epoch_and_refreshes()
        return False

    async def _epoch_and_refreshes(self) -> None:
        started = asyncio.get_running_loop().time()
        config = (await self._desk.view()).config
        interval = config.epoch_interval_s
        grace_ms = int(1000 * min(_GRACE_S, config.lease_ttl_s))
        quiet_ms = int(1000 * max(_OUTAGE_S, _OUTAGE_EPOCHS * interval))
        lease_ms = int(1000 * _LEASE_EPOCHS * interval)
        tick = await self._store.tick(self._pool, self._owner, lease_ms, grace_ms, quiet_ms)
        if not tick.holder:
            self._state = None
            # Looks twice per epoch, so that a lost holder is replaced within two.
            await asyncio.sleep(interval / 2)
            return
        if self._state is None:
            self._state = persist.load(await self._store.state(self._pool))
            self._mirror, self._labelling = Mirror(), Labelling()
            if await self._read() is not None and self._state is not None and self._state.at_ms:
                self._mirror.inherit()
            log.info("epoch_taken", pool=self._pool, epoch_ms=int(1000 * interval))
        if self._state is not None:
            await self._epoch(config)
        while (left := started + interval - asyncio.get_running_loop().time()) > 0 and self._state is not None:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes with what it waits for.
                async with asyncio.timeout(left):
                    await self._changed.wait()
                self._changed.clear()
                await self._refresh()
                await asyncio.sleep(_REFRESH_S)

    async def _epoch(self, config: PoolConfig) -> None:
        assert self._state is not None
        view = await self._read()
        if view is None:
            return
        await self._reap(view, config)
        outcome = controller.epoch(self._state, view, self._mirror.rows.values(), self._mirror.take())
        self._measure(view)
        updates = [self._update(view, key, need, outcome) for key, need in outcome.needs.items()]
        relabels = self._labelling.step(self._state.labels, view)
        policy = parse.encode_published(outcome.published, self._rate, self._labelling.profiles(view.config))
        if await self._store.publish(self._pool, self._owner, policy, persist.dump(self._state), True, updates):
            self._outcome = outcome
            meters = self._desk.meters
            meters.epochs[meters.pools.of(self._pool)] += 1
        else:
            self._state = None
        contradicted = self._labelling.take_contradicted()
        if (relabels or contradicted) and (
            await self._store.relabel(self._pool, self._owner, relabels, contradicted) is None
        ):
            self._state = None

    async def _refresh(self) -> None:
        """The needs alone, from what changed since."""
        view = await self._read()
        if view is None or self._outcome is None:
            return
        outcome = self._outcome
        needs = controller.needs(view, self._mirror.rows.values(), outcome.published)
        updates = [self._update(view, key, need, None) for key, need in needs.items()]
        if not await self._store.publish(self._pool, self._owner, None, None, False, updates):
            self._state = None

    async def _read(self) -> Pool | None:
        """The pool, then its changes: a session admitted in between counts twice for a moment, and is never missed."""
        view = await self._store.view(self._pool, self._desk.default)
        more = True
        while more:
            changes = await self._store.changes(self._pool, self._owner, self._mirror.revision, _READ)
            if changes is None:
                self._state = None
                return None
            self._mirror.apply(changes.rows)
            self._labelling.apply(changes.rows)
            self._mirror.revision, more = changes.revision, changes.more
        return view

    async def _reap(self, view: Pool, config: PoolConfig) -> None:
        """Ends what ran out, weight updates included, and declares silent instances gone."""
        total = sum(c.active + c.held for c in view.classes.values())
        brake = max(_EXPIRE_LEAST, int(total * _EXPIRE_SHARE))
        timeout_ms = int(1000 * config.weight_update_timeout_s)
        meters, ended = self._desk.meters, _EXPIRE
        while ended == _EXPIRE:
            ended = await self._store.expire(self._pool, brake, _EXPIRE, timeout_ms)
            meters.expiries[meters.pools.of(self._pool)] += ended
        gone_ms = int(1000 * config.gone_after_s)
        since = {"": view.updating_since_ms, **{i.key: i.updating_since_ms for i in view.instances.values()}}
        for key, at_ms in since.items():
            if at_ms is not None and view.now_ms - at_ms >= timeout_ms:
                await self._store.weights(self._pool, key, WeightUpdate(False, reason="nobody ended it"))
        for instance in view.instances.values():
            if view.now_ms - instance.seen_ms >= gone_ms or instance.state == "STOPPED":
                await self._store.gone(self._pool, instance.key, gone_ms, _FORGET * gone_ms)

    def _measure(self, view: Pool) -> None:
        """Decisions per second, smoothed over a few epochs."""
        if self._decisions is not None and view.now_ms > self._decisions[0]:
            rate = (view.decisions - self._decisions[1]) / ((view.now_ms - self._decisions[0]) / 1000.0)
            self._rate += 0.3 * (rate - self._rate)
        self._decisions = (view.now_ms, view.decisions)

    def _update(self, view: Pool, key: str, need: tuple[int, ...], outcome: Outcome | None) -> InstanceUpdate:
        instance = view.instances[key]
        fields: dict[str, str] = {}
        ruling = outcome.rulings.get(key) if outcome is not None else None
        if ruling is not None:
            fields = {
                "cap": str(ruling.cap),
                "caps": json.dumps(dict(ruling.class_caps)),
                "brake": f"{ruling.brake:.4f}",
                "pressure": f"{ruling.pressure:.4f}",
                "drained": str(ruling.drained_blocks),
                "signals": json.dumps(ruling.signals),
                "stalled": str(int(ruling.stalled)),
            }
            if instance.total_blocks is not None:
                fields["budget"] = str(ruling.budget)
        return InstanceUpdate(key, instance.incarnation, instance.added, need, fields)
