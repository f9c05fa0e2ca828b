"""Follows the prefix caches of one engine: finds its publishers, listens to them, keeps a record of each rank."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import zmq
import zmq.asyncio

from moorage.collect.kv_outbox import Outbox
from moorage.collect.kv_sources import (
    Advertised,
    EventOptions,
    NoSource,
    Source,
    locate,
    read_sglang_sources,
    read_vllm_sources,
)
from moorage.collect.kv_subscriber import Subscriber
from moorage.collect.kv_tracker import Tracker
from moorage.collect.logs import line, logger
from moorage.collect.reader import EngineUnreachable, EngineUnreadable
from moorage.collect.scraper import EndpointAbsent, Scraper
from moorage.collect.targets import Target
from moorage.v1.scheduler_pb2 import InstanceSnapshot, PrefixAck, PrefixUpdate, ResidentSession


@dataclass(frozen=True, slots=True)
class Inquiry:
    """How to ask an engine where it publishes."""

    path: str
    read: Callable[[object], dict[int, Advertised]]


INQUIRIES: Mapping[str, Inquiry] = {
    "vllm": Inquiry("/kv_event_sources", read_vllm_sources),
    "sglang": Inquiry("/server_info", read_sglang_sources),
}

# Publishers do not move while an engine lives: asked again rarely, and whenever there is a new one.
LOOK_SECONDS = 60.0
ASK_SECONDS = 5.0
# After a look that failed, or while a publisher is not there; and before a socket that broke is opened again.
RETRY_SECONDS = 5.0

# Until then it is no news that there is no connection yet.
CONNECT_SECONDS = 3.0

CONFIGURE_REPLAY = (
    "until its cache is cleared or it restarts; with a replay_endpoint in --kv-events-config it catches up"
)


@dataclass(frozen=True, slots=True)
class Posting:
    """Updates of one rank's cache for one heartbeat, and who wants to know what became of them."""

    outbox: Outbox
    updates: Sequence[PrefixUpdate]

    def settle(self, acks: Sequence[PrefixAck | None]) -> None:
        """Takes one acknowledgement per update, None where there was none."""
        self.outbox.settle(acks)


