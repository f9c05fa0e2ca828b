"""What vLLM and SGLang publish about their prefix caches: one batch of events, decoded.

Both use the same envelope, an array `[time, events, rank]` in MessagePack. An event is a map with its name under
`type`; until 2026 it was an array with the name first. Fields that are missing are None: versions differ in what they
tell. Sources: vLLM `distributed/kv_events.py`, SGLang `disaggregation/kv_events.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgpack

#: What an engine calls a block: an integer (SGLang's are signed), or the 32 bytes of its hash.
Key: TypeAlias = int | bytes

# How events were laid out as arrays, after the name.
ARRAYS: Mapping[str, Sequence[str]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class Unreadable(Exception):
    """These bytes are not a batch of events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that are in the cache now, one after the other, behind the block `parent` (None: from the start)."""

    keys: Sequence[Key]
    parent: Key | None
    # Of all the blocks together.
    tokens: Sequence[int]
    block_size: int
    # Whether the blocks belong to an adapter.
    lora: bool = False
    medium: str | None = None
    locality: str | None = None
    # What the engine mixes into the hash besides tokens, for each of the blocks.
    extra_keys: Sequence[Sequence[object] | None] | None = None
    cache_salt: str | None = None
    # Of a hybrid model: the group of layers whose cache this is, and what kind of layers they are.
    group: int | None = None
    kind: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are not in the cache any more; of several copies, one."""

    keys: Sequence[Key]
    medium: str | None = None
    locality: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache is empty."""


Event: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one step of the engine, in their order, and the names of those that are not understood."""

    events: Sequence[Event]
    unknown: frozenset[str] = field(default_factory=frozenset)


def decode_batch(payload: bytes) -> Batch:
    """Reads one batch. Raises Unreadable where these are no events, or one of a known name makes no sense."""
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False)
    except Exception as error:  # Whatever a decoder says to garbage.
        raise Unreadable(f"no MessagePack: {type(error).__name__}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise Unreadable("no array of a time and events")
    events, unknown = [], set()
    for item in batch[1]:
        name, fields = _named(item)
        if name in ARRAYS:
            events.append(_read(name, fields))
        else:
            unknown.add(name[:64])
    return Batch(events, frozenset(unknown))


def _named(item: object) -> tuple[str, Mapping[str, object]]:
    if isinstance(item, dict) and isinstance(name := item.get("type"), str):
        return name, item
    if isinstance(item, list) and item and isinstance(name := item[0], str):
        return name, dict(zip(ARRAYS.get(name, ()), item[1:], strict=False))
    raise Unreadable("an event without a name")


def _read(name: str, fields: Mapping[str, object]) -> Event:
    if name == "AllBlocksCleared":
        return Cleared()
    keys = _list(fields, "block_hashes")
    if not all(isinstance(key, int | bytes) for key in keys):
        raise Unreadable(f"{name}: block_hashes are neither integers nor bytes")
    medium, locality, group = _text(fields, "medium"), _text(fields, "locality"), _number(fields, "group_idx")
    if name == "BlockRemoved":
        return Removed(keys, medium, locality, group)
    parent, block_size = fields.get("parent_block_hash"), _number(fields, "block_size")
    if not isinstance(parent, int | bytes | None) or block_size is None or block_size < 1:
        raise Unreadable(f"{name}: no parent_block_hash or block_size")
    extra_keys = fields.get("extra_keys")
    return Stored(
        keys=keys,
        parent=parent,
        tokens=_list(fields, "token_ids"),
        block_size=block_size,
        lora=fields.get("lora_id") is not None or fields.get("lora_name") is not None,
        medium=medium,
        locality=locality,
        extra_keys=extra_keys if isinstance(extra_keys, list) else None,
        cache_salt=_text(fields, "cache_salt"),
        group=group,
        kind=_text(fields, "kv_cache_spec_kind"),
        session_id=_text(fields, "session_id"),
    )


def _list(fields: Mapping[str, object], key: str) -> list[int]:
    value = fields.get(key)
    if not isinstance(value, list):
        raise Unreadable(f"{key} is not an array")
    return value


def _text(fields: Mapping[str, object], key: str) -> str | None:
    value = fields.get(key)
    return value if isinstance(value, str) else None


def _number(fields: Mapping[str, object], key: str) -> int | None:
    value = fields.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
