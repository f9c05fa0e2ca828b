"""What the server is told of one prefix cache: a stream of changes that begins with all that is cached."""

from collections.abc import Iterator, Sequence
from uuid import uuid4

from moorage.collect.kv_record import CacheRecord
from moorage.v1.scheduler_pb2 import PrefixAck, PrefixUpdate

# What the server takes in one update.
MAX_HASHES = 16_384

# Heartbeats to sit out after the first refusal that does not ask for more, and at most: all that is cached again and
# again would be much to send for nothing.
FIRST_PAUSE = 1
MAX_PAUSE = 64


class Outbox:
    """Updates of one instance's cache. `updates` once per heartbeat, then `settle` with what the server said."""

    def __init__(self, instance_id: str, dp_rank: int) -> None:
        self._instance_id = instance_id
        self._dp_rank = dp_rank
        # What the last refusal said; empty after an update that was taken.
        self.refusal = ""
        self._pause = 0
        self._wait = 0
        self.restart()

    def restart(self) -> None:
        """What was told so far does not count: the next update begins a stream."""
        self._stream = ""
        self._sequence = 0
        # The server has all that the record held when it last was asked for changes.
        self._based = False

    def updates(self, record: CacheRecord, incarnation: str, behind: bool) -> list[PrefixUpdate]:
        """What to send now: at least one update, which may be empty, unless refusals are sat out.

        While the record is `behind` its hashes are kept back: they are not to be relied on.
        """
        if self._wait:
            self._wait -= 1
            return []
        if behind:
            if not self._stream:
                self._begin()
            return [self._update(incarnation, behind=True)]
        changes = record.take_changes() if self._based else None
        if changes is None:
            self._begin()
            self._based = True
            changes = record.take_all(), []
        return list(self._split(incarnation, *changes))

    def settle(self, acks: Sequence[PrefixAck | None]) -> None:
        """Takes what became of the updates last asked for; None for one whose fate is not known."""
        lost = [ack for ack in acks if ack is None or ack.resend or not ack.accepted]
        if not lost:
            if acks:
                self.refusal, self._pause = "", 0
            return
        self.restart()
        refused = [ack for ack in lost if ack is not None and not ack.resend]
        if refused:
            self.refusal = refused[0].reason or "no reason given"
            self._wait = self._pause = min(max(FIRST_PAUSE, 2 * self._pause), MAX_PAUSE)

    def _begin(self) -> None:
        self._stream, self._sequence = uuid4().hex, 0
        self._based = False

    def _split(self, incarnation: str, stored: Sequence[int], removed: Sequence[int]) -> Iterator[PrefixUpdate]:
        """In updates of bounded size: what went first, so that the server never holds more than the cache does."""
        marked = [*((value, False) for value in removed), *((value, True) for value in stored)]
        for start in range(0, max(len(marked), 1), MAX_HASHES):
            part = marked[start : start + MAX_HASHES]
            update = self._update(incarnation)
            update.removed.extend(value for value, is_stored in part if not is_stored)
            update.stored.extend(value for value, is_stored in part if is_stored)
            yield update

    def _update(self, incarnation: str, behind: bool = False) -> PrefixUpdate:
        self._sequence += 1
        return PrefixUpdate(
            instance_id=self._instance_id,
            dp_rank=self._dp_rank,
            incarnation=incarnation,
            stream=self._stream,
            sequence=self._sequence,
            reset=self._sequence == 1,
            behind=behind,
        )
