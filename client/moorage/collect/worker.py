"""One engine's task: looks at it again and again, hands on what it saw, and logs how it fares."""

import asyncio
import time
from collections.abc import Callable
from enum import Enum

from moorage.collect.kv_follower import CacheFollower, Posting
from moorage.collect.logs import line, logger
from moorage.collect.reader import EngineReader, EngineUnreachable, EngineUnreadable
from moorage.v1.scheduler_pb2 import INSTANCE_STATE_STOPPED, InstanceSnapshot


class Pace:
    """Seconds between two looks and two heartbeats: fixed if `interval` is given, else as the server wishes."""

    DEFAULT_SECONDS = 1.0
    BOUNDS = (0.1, 60.0)

    def __init__(self, interval: float | None, timeout: float | None) -> None:
        self._fixed = interval is not None
        self._timeout = timeout
        self.interval = interval if interval is not None else self.DEFAULT_SECONDS

    @property
    def timeout(self) -> float:
        """Seconds that one look may take; by default less than the interval, so that none overlaps the next."""
        return self._timeout if self._timeout is not None else 0.8 * self.interval

    def suggest(self, interval: float | None) -> None:
        """Takes the server's wish, within bounds, unless the interval is fixed."""
        if not self._fixed and interval:
            self.interval = min(max(interval, self.BOUNDS[0]), self.BOUNDS[1])


# Looks in a row that are refused until the engine counts as stopped: its front may be starting again.
REFUSALS = 3
# Times that this is said: the server may be away for a moment.
REPEATS = 5


class Board:
    """The newest snapshots of each engine that have not been sent yet."""

    def __init__(self) -> None:
        self._fresh: dict[str, tuple[InstanceSnapshot, ...]] = {}
        self._arrived = asyncio.Event()

    def put(self, instance_id: str, snapshots: tuple[InstanceSnapshot, ...]) -> None:
        """Replaces what is there for this engine."""
        self._fresh[instance_id] = snapshots
        self._arrived.set()

    def drop(self, instance_id: str) -> None:
        """The engine does not answer any more: what was not sent is not news."""
        self._fresh.pop(instance_id, None)

    def stir(self) -> None:
        """There is something to say, if not on the board."""
        self._arrived.set()

    async def wait(self) -> None:
        """Until there may be something to take."""
        await self._arrived.wait()

    def take(self) -> list[InstanceSnapshot]:
        """All that is new, once."""
        self._arrived.clear()
        taken = [snapshot for snapshots in self._fresh.values() for snapshot in snapshots]
        self._fresh.clear()
        return taken


class EngineState(Enum):
    """How the engine looks from here."""

    UNKNOWN = "unknown"
    REACHABLE = "reachable"
    # No answer.
    UNREACHABLE = "unreachable"
    # An answer that is not an engine's metrics.
    UNREADABLE = "unreadable"