class RankFollower:
    """The cache of one data-parallel rank: who publishes it, what is known of it, what the server was told."""

    def __init__(
        self, instance_id: str, dp_rank: int, told: Advertised, source: Source, context: zmq.asyncio.Context
    ) -> None:
        self.told = told
        self.tracker = Tracker(can_replay=source.replay is not None)
        self.source = source
        self._fields = {"instance": instance_id, "dp_rank": dp_rank}
        self._subscriber = Subscriber(context, source, self.tracker, self._remark)
        self._outbox = Outbox(instance_id, dp_rank)
        self._told_generation = 0
        # The life of the engine that the record belongs to, and the generation that was first seen in it.
        self._incarnation: str | None = None
        self._named_generation = 0
        self._epoch: int | None = None
        # Clears seen at the last looks: an epoch may show up a look after the event.
        self._clears = (0, 0)
        self._remarked: set[str] = set()
        self._refusal = ""
        self._state = ""
        self._began = time.monotonic()

    async def run(self) -> None:
        """Listens until cancelled, whatever happens."""
        while True:
            try:
                await self._subscriber.run()
            except* zmq.ZMQError as group:
                reason = "; ".join(str(error) for error in group.exceptions)
                self._remark(f"{self.source.endpoint} can not be used: {reason}")
            except* Exception as group:
                self._break(group)
            await asyncio.sleep(RETRY_SECONDS)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What breaks here must not spoil the readings of the engine, nor the other engines."""
        try:
            yield
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        logger.error(line("kv_events_failed", **self._fields), exc_info=error)
        self.tracker.restart("the record broke")

    def see(self, snapshot: InstanceSnapshot) -> bool:
        """Takes a new snapshot of the rank, and adds what the record knows. True where the engine is a new one."""
        self.tracker.resize(
            snapshot.total_blocks if snapshot.HasField("total_blocks") else None,
            snapshot.block_size if snapshot.HasField("block_size") else None,
        )
        is_new = self._note_life(snapshot)
        self._subscriber.wake()
        self._log_state()
        self._log_refusal()
        for remark in self.tracker.remarks - self._remarked:
            self._remark(remark)
        if self.is_reliable:
            record = self.tracker.record
            if snapshot.HasField("used_blocks") and not snapshot.HasField("cached_blocks"):
                cached = record.distinct_blocks - snapshot.used_blocks
                # Fewer blocks than are in use: one of the two is wrong, and what is cached is not known.
                if cached >= 0:
                    snapshot.cached_blocks = cached
            residents = record.largest_sessions()
            snapshot.resident_sessions.extend(ResidentSession(session_id=name, blocks=n) for name, n in residents)
        return is_new

    @property
    def is_connected(self) -> bool:
        """Whether the publisher is there."""
        return self._subscriber.connected

    @property
    def is_reliable(self) -> bool:
        """Whether the record is all there is in the cache of the engine that is known to be there."""
        return self._subscriber.connected and self._is_named and not self.tracker.behind

    @property
    def _is_named(self) -> bool:
        return self._incarnation is not None and self._named_generation == self.tracker.generation

    def posting(self) -> Posting | None:
        """What the server is told now. None while the publisher is not there, or not known to be this engine's: the
        age of what was told before says so.
        """
        if not self._subscriber.connected or not self._is_named or self._incarnation is None:
            return None
        if self._told_generation != self.tracker.generation:
            self._told_generation = self.tracker.generation
            self._outbox.restart()
        tracker = self.tracker
        return Posting(self._outbox, self._outbox.updates(tracker.record, self._incarnation, tracker.behind))

    def _note_life(self, snapshot: InstanceSnapshot) -> bool:
        """Notices a new engine, and a cache that may have been cleared without a word yet."""
        is_new = snapshot.incarnation != self._incarnation
        if is_new:
            # Unless the batches told first, that is: then the record is the new engine's already.
            if self._incarnation is not None and self._is_named:
                self.tracker.restart("the engine began anew")
            self._incarnation = snapshot.incarnation
            self._clears = (self.tracker.clears, self.tracker.clears)
        elif self._epoch != snapshot.cache_epoch and self._clears[0] == self.tracker.clears:
            self.tracker.doubt("the cache may have been cleared; an idle engine says so in its next step")
        self._named_generation = self.tracker.generation
        self._clears = (self._clears[1], self.tracker.clears)
        self._epoch = snapshot.cache_epoch
        return is_new

    def _log_state(self) -> None:
        fields: dict[str, str] = {}
        if not self._subscriber.connected:
            if not self._state and time.monotonic() - self._began < CONNECT_SECONDS:
                return
            state, fields["endpoint"] = "disconnected", self.source.endpoint
        elif self.tracker.behind:
            state = "behind"
            fields["reason"] = self.tracker.reason or "what was cached before the collector's start is not known"
            if not self.tracker.can_replay:
                fields["lasts"] = CONFIGURE_REPLAY
        else:
            state, fields["blocks"] = "following", str(self.tracker.record.distinct_blocks)
        if state != self._state:
            level = logger.info if state == "following" else logger.warning
            level(line("kv_events_state", **self._fields, state=state, was=self._state or "unknown", **fields))
            self._state = state

    def _log_refusal(self) -> None:
        if self._outbox.refusal != self._refusal:
            self._refusal = self._outbox.refusal
            if self._refusal:
                logger.warning(line("prefixes_refused", **self._fields, reason=self._refusal))
            else:
                logger.info(line("prefixes_accepted_again", **self._fields))

    def _remark(self, remark: str) -> None:
        if remark not in self._remarked:
            self._remarked.add(remark)
            logger.warning(line("kv_events_remark", **self._fields, remark=remark))


class CacheFollower:
    """All ranks of one engine. `see` and `postings` never wait; `run` never fails."""

    def __init__(
        self,
        target: Target,
        engine: str,
        http: httpx.AsyncClient,
        context: zmq.asyncio.Context,
        options: EventOptions,
    ) -> None:
        self._target = target
        self._inquiry = INQUIRIES[engine]
        self._scraper = Scraper(http, target.endpoint)
        self._context = context
        self._given = options.of(target.instance_id)
        self._ranks: dict[int, RankFollower] = {}
        self._seen_ranks = {0}
        self._remarked: set[str] = set()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Looks for publishers and listens to them, until cancelled."""
        tasks: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    all_followed = await self._follow(await self._look(), tasks, group)
                    pause = LOOK_SECONDS if all_followed else RETRY_SECONDS
                except (EngineUnreachable, EngineUnreadable):
                    # The reader says so already; and a publisher that is known stays.
                    pause = RETRY_SECONDS
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()

    def see(self, snapshots: Sequence[InstanceSnapshot]) -> None:
        """Takes what was read of the engine, and adds what is known of its caches."""
        for snapshot in snapshots:
            rank = self._ranks.get(snapshot.dp_rank)
            is_new = snapshot.dp_rank not in self._seen_ranks
            self._seen_ranks.add(snapshot.dp_rank)
            if rank is not None:
                with rank.guard():
                    is_new = rank.see(snapshot)
            if is_new:
                self._wake.set()  # It may publish elsewhere.

    def postings(self) -> list[Posting]:
        """What the server is told of the engine's caches now."""
        found = []
        for rank in self._ranks.values():
            with rank.guard():
                found.append(rank.posting())
        return [posting for posting in found if posting is not None and posting.updates]

    async def _look(self) -> dict[int, Advertised]:
        if self._given is not None:
            return {rank: _of_rank(self._given, rank) for rank in self._seen_ranks}
        try:
            told = self._inquiry.read(await self._scraper.json(self._inquiry.path, ASK_SECONDS))
        except EndpointAbsent:
            self._remark(
                f"no answer from GET {self._inquiry.path}: say with --kv-events where its KV events are, if any"
            )
            return {}
        if not told:
            self._remark("it publishes no KV events (--kv-events-config): what it has cached is not known")
        return told

    async def _follow(
        self, told: Mapping[int, Advertised], tasks: dict[int, asyncio.Task[None]], group: asyncio.TaskGroup
    ) -> bool:
        """Starts, replaces and ends listeners; one whose address did not change goes on. False where one can not be
        followed, or is not there.
        """
        for number in [number for number in self._ranks if number not in told]:
            del self._ranks[number]
            tasks.pop(number).cancel()
        for number, advertised in told.items():
            known = self._ranks.get(number)
            if known is not None and known.told == advertised and (known.is_connected or known.source.bind):
                continue
            try:
                source = await locate(advertised, self._target.endpoint)
            except NoSource as error:
                self._remark(str(error))
                continue
            if known is not None and known.source == source:
                continue
            if known is not None:
                tasks.pop(number).cancel()
            rank = RankFollower(self._target.instance_id, number, advertised, source, self._context)
            self._ranks[number] = rank
            tasks[number] = group.create_task(rank.run())
        return all(number in self._ranks and self._ranks[number].is_connected for number in told)

    def _remark(self, remark: str) -> None:
        if remark not in self._remarked:
            self._remarked.add(remark)
            logger.warning(line("kv_events_remark", instance=self._target.instance_id, remark=remark))


def _of_rank(given: Advertised, rank: int) -> Advertised:
    """Each rank has the port after the one before."""
    replay = None if given.replay is None else (given.replay[0], given.replay[1] + rank)
    return Advertised(given.host, given.port + rank, replay, given.topic, given.explicit)
