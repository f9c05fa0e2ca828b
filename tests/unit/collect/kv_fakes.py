"""Batches of KV events, and an engine's publisher of them."""

import asyncio
import random
import socket
from collections.abc import Iterable, Sequence

import msgpack
import zmq
import zmq.asyncio

END = b"\xff" * 8


def stored(keys: Sequence[object], tokens: Iterable[int], parent: object = None, **fields: object) -> dict[str, object]:
    """A BlockStored as vLLM and SGLang write it since 2026, of blocks of 4 tokens."""
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": list(keys),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | fields


def removed(*keys: object, **fields: object) -> dict[str, object]:
    """A BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": "GPU"} | fields


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: object, rank: int = 0) -> bytes:
    """The payload of one message."""
    packed: bytes = msgpack.packb([1.5, list(events), rank])
    return packed


class FakePublisher:
    """Publishes on a free port of the loopback, or to `connect`; replays if asked for, from what it published.

    `lose` makes it keep a batch from its listeners, `keep` bounds what it can replay, `cut` what one replay holds;
    `silent` lets questions go unanswered; `topic_frame` is whether a replay names the topic.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        port: int = 0,
        replay_port: int | None = 0,
        connect: str | None = None,
        topic: bytes = b"kv-events",
    ) -> None:
        self.topic = topic
        self.sequence = 0
        self.keep, self.cut = 10_000, 10_000
        self.silent, self.topic_frame = False, True
        self.asked: list[int] = []
        self._sent: list[tuple[int, bytes]] = []
        self._pub = context.socket(zmq.XPUB)
        self._router = context.socket(zmq.ROUTER) if replay_port is not None else None
        if connect is None:
            self.port = _bind(self._pub, port)
        else:
            self._pub.connect(connect)
        self.replay_port = _bind(self._router, replay_port or 0) if self._router else 0
        self._task = asyncio.create_task(self._answer()) if self._router else None

    async def subscribed(self) -> None:
        """Waits until somebody listens."""
        async with asyncio.timeout(10):
            await self._pub.recv()

    async def publish(self, *events: object, lose: bool = False) -> None:
        """One batch."""
        await self.publish_raw(batch(*events), lose=lose)

    async def publish_raw(self, payload: bytes, lose: bool = False) -> None:
        """One batch as it is."""
        self._sent.append((self.sequence, payload))
        if not lose:
            await self.send([self.topic, self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    async def send(self, frames: Sequence[bytes]) -> None:
        """One message, whatever it is."""
        await self._pub.send_multipart(frames)

    async def close(self) -> None:
        """Dies."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for end in (self._pub, self._router):
            if end is not None:
                end.close(linger=0)

    async def _answer(self) -> None:
        assert self._router is not None
        while True:
            peer, empty, start = await self._router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            if self.silent:
                continue
            kept = [(n, payload) for n, payload in self._sent[-self.keep :] if n >= self.asked[-1]]
            for number, payload in kept[: self.cut]:
                await self._reply(peer, number.to_bytes(8, "big"), payload)
            if len(kept) > self.cut:  # Then some in between, and the end, were dropped.
                await self._reply(peer, kept[-1][0].to_bytes(8, "big"), kept[-1][1])
            else:
                await self._reply(peer, END, b"")

    async def _reply(self, peer: bytes, number: bytes, payload: bytes) -> None:
        assert self._router is not None
        topic = [self.topic if number != END else b""] if self.topic_frame else []
        await self._router.send_multipart([peer, b"", *topic, number, payload])


def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
    socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])


def free_pair() -> int:
    """A port that is free together with the next one, outside of those that the system gives to anybody who asks."""
    while True:
        port = random.randrange(20_000, 30_000)
        try:
            for number in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        return port