class EngineWorker:
    """Runs one reader, and follows the engine's prefix caches. Whatever goes wrong with its engine stays here."""

    def __init__(
        self,
        instance_id: str,
        reader: EngineReader,
        board: Board,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
        caches: CacheFollower | None = None,
    ) -> None:
        self.state = EngineState.UNKNOWN
        # Looks that failed: since the last good one, and in all.
        self.failures = 0
        self.failures_total = 0
        self._instance_id = instance_id
        self._reader = reader
        self._board = board
        self._pace = pace
        self._clock = clock
        self._caches = caches
        self._since = clock()
        self._remarked: set[str] = set()
        self._incarnations: dict[int, str] = {}
        # As last seen; and looks in a row since then at which nobody listened.
        self._last: tuple[InstanceSnapshot, ...] = ()
        self._refusals = 0
        self._wake = asyncio.Event()

    def look_now(self) -> None:
        """The server asks for this engine: everything is asked again, without waiting for the next look."""
        self._reader.forget_facts()
        self._wake.set()

    def postings(self) -> list[Posting]:
        """What to tell of the engine's prefix caches, as long as they are heard of: a busy engine may be too slow with
        its metrics, and its events arrive.
        """
        return self._caches.postings() if self._caches else []

    async def run(self) -> None:
        """Looks once per interval, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_looking())
            if self._caches:
                group.create_task(self._caches.run())

    async def _keep_looking(self) -> None:
        while True:
            started = self._clock()
            await self.look()
            try:
                async with asyncio.timeout(max(0.0, started + self._pace.interval - self._clock())):
                    await self._wake.wait()
            except TimeoutError:
                continue
            finally:
                self._wake.clear()

    async def look(self) -> None:
        """Reads the engine once. Never fails."""
        try:
            reading = await self._reader.read(self._pace.timeout)
        except EngineUnreachable as error:
            self._failed(EngineState.UNREACHABLE, error)
            self._count_refusals(error)
        except EngineUnreadable as error:
            self._failed(EngineState.UNREADABLE, error)
        # A reader that breaks on one engine must not take the others down.
        except Exception as error:
            self._failed(EngineState.UNREADABLE, error, unexpected=True)
        else:
            if self._caches:
                self._caches.see(reading.snapshots)
            self._board.put(self._instance_id, reading.snapshots)
            self._enter(EngineState.REACHABLE)
            self.failures = self._refusals = 0
            self._last = reading.snapshots
            self._remark(reading.remarks)
            self._note_incarnations(reading.snapshots)

    def _failed(self, state: EngineState, error: Exception, unexpected: bool = False) -> None:
        self.failures += 1
        self.failures_total += 1
        self._board.drop(self._instance_id)
        if self._caches:
            self._board.stir()
        self._enter(state, error if unexpected else None, reason=f"{type(error).__name__}: {error}")

    def _count_refusals(self, error: EngineUnreachable) -> None:
        """Silence may have many reasons, and the server waits long before it believes it. But where nobody listens
        any more there is no engine, and its sessions need not wait: it is reported as stopped.
        """
        self._refusals = self._refusals + 1 if error.refused else 0
        if not REFUSALS <= self._refusals < REFUSALS + REPEATS or not self._last:
            return
        if self._refusals == REFUSALS:
            logger.warning(line("engine_stopped", instance=self._instance_id, refusals=self._refusals))
        later = self._refusals - REFUSALS + 1
        self._board.put(self._instance_id, tuple(_stopped(snapshot, later) for snapshot in self._last))

    def _enter(self, state: EngineState, trace: Exception | None = None, **fields: object) -> None:
        """Logs a change of state, with what it was before and for how long; says nothing while nothing changes."""
        if state is self.state:
            return
        now = self._clock()
        level = logger.info if state is EngineState.REACHABLE else logger.warning
        level(
            line(
                "engine_state",
                instance=self._instance_id,
                state=state.value,
                was=self.state.value,
                seconds=now - self._since,
                failures=self.failures,
                failures_total=self.failures_total,
                **fields,
            ),
            exc_info=trace,
        )
        self.state, self._since = state, now

    def _remark(self, remarks: frozenset[str]) -> None:
        for remark in sorted(remarks - self._remarked):
            self._remarked.add(remark)
            logger.warning(line("engine_remark", instance=self._instance_id, remark=remark))

    def _note_incarnations(self, snapshots: tuple[InstanceSnapshot, ...]) -> None:
        for snapshot in snapshots:
            known = self._incarnations.get(snapshot.dp_rank)
            if known != snapshot.incarnation:
                self._incarnations[snapshot.dp_rank] = snapshot.incarnation
                event = "engine_started" if known is None else "engine_restarted"
                fields = {"dp_rank": snapshot.dp_rank, "incarnation": snapshot.incarnation}
                logger.info(line(event, instance=self._instance_id, **fields))


def _stopped(last: InstanceSnapshot, later: int) -> InstanceSnapshot:
    """The same instance, `later` looks after, as one that is gone."""
    snapshot = InstanceSnapshot()
    snapshot.CopyFrom(last)
    snapshot.sequence += later
    snapshot.observed_time.GetCurrentTime()
    snapshot.state = INSTANCE_STATE_STOPPED
    return snapshot
