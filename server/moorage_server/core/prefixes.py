"""What is known of instances' prefix caches: what may be relied on, and what is looked up (policy.md, *Placement*).

A prompt comes as one hash per full block, chained, so that hash i names all blocks up to i. What an instance holds of a
prompt is the longest run of hashes, from the first on, that its index has.
"""

from __future__ import annotations

from collections import Counter

from moorage_server import limits
from moorage_server.core.view import EVENTS, PLACED, Ask, Instance, Pool

#: Hashes of one prompt that are looked up at most: what is found of a longer prompt is short by at most 1/63 of it.
PROBES = 64
#: Hashes that are kept of one instance, whatever its size: about 14 MB of the store.
MOST_HASHES = 131_072
#: An index may hold a little more than the instance: events of one moment need not come in order.
_SLACK, _LEAST_SLACK = 1 / 16, 64
#: Events that stopped for this long are not to be relied on, seconds; never less than this many heartbeat intervals.
_SILENT_S, _SILENT_INTERVALS = 5.0, 3


def probes(count: int) -> tuple[int, ...]:
    """Positions to look up among ``count`` hashes: all up to 64, else 64 evenly spaced, the first and last included."""
    if count <= PROBES:
        return tuple(range(count))
    return tuple(n * (count - 1) // (PROBES - 1) for n in range(PROBES))


def reliable(pool: Pool, instance: Instance) -> bool:
    """Whether the index of ``instance`` may be used: it is complete, and the engine's events still come."""
    index = instance.prefixes
    if index.source == EVENTS and index.updated_ms is not None and not index.behind:
        silent_s = max(_SILENT_S, _SILENT_INTERVALS * pool.config.heartbeat_interval_s)
        return pool.now_ms - index.updated_ms <= 1000 * silent_s
    return index.source == PLACED


def searched(pool: Pool, ask: Ask, count: int) -> list[Instance]:
    """Instances worth asking for a prompt of ``count`` hashes: their index is reliable, and made for such blocks.

    The hashes of a prompt are made for one block size. It is the one that explains their number, where the prompt's
    length is known; else the one that most of the living instances have.
    """
    alive = pool.alive()
    sizes = Counter(i.block_size for i in alive)

    def explains(size: int) -> bool:
        return ask.prompt_tokens is not None and min(ask.prompt_tokens // size, limits.PREFIX_HASHES) == count

    meant = max(sizes, key=lambda size: (explains(size), sizes[size], -size), default=0)
    return [i for i in alive if i.block_size == meant and i.prefixes.blocks and reliable(pool, i)]


def most_hashes(instance: Instance | None) -> int:
    """Hashes to keep of an instance: its usable blocks and a little more where they are known."""
    if instance is None or not instance.total_blocks:
        return MOST_HASHES
    blocks = instance.total_blocks
    return min(MOST_HASHES, blocks + max(_LEAST_SLACK, int(blocks * _SLACK)))
