"""One publisher's batches in their order: what is next, what was missed, and what to ask for again. No I/O."""

from collections import deque

from moorage.collect.kv_events import Unreadable, decode_batch
from moorage.collect.kv_record import CacheRecord

# Batches kept while a replay is under way. More than this and it is given up.
MAX_WAITING = 10_000
MAX_WAITING_BYTES = 64 * 1024 * 1024

# A publisher of garbage has ever new surprises.
MAX_REMARKS = 32

# Times that a replay is asked for again although nothing came of it.
MAX_TRIES = 3


class Tracker:
    """Keeps the record of one publisher's cache.

    Sequence numbers begin at 0 with the engine and count its batches. One that is lower than expected means that the
    engine is a new one, one that is higher that something was missed. `record` is a new object, and `generation` moves,
    with each new beginning.

    Its owner calls `live` with what is published. While `wanted` is a number it asks the publisher for a replay from
    there, calls `replayed` for each answer, then `replay_over`; where a publisher does not replay, `can_replay` is
    False and it never is one.
    """

    def __init__(self, can_replay: bool) -> None:
        self.can_replay = can_replay
        self.generation = 0
        # Times the cache was cleared, whichever record it was.
        self.clears = 0
        # What made the record incomplete, for people.
        self.reason = ""
        # Kinds of trouble met so far, for people.
        self.remarks: set[str] = set()
        self._sizes: tuple[int | None, int | None] = (None, None)
        self._begin()

    def _begin(self) -> None:
        self.record = CacheRecord()
        self.record.resize(*self._sizes)
        self._expected = 0
        # Of what was published. A replay may be ahead of it: what is in both comes a second time, in order.
        self._last_live = -1
        # Nothing is known to lie between the record and what the publisher sends next.
        self._in_step = False
        self._missed = False
        self._doubted = False
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._replay_from: int | None = 0 if self.can_replay else None
        self._begin_answer()
        self._tries = 0

    def _begin_answer(self) -> None:
        self._answers = 0
        self._cut = False

    @property
    def wanted(self) -> int | None:
        """The sequence number from which a replay is needed, if one is."""
        return self._replay_from

    @property
    def behind(self) -> bool:
        """Whether the record may lack something, or hold what is gone."""
        return self._missed or self._doubted or self.record.overflowed or bool(self._waiting) or not self._in_step

    def resize(self, total_blocks: int | None, block_size: int | None) -> None:
        """Takes the engine's own numbers, None where unknown."""
        self._sizes = (total_blocks, block_size)
        self.record.resize(total_blocks, block_size)

    def restart(self, reason: str) -> None:
        """The engine is a new one: so is the record."""
        self.generation += 1
        self.reason = reason
        self._begin()

    def doubt(self, reason: str) -> None:
        """The cache may have been cleared: an engine that is idle says so only in its next step."""
        self._doubted = True
        self.reason = reason

    def audit(self) -> None:
        """Nothing came for long: asks whether there is really nothing new."""
        if self.can_replay and self._in_step and self._replay_from is None:
            self._ask_from_here()

    def live(self, sequence: int, payload: bytes) -> None:
        """Takes a batch as it was published."""
        if sequence <= self._last_live:
            self.restart(f"the engine began anew: batch {sequence} after {self._last_live}")
        self._last_live = sequence
        if sequence < self._expected:
            return
        if not self._waiting and sequence == self._expected:
            self._apply(sequence, payload)
            self._in_step = True
            if sequence == 0:
                self._replay_from = None  # There was nothing before it.
        elif self.can_replay:
            if self._replay_from is None:
                self.reason = f"missed batches {self._expected} to {sequence - 1}"
                self._ask_from_here()
            self._wait(sequence, payload)
        else:
            self._accept(sequence, payload)

    def replayed(self, sequence: int, payload: bytes) -> None:
        """Takes a batch of a replay. One that was cut (publishers drop what they can not send) is asked for again."""
        if self._replay_from is None or self._cut:
            return
        self._answers += 1
        if sequence > self._expected:
            if self._answers > 1:
                self._cut, self._in_step = True, False
                return
            self._miss(f"the publisher keeps no batches before {sequence}, {self._expected} was next")
        if sequence >= self._expected:
            self._apply(sequence, payload)

    def replay_over(self, complete: bool) -> bool:
        """The replay is at its end, or (not `complete`) nothing more comes. Returns whether it brought anything."""
        if self._replay_from is None:
            return False
        progress = self._expected > self._replay_from
        self._tries = 0 if progress else self._tries + 1
        complete = complete and not self._cut
        self._drain()
        if complete and (not self._waiting or not progress):
            self._settle()
        elif not complete and self._in_step and not self._waiting:
            self._replay_from = None  # An audit without an answer: nothing is known to be missing.
        elif self._tries >= MAX_TRIES:
            self._give_up(f"no replay after {MAX_TRIES} tries")
        else:
            self._replay_from = self._expected
        self._begin_answer()
        return progress

    def _ask_from_here(self) -> None:
        self._replay_from = self._expected
        self._tries = 0
        self._begin_answer()

    def _wait(self, sequence: int, payload: bytes) -> None:
        self._waiting.append((sequence, payload))
        self._waiting_bytes += len(payload)
        if len(self._waiting) > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            self._give_up("no replay, and too much came meanwhile")

    def _drain(self) -> None:
        """Takes of what waits all that follows without a gap."""
        while self._waiting and self._waiting[0][0] <= self._expected:
            sequence, payload = self._waiting.popleft()
            self._waiting_bytes -= len(payload)
            if sequence == self._expected:
                self._apply(sequence, payload)

    def _settle(self) -> None:
        """There is no more to be had: what still waits follows a gap that stays."""
        while self._waiting:
            self._accept(*self._waiting.popleft())
        self._waiting_bytes = 0
        self._in_step = True
        self._replay_from = None

    def _give_up(self, reason: str) -> None:
        if self._waiting:
            self._settle()
        else:
            # The next batch shows whether anything was missed: before the first one, it may be number 0.
            self._in_step = False
            self._replay_from = None
        self.reason = reason

    def _accept(self, sequence: int, payload: bytes) -> None:
        if sequence < self._expected:
            return
        if sequence > self._expected:
            self._miss(f"missed batches {self._expected} to {sequence - 1}")
        self._apply(sequence, payload)
        self._in_step = True

    def _miss(self, reason: str) -> None:
        self._missed = True
        self.reason = reason

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._expected = sequence + 1
        self._doubted = False
        try:
            batch = decode_batch(payload)
        except Unreadable as error:
            self._remark(f"unreadable KV events: {error}")
            self._miss(f"batch {sequence} is unreadable: {error}")
            return
        for name in batch.unknown:
            self._remark(f"KV events of unknown type {name!r}")
        before = self.record.clears
        self.record.apply(batch.events)
        for remark in self.record.remarks:
            self._remark(remark)
        if self.record.overflowed:
            self.reason = "more blocks stored than the engine has"
        if self.record.clears != before:
            self.clears += self.record.clears - before
            self._missed = False

    def _remark(self, remark: str) -> None:
        if len(self.remarks) < MAX_REMARKS:
            self.remarks.add(remark)
