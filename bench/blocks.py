"""Paged KV of the emulated engine: counted references, reuse by chained block hashes, eviction in LRU order."""

from collections import OrderedDict
from collections.abc import Sequence

_ROOT = 0x6D6F6F72616765


def extend_hashes(hashes: list[int], tokens: Sequence[int], block_size: int) -> None:
    """Append to `hashes`, in place, those of the full blocks of `tokens` that it does not cover yet.

    Each hash covers its block and all before it, as a 64-bit unsigned number; equal on every run, since hashes of
    integers are not salted.
    """
    parent = hashes[-1] if hashes else _ROOT
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, *tokens[start : start + block_size])) & 0xFFFF_FFFF_FFFF_FFFF
        hashes.append(parent)


class BlockPool:
    """A fixed set of blocks. A block is held (referenced), cached and free (evictable), or just free."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._hash_of: list[int | None] = [None] * total
        self._block_of: dict[int, int] = {}
        # Evicted from the front: blocks without a hash come first, then the longest unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def free(self) -> int:
        """Blocks nobody holds, cached ones included: this is all that an engine's usage gauge sees."""
        return len(self._free)

    @property
    def cached_free(self) -> int:
        """Blocks nobody holds that would still be found by their hash."""
        return sum(1 for block in self._free if self._hash_of[block] is not None)

    def references(self, block: int) -> int:
        """Return how many requests hold the block."""
        return self._references[block]

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix; takes no reference."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def cost(self, matched: Sequence[int], needed: int) -> int:
        """Return how far `free` would sink if a request took `matched` and `needed` blocks in all."""
        return needed - len(matched) + sum(1 for block in matched if self._references[block] == 0)

    def take(self, matched: Sequence[int]) -> None:
        """Reference cached blocks."""
        for block in matched:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, evicting what they cached; ValueError where there are fewer."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            block_hash = self._hash_of[block]
            if block_hash is not None:
                del self._block_of[block_hash]
                self._hash_of[block] = None
            self._references[block] = 1
        return taken

    def publish(self, block: int, block_hash: int) -> None:
        """Make a held, full block findable. A second copy of the same content stays private."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def forget(self) -> None:
        """Clear the cache: nothing is found by its hash any more; what is held stays held."""
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a request, given in the order of its context.

        The end of a context is evicted before its start, since the start serves more prompts.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
