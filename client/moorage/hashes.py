"""Hashes of a prompt's full blocks, for `prefix_hashes` of Admit and Place.

They say which prompts begin alike without showing the prompt. The definition is moorage's own, the same for every
engine, and easy to compute in any language:

    digest[i] = sha256(digest[i-1] || token ids of block i, each as an unsigned 32-bit little-endian number)
    hash[i]   = the first 8 bytes of digest[i], as an unsigned big-endian number

where digest[-1] is empty, or sha256 of the salt's UTF-8 bytes where the engine is given a cache salt. So a hash names
its block and all that comes before it. Unsalted, it is the number by which SGLang calls the same block in its KV events
(which print it as a signed one).
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Callable, Sequence

#: Hashes that one call takes; longer prompts are known by their beginning.
MAX_HASHES = 16_384

#: Tokens in UTF-8 text are about this long, in bytes: blocks of text are cut so.
TEXT_BYTES_PER_TOKEN = 4


def seed_digest(salt: str = "") -> bytes:
    """What the chain begins with: nothing, or the digest of a cache salt."""
    return hashlib.sha256(salt.encode()).digest() if salt else b""


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of the block of `tokens` that follows the block of digest `parent`.

    Raises ValueError for an id that is no unsigned 32-bit number.
    """
    try:
        return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
    except struct.error:
        raise ValueError("tokens: each must be an integer from 0 to 4294967295") from None


def hash_of(digest: bytes) -> int:
    """The 64 bits of a digest that are sent."""
    return int.from_bytes(digest[:8], "big")


class PrefixHasher:
    """The hashes of a growing prompt: each turn hashes only the blocks that it adds.

    Args:
        block_size: tokens per block, as the instances report it, at least 1.
        salt: the cache salt that the engine is given with the prompt, if any.

    Raises ValueError for a block size below 1.

    Example:
        >>> hasher = PrefixHasher(16)
        >>> hasher.extend(range(20))
        [6738917275443968386]
        >>> hasher.extend(range(20, 32))
        [6738917275443968386, 5080553031686747138]
    """

    def __init__(self, block_size: int, salt: str = "") -> None:
        self._block_size = _checked(block_size)
        self._digest = seed_digest(salt)
        self._hashes: list[int] = []
        # Of the block that is not full yet.
        self._rest: list[int] = []

    @property
    def hashes(self) -> list[int]:
        """One per full block so far, at most 16,384."""
        return list(self._hashes)

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Appends token ids, and returns the hashes of all full blocks so far.

        Raises ValueError for an id outside 0..2^32-1; the prompt is then as it was before.
        """
        if len(self._hashes) == MAX_HASHES:
            return self.hashes
        size, digest, added = self._block_size, self._digest, []
        ids = self._rest + _listed(tokens)
        full = min(len(ids) // size, MAX_HASHES - len(self._hashes))
        for start in range(0, full * size, size):
            digest = block_digest(digest, ids[start : start + size])
            added.append(hash_of(digest))
        rest = ids[full * size :]
        block_digest(b"", rest)  # Refuses now what the next block would refuse.
        self._hashes += added
        self._digest, self._rest = digest, [] if len(self._hashes) == MAX_HASHES else rest
        return self.hashes


def prefix_hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """One hash per full block of a prompt, chained from its start.

    Args:
        tokens: the prompt's token ids, 0..2^32-1, as any sequence of integers, or a one-dimensional array.
        block_size: tokens per block, as the instances report it, at least 1.
        salt: the cache salt that the engine is given with the prompt, if any.

    Of more than 16,384 blocks the first 16,384 are hashed: a request takes no more. Raises ValueError for an id or a
    block size out of range.

    Example:
        >>> prefix_hashes(range(40), 16)
        [6738917275443968386, 5080553031686747138]
    """
    return PrefixHasher(block_size, salt).extend(tokens[: MAX_HASHES * _checked(block_size)])


def text_hashes(
    text: str, block_size: int, salt: str = "", tokenizer: Callable[[str], Sequence[int]] | None = None
) -> list[int]:
    """One hash per full block of a prompt that is known as text.

    Args:
        text: the prompt as the engine gets it, chat template and all.
        block_size: tokens per block, as the instances report it, at least 1.
        salt: the cache salt that the engine is given with the prompt, if any.
        tokenizer: gives the token ids of a text, the same that the engine computes.

    Without a tokenizer a "block" is 4 x `block_size` bytes of the text in UTF-8, in place of the token ids. Such hashes
    match what other callers placed who hash the same way, and never what an engine reports of its cache. Raises
    ValueError as `prefix_hashes` does.

    Example:
        >>> text_hashes("You are a helpful assistant.", 4) == text_hashes("You are a helpful one.", 4)
        True
        >>> text_hashes("0 1 2", 2, tokenizer=lambda text: [int(word) for word in text.split()])
        [120731552294108698]
    """
    if tokenizer is not None:
        return prefix_hashes(tokenizer(text), block_size, salt)
    size = TEXT_BYTES_PER_TOKEN * _checked(block_size)
    encoded, digest, hashes = text.encode(), seed_digest(salt), []
    for start in range(0, min(len(encoded) // size, MAX_HASHES) * size, size):
        digest = hashlib.sha256(digest + encoded[start : start + size]).digest()
        hashes.append(hash_of(digest))
    return hashes


def _checked(block_size: int) -> int:
    if operator.index(block_size) < 1:
        raise ValueError(f"block_size: must be at least 1, not {block_size}")
    return operator.index(block_size)


def _listed(tokens: Sequence[int]) -> list[int]:
    """Plain integers: arrays of numpy and the like are many times slower one by one."""
    tolist = getattr(tokens, "tolist", None)
    return list(tokens) if tolist is None else list(tolist())
