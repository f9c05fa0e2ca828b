"""The server's side of prefix updates, strict: what breaks the protocol is kept as a complaint."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from moorage.v1.scheduler_pb2 import PrefixAck, PrefixUpdate

MAX_HASHES = 16_384


@dataclass
class Cache:
    """What was told of one instance's cache."""

    incarnation: str
    stream: str
    sequence: int = 0
    behind: bool = False
    hashes: set[int] = field(default_factory=set)

    def longest(self, hashes: Sequence[int]) -> int:
        """Blocks of the longest prefix of `hashes` that is cached."""
        for number, value in enumerate(hashes):
            if value not in self.hashes:
                return number
        return len(hashes)


@dataclass
class PrefixLedger:
    """Takes updates in their order. `resend` and `refuse` name instances whose next update is answered so, once."""

    caches: dict[tuple[str, int], Cache] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    log: list[PrefixUpdate] = field(default_factory=list)
    resend: set[str] = field(default_factory=set)
    refuse: set[str] = field(default_factory=set)
    # Streams that ended: none may come again.
    over: set[str] = field(default_factory=set)

    def take(self, update: PrefixUpdate) -> PrefixAck:
        """What the server answers to one update."""
        self.log.append(update)
        ack = PrefixAck(instance_id=update.instance_id, dp_rank=update.dp_rank, accepted=True)
        key = (update.instance_id, update.dp_rank)
        for answers, field_name in ((self.resend, "resend"), (self.refuse, "refused")):
            if update.instance_id in answers:
                answers.discard(update.instance_id)
                self._end(key)
                ack.accepted, ack.resend, ack.reason = False, field_name == "resend", "as told"
                return ack
        if not self._is_next(key, update):
            ack.accepted, ack.resend, ack.reason = False, True, "unknown stream"
            return ack
        self._apply(self.caches[key], update)
        return ack

    def cache(self, instance_id: str, dp_rank: int = 0) -> Cache | None:
        """What is known of an instance's cache."""
        return self.caches.get((instance_id, dp_rank))

    def forget(self) -> None:
        """Loses everything, as a server that starts anew without its store."""
        for key in list(self.caches):
            self._end(key)

    def _is_next(self, key: tuple[str, int], update: PrefixUpdate) -> bool:
        if update.reset != (update.sequence == 1):
            self.complaints.append(f"reset {update.reset} with sequence {update.sequence}")
        if update.reset:
            if not update.stream or update.stream in self.over:
                self.complaints.append(f"stream {update.stream!r} begins again")
            self._end(key)
            self.caches[key] = Cache(update.incarnation, update.stream)
        cache = self.caches.get(key)
        if cache is None or cache.stream != update.stream:
            return False
        if update.sequence != cache.sequence + 1:
            self.complaints.append(f"sequence {update.sequence} after {cache.sequence}")
        cache.sequence = update.sequence
        return True

    def _apply(self, cache: Cache, update: PrefixUpdate) -> None:
        stored, removed = set(update.stored), set(update.removed)
        if cache.incarnation != update.incarnation:
            self.complaints.append("another incarnation in the same stream")
        if len(update.stored) + len(update.removed) > MAX_HASHES:
            self.complaints.append("too many hashes")
        if len(stored) < len(update.stored) or stored & cache.hashes or stored & removed:
            self.complaints.append("stored what was there already")
        if len(removed) < len(update.removed) or removed - cache.hashes:
            self.complaints.append("removed what was not there")
        if update.behind and (stored or removed):
            self.complaints.append("hashes of a record that is behind")
        cache.hashes = (cache.hashes - removed) | stored
        cache.behind = update.behind

    def _end(self, key: tuple[str, int]) -> None:
        cache = self.caches.pop(key, None)
        if cache is not None:
            self.over.add(cache.stream)
