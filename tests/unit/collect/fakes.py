"""Recordings, and the two ends that the collector talks to: an engine's HTTP server and the scheduler."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration

from moorage.collect.exposition import parse_page
from moorage.collect.vllm_page import PageReading, read_page
from moorage.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.unit.collect.prefix_ledger import PrefixLedger

RECORDINGS = Path(__file__).parents[2] / "fixtures" / "vllm-0.32"
CRAFTED = Path(__file__).parents[2] / "fixtures" / "sglang-0.5.23"


def recording(prefix: str) -> str:
    """Text of the one recording whose name starts with `prefix`."""
    [path] = RECORDINGS.glob(f"{prefix}_*.txt")
    return path.read_text()


def crafted(name: str) -> str:
    """Text of a page or answer of SGLang. Not recorded: see the README next to it."""
    return (CRAFTED / name).read_text()


def page_of(text: str) -> PageReading:
    """What the collector reads from one page."""
    return read_page(parse_page(text))


# What a path answers: a body, or whatever bytes the function returns (it may wait for the other side to hang up).
Answer = str | Callable[[asyncio.StreamReader], Awaitable[bytes]]


@dataclass
class FakeEngine:
    """Answers GETs from `answers`; a path that is not there is 404. What it was asked is in `asked`."""

    answers: dict[str, Answer]
    url: str = ""
    asked: list[str] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.asked.append(path)
            writer.write(await self._answer(path, reader))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, reader: asyncio.StreamReader) -> bytes:
        answer = self.answers.get(path)
        if callable(answer):
            return await answer(reader)
        body = (answer or "").encode()
        status = "404 Not Found" if answer is None else "200 OK"
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def hang(reader: asyncio.StreamReader) -> bytes:
    """No answer until the other side hangs up."""
    await reader.read()
    return b""


Context = grpc.aio.ServicerContext[scheduler_pb2.HeartbeatRequest, scheduler_pb2.HeartbeatResponse]
StartEngine = Callable[..., Awaitable[FakeEngine]]


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Takes heartbeats. `next_seconds` is its next_interval; `strangers` are asked to register again, once; `ledger`
    takes the prefix updates.
    """

    def __init__(self) -> None:
        self.requests: list[scheduler_pb2.HeartbeatRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.next_seconds: float | None = None
        self.strangers: set[str] = set()
        self.failure: grpc.StatusCode | None = None
        self.address = ""
        self.ledger = PrefixLedger()
        self._news = asyncio.Event()

    async def Heartbeat(
        self, request: scheduler_pb2.HeartbeatRequest, context: Context
    ) -> scheduler_pb2.HeartbeatResponse:
        """Records the request and accepts all of it, or fails as told."""
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        self._news.set()
        if self.failure is not None:
            await context.abort(self.failure, "as told")
        acks = [self._ack(snapshot) for snapshot in request.instances]
        told = [self.ledger.take(update) for update in request.prefixes]
        response = scheduler_pb2.HeartbeatResponse(instances=acks, prefixes=told)
        if self.next_seconds is not None:
            response.next_interval.CopyFrom(Duration(nanos=round(self.next_seconds * 1e9)))
        return response

    def _ack(self, snapshot: scheduler_pb2.InstanceSnapshot) -> scheduler_pb2.InstanceAck:
        stranger = snapshot.instance_id in self.strangers
        self.strangers.discard(snapshot.instance_id)
        return scheduler_pb2.InstanceAck(
            instance_id=snapshot.instance_id,
            dp_rank=snapshot.dp_rank,
            accepted=not stranger,
            reason="unknown instance" if stranger else "",
            reregister=stranger,
        )

    def snapshots(self, instance_id: str) -> list[scheduler_pb2.InstanceSnapshot]:
        """All that came of one instance."""
        return [found for request in self.requests for found in request.instances if found.instance_id == instance_id]

    async def more(self, instance_id: str) -> None:
        """Waits for one more snapshot of an instance."""
        seen = len(self.snapshots(instance_id))
        await self.until(lambda: len(self.snapshots(instance_id)) > seen)

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Waits for heartbeats until `condition` holds."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._news.clear()
                await self._news.wait()
