"""What is in one prefix cache, as its events tell, under our own hashes. No I/O."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from moorage.collect.kv_events import Cleared, Event, Key, Removed, Stored
from moorage.hashes import block_digest, hash_of, seed_digest

# Only what an admission finds without a transfer: a block on the host or on disk must first be brought back, which
# costs what the placement wants to save. Engines of before 2026 do not say where a block is: there was only the GPU.
MEDIA = (None, "GPU")

# A hybrid model keeps a block once per group of layers. Those of full attention need the whole prefix, so what they
# hold is what a prompt finds; a sliding window or a state keeps only the end of it.
FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")

# Blocks held in mind while the engine's number is unknown; some 300 bytes each.
DEFAULT_MAX_BLOCKS = 1 << 20

# Sessions reported as resident, and the bytes of an id, which the server checks.
MAX_SESSIONS = 4096
MAX_SESSION_ID_BYTES = 256


@dataclass(slots=True)
class _Block:
    """A cached block: how many copies, our digest of it (None: unknown; empty: ambiguous), and who stored it."""

    copies: int
    digest: bytes | None
    session: str | None


class CacheRecord:
    """Blocks in the cache of one data-parallel rank.

    The engine's names for blocks are opaque here: our hashes come from the token ids. A block whose parent is unknown,
    or that depends on more than tokens and a salt (an adapter, an image), has no hash, but is counted.
    """

    def __init__(self) -> None:
        # Times the engine said that its cache is empty.
        self.clears = 0
        # There was more than an engine of this size can hold: events do not mean what is read here. Nothing is held
        # in mind any more until the cache is cleared.
        self.overflowed = False
        # For people: what was met and can not be used.
        self.remarks: set[str] = set()
        # As the engine's metrics tell, once they did.
        self.block_size: int | None = None
        self._max_copies = DEFAULT_MAX_BLOCKS
        self._group: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._blocks: dict[Key, _Block] = {}
        self._copies = 0
        # How many of the engine's blocks have this hash: one, unless it distinguishes what we do not.
        self._hashes: Counter[int] = Counter()
        self._sessions: Counter[str] = Counter()
        # Hashes that came or went since `take_changes`, and whether they were there before. None: all is new.
        self._changes: dict[int, bool] | None = None

    @property
    def distinct_blocks(self) -> int:
        """Blocks cached, each content once."""
        return len(self._blocks)

    @property
    def hashes(self) -> list[int]:
        """Of all cached blocks that have one."""
        return list(self._hashes)

    def __contains__(self, value: int) -> bool:
        """Whether a block of this hash is cached."""
        return value in self._hashes

    def resize(self, total_blocks: int | None, block_size: int | None) -> None:
        """Takes the engine's own numbers. Twice as many blocks as it has is the most that is believed."""
        self.block_size = block_size or self.block_size
        if total_blocks:
            self._max_copies = 2 * total_blocks + 1024

    def largest_sessions(self) -> list[tuple[str, int]]:
        """The sessions that stored most of the blocks still cached, and how many; at most 4,096."""
        return nlargest(MAX_SESSIONS, self._sessions.items(), key=lambda item: item[1])

    def take_changes(self) -> tuple[list[int], list[int]] | None:
        """Hashes that came and that went since the last call, net. None if that is not known: see `take_all`."""
        if self._changes is None:
            return None
        changes, self._changes = self._changes, {}
        stored = [value for value, before in changes.items() if not before and value in self._hashes]
        removed = [value for value, before in changes.items() if before and value not in self._hashes]
        return stored, removed

    def take_all(self) -> list[int]:
        """All hashes; from here on changes are counted."""
        self._changes = {}
        return self.hashes

    def apply(self, events: Iterable[Event]) -> None:
        """Takes events in their order."""
        for event in events:
            if isinstance(event, Cleared):
                self._forget()
                self.clears += 1
                self.overflowed = False
            elif self.overflowed or event.medium not in MEDIA or event.locality == "REMOTE":
                continue
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self._store(event)

    def _store(self, event: Stored) -> None:
        if event.kind not in FULL_ATTENTION:
            return
        if event.group is not None:
            self._group = event.group if self._group is None else self._group
            if event.group != self._group:
                return
        session = event.session_id if event.session_id and _is_id(event.session_id) else None
        for key, digest in zip(event.keys, self._digests(event), strict=True):
            self._add(key, digest, session)
        if self._copies > self._max_copies:
            self.remarks.add("KV events store more blocks than the engine has")
            self._forget()
            self.overflowed = True

    def _digests(self, event: Stored) -> Sequence[bytes | None]:
        """Our digest of each block of `event`; None from the first one on that has none."""
        digests: list[bytes | None] = [None] * len(event.keys)
        size = event.block_size
        if event.lora or not self._is_regular(event):
            return digests
        if event.parent is None:
            parent = _seed(event)
        else:
            known = self._blocks.get(event.parent)
            parent = known.digest or None if known else None
        for number in range(len(event.keys)):
            if parent is None or (_extra(event, number) and (number or event.parent is not None)):
                break
            try:
                parent = block_digest(parent, event.tokens[number * size : (number + 1) * size])
            except ValueError:
                self.remarks.add("KV events with tokens that are no ids")
                break
            digests[number] = parent
        return digests

    def _is_regular(self, event: Stored) -> bool:
        """Whether it is plain which tokens belong to which block. Hybrids skip blocks and leave their tokens in."""
        if self.block_size is not None and event.block_size != self.block_size:
            self.remarks.add(f"KV events of blocks that are not of {self.block_size} tokens")
            return False
        return len(event.tokens) == event.block_size * len(event.keys)

    def _add(self, key: Key, digest: bytes | None, session: str | None) -> None:
        self._copies += 1
        block = self._blocks.get(key)
        if block is None:
            self._blocks[key] = _Block(1, digest, session)
            self._count_hash(digest, 1)
            if session:
                self._sessions[session] += 1
            return
        block.copies += 1
        if block.digest is None:
            block.digest = digest
            self._count_hash(digest, 1)
        elif digest is not None and digest != block.digest:
            # One name, two contents: which of them goes when one is removed can not be told.
            self._count_hash(block.digest, -1)
            block.digest = b""

    def _remove(self, event: Removed) -> None:
        if event.group is not None and event.group != self._group:
            return
        for key in event.keys:
            block = self._blocks.get(key)
            if block is None:
                continue
            self._copies -= 1
            block.copies -= 1
            if block.copies:
                continue
            del self._blocks[key]
            self._count_hash(block.digest, -1)
            if block.session:
                self._sessions[block.session] -= 1
                if not self._sessions[block.session]:
                    del self._sessions[block.session]

    def _count_hash(self, digest: bytes | None, by: int) -> None:
        if not digest:
            return
        value = hash_of(digest)
        if self._changes is not None:
            self._changes.setdefault(value, value in self._hashes)
            if len(self._changes) > 2 * self._max_copies:
                self._changes = None  # Nobody takes them: all of it will be less.
        self._hashes[value] += by
        if not self._hashes[value]:
            del self._hashes[value]


def _seed(event: Stored) -> bytes | None:
    """What the chain of a prompt begins with; None where that depends on more than a salt."""
    extra = _extra(event, 0)
    if event.cache_salt is not None:
        return seed_digest(event.cache_salt) if extra in ((), [event.cache_salt]) else None
    if not extra:
        return seed_digest()
    [salt] = extra if len(extra) == 1 else [None]
    return seed_digest(salt) if isinstance(salt, str) else None


def _extra(event: Stored, number: int) -> Sequence[object]:
    """What the engine hashes besides the tokens of a block."""
    keys = event.extra_keys
    found = keys[number] if keys is not None and number < len(keys) else None
    return () if found is None else found if isinstance(found, list) else [found]


def _is_id(session_id: str) -> bool:
    try:
        return len(session_id.encode()) <= MAX_SESSION_ID_BYTES
    except UnicodeEncodeError:
        return False
