"""The collector's line to the server: sends snapshots, reads acknowledgements, backs off when there is no server."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, cast

import grpc

from moorage.collect.logs import line, logger
from moorage.credentials import Token
from moorage.v1 import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    # Exists in the stubs only.
    from moorage.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

# What the server takes in one call: of 4 MiB some is left for what goes around the items.
MAX_ITEMS = 1000
MAX_BYTES = 3 * 1024 * 1024
RPC_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.5
# Longer than this and instances would go stale after the server is back.
MAX_BACKOFF_SECONDS = 5.0
MAX_PUSHBACK_SECONDS = 60.0

# What a server of before prefix updates says of them.
UNSAID = scheduler_pb2.PrefixAck(accepted=False, reason="the server does not take prefix updates")

# Nobody there, or nobody in time: one state, whichever of the two it is.
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

# gRPC's own pause between two attempts to connect grows to two minutes by default.
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 500), ("grpc.max_reconnect_backoff_ms", 5000))


def open_channel(server: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to HOST:PORT, in plain text where there are no credentials."""
    if credentials is None:
        return grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(server, credentials, options=CHANNEL_OPTIONS)


@dataclass(slots=True)
class Beat:
    """What came of one heartbeat."""

    # Seconds until the server expects the next one; None if it did not say.
    next_interval: float | None = None
    # Seconds to wait before trying again; None if all went well.
    retry_after: float | None = None
    # Instances that the server does not know and wants to see again.
    reregister: set[str] = field(default_factory=set)
    # One per prefix update, in order; None for one that may not have arrived.
    prefixes: list[scheduler_pb2.PrefixAck | None] = field(default_factory=list)


class ServerLine:
    """Heartbeats of one pool over `channel`. Changes of state are logged once, not at every beat."""

    def __init__(self, channel: grpc.aio.Channel, pool: str, token: Token | None = None) -> None:
        self._stub = cast("SchedulerServiceAsyncStub", scheduler_pb2_grpc.SchedulerServiceStub(channel))
        self._pool = pool
        self._token = token
        self._state = "unknown"
        self._failures = 0
        self._refusals: dict[tuple[str, int], str] = {}

    async def send(
        self,
        snapshots: Sequence[scheduler_pb2.InstanceSnapshot],
        prefixes: Sequence[scheduler_pb2.PrefixUpdate] = (),
    ) -> Beat:
        """Sends `snapshots`, then `prefixes`, in as many calls as they need. A failure is an answer: see
        Beat.retry_after.
        """
        beat = Beat(prefixes=[None] * len(prefixes))
        told = 0
        for request in _requests(self._pool, snapshots, prefixes):
            metadata = () if self._token is None else (self._token.header(),)
            try:
                response = await self._stub.Heartbeat(request, timeout=RPC_SECONDS, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                beat.retry_after = self._failed(error)
                return beat
            self._worked()
            beat.reregister |= self._read_acks(response.instances)
            for update, ack in zip_longest(request.prefixes, response.prefixes, fillvalue=None):
                if update is not None:
                    beat.prefixes[told] = ack or UNSAID
                    told += 1
            if response.HasField("next_interval"):
                beat.next_interval = response.next_interval.ToTimedelta().total_seconds()
        return beat

    def _read_acks(self, acks: Iterable[scheduler_pb2.InstanceAck]) -> set[str]:
        reregister = set()
        for ack in acks:
            if ack.reregister:
                reregister.add(ack.instance_id)
            reason = "" if ack.accepted else ack.reason or "no reason given"
            if reason != self._refusals.get((ack.instance_id, ack.dp_rank), ""):
                self._refusals[ack.instance_id, ack.dp_rank] = reason
                fields = {"instance": ack.instance_id, "dp_rank": ack.dp_rank, "reregister": ack.reregister}
                if reason:
                    logger.warning(line("snapshot_refused", **fields, reason=reason))
                else:
                    logger.info(line("snapshot_accepted_again", **fields))
        return reregister

    def _worked(self) -> None:
        if self._state != "reachable":
            logger.info(line("server_state", state="reachable", was=self._state, failures=self._failures))
        self._state, self._failures = "reachable", 0

    def _failed(self, error: grpc.aio.AioRpcError) -> float:
        """Counts a failure, logs it if it is news, and says how long to wait."""
        self._failures += 1
        state = "unreachable" if error.code() in NO_ANSWER else "refusing"
        if state != self._state:
            code, detail = error.code().name, error.details()
            logger.warning(line("server_state", state=state, was=self._state, code=code, detail=detail))
            self._state = state
        backoff = min(FIRST_BACKOFF_SECONDS * float(2 ** min(self._failures - 1, 10)), MAX_BACKOFF_SECONDS)
        return max(backoff * random.uniform(0.8, 1.2), _pushback(error))


def _pushback(error: grpc.aio.AioRpcError) -> float:
    """Seconds the server asks its callers to stay away; 0 where it does not."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-retry-pushback-ms" and str(value).isdecimal():
            return min(int(value) / 1000, MAX_PUSHBACK_SECONDS)
    return 0.0


def _requests(
    pool: str,
    snapshots: Sequence[scheduler_pb2.InstanceSnapshot],
    prefixes: Sequence[scheduler_pb2.PrefixUpdate],
) -> Iterator[scheduler_pb2.HeartbeatRequest]:
    """All of it in order, in requests of bounded size."""
    request, size = scheduler_pb2.HeartbeatRequest(pool=pool), 0
    for item in (*snapshots, *prefixes):
        count, added = len(request.instances) + len(request.prefixes), item.ByteSize()
        if count and (count == MAX_ITEMS or size + added > MAX_BYTES):
            yield request
            request, size = scheduler_pb2.HeartbeatRequest(pool=pool), 0
        size += added
        if isinstance(item, scheduler_pb2.PrefixUpdate):
            request.prefixes.append(item)
        elif isinstance(item, scheduler_pb2.InstanceSnapshot):
            request.instances.append(item)
    if request.instances or request.prefixes:
        yield request
