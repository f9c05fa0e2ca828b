"""Listens to one publisher of KV events over ZeroMQ, and asks it for replays."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from moorage.collect.kv_sources import Source
from moorage.collect.kv_tracker import Tracker

# What one step of a large engine stores is a few hundred kB.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# Batches that wait in the socket; a publisher drops what is more, which shows as a gap.
MAX_QUEUED = 10_000

# A publisher that is gone without a word (its host lost power) is noticed after this time.
PING_SECONDS = 5
SILENT_SECONDS = 15
# ZeroMQ's own pause between two attempts to connect, at most.
RECONNECT_SECONDS = 5

# Between two answers of a replay, and for all of it.
ANSWER_SECONDS = 2.0
REPLAY_SECONDS = 60.0
# After a replay that brought nothing although something is missing.
RETRY_SECONDS = 2.0
# Without a batch for this long it is asked whether there is really none: a publisher drops the last one as well.
AUDIT_SECONDS = 10.0

END = b"\xff" * 8


@asynccontextmanager
async def open_context() -> AsyncIterator[zmq.asyncio.Context]:
    """What all sockets of a collector share; they are closed with it."""
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


class Subscriber:
    """One publisher, for one tracker. `say` takes remarks for people."""

    def __init__(
        self, context: zmq.asyncio.Context, source: Source, tracker: Tracker, say: Callable[[str], None]
    ) -> None:
        self.source = source
        self._context = context
        self._tracker = tracker
        self._say = say
        self._peers = 0
        self._heard = time.monotonic()
        self._wake = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether the publisher is there, and what it sends arrives."""
        return self._peers > 0

    def wake(self) -> None:
        """A replay may be wanted."""
        self._wake.set()

    async def run(self) -> None:
        """Listens until cancelled. Raises zmq.ZMQError where the address can not be used."""
        with self._context.socket(zmq.SUB) as sub:
            _limit(sub)
            sub.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            sub.setsockopt(zmq.HEARTBEAT_IVL, PING_SECONDS * 1000)
            sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_SECONDS * 1000)
            sub.setsockopt(zmq.RECONNECT_IVL, 200)
            sub.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_SECONDS * 1000)
            sub.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
            monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                if self.source.bind:
                    sub.bind(self.source.endpoint)
                else:
                    sub.connect(self.source.endpoint)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch(monitor))
                    group.create_task(self._listen(sub))
                    group.create_task(self._keep_whole())
            finally:
                self._peers = 0
                sub.disable_monitor()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._peers = max(0, self._peers + (1 if connected else -1))
            if connected:
                self._heard = 0.0  # What was said while the line was down is asked for at once.
                self._wake.set()

    async def _listen(self, sub: zmq.asyncio.Socket) -> None:
        while True:
            batch = _parse(await sub.recv_multipart())
            if batch is None:
                self._say("messages that are no KV events")
            else:
                self._heard = time.monotonic()
                self._tracker.live(*batch)
                if self._tracker.wanted is not None:
                    self._wake.set()
            # A publisher that never pauses must not keep the engines' other tasks waiting.
            await asyncio.sleep(0)

    async def _keep_whole(self) -> None:
        """Asks for what is missing, and now and then whether something is."""
        while True:
            try:
                async with asyncio.timeout(AUDIT_SECONDS / 4):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if time.monotonic() - self._heard > AUDIT_SECONDS and self.connected:
                self._heard = time.monotonic()
                self._tracker.audit()
            while self.connected and self._tracker.wanted is not None:
                if not await self._replay(self._tracker.wanted):
                    await asyncio.sleep(RETRY_SECONDS)

    async def _replay(self, start: int) -> bool:
        """One question for all batches from `start` on. Returns whether it brought any."""
        if self.source.replay is None:
            return False
        generation, complete = self._tracker.generation, False
        # A new socket each time: what is left of an answer that was too slow belongs to nobody.
        with self._context.socket(zmq.DEALER) as dealer:
            _limit(dealer)
            dealer.connect(self.source.replay)
            try:
                async with asyncio.timeout(REPLAY_SECONDS):
                    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
                    while not complete and self._tracker.generation == generation:
                        async with asyncio.timeout(ANSWER_SECONDS):
                            frames = await dealer.recv_multipart()
                        complete = self._take_answer(frames)
                        await asyncio.sleep(0)
            except TimeoutError:
                self._say(f"no answer in time from the replay endpoint {self.source.replay}")
        if self._tracker.generation != generation:
            return True
        return self._tracker.replay_over(complete)

    def _take_answer(self, frames: list[bytes]) -> bool:
        """Takes one message of a replay. True for its end. Some versions leave the topic out."""
        if len(frames) >= 2 and frames[-2] == END:
            return True
        batch = _parse(frames)
        if batch is None:
            self._say("answers of the replay endpoint that are no KV events")
        else:
            self._tracker.replayed(*batch)
        return False


def _limit(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)  # As well as version 4.


def _parse(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Sequence number and payload: the last two of [topic, number, payload]."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
