"""Hashes of blocks: the definition, its vectors, and what is refused."""

import array
import hashlib
import random
from collections import deque

import numpy as np
import pytest

import moorage
from moorage.hashes import MAX_HASHES, PrefixHasher, prefix_hashes, text_hashes

VECTOR = [6738917275443968386, 5080553031686747138]


def test_the_vector_that_sglang_shares() -> None:
    assert prefix_hashes(range(32), 16) == VECTOR
    # A block that is not full has no hash.
    assert prefix_hashes(range(47), 16) == VECTOR
    assert prefix_hashes(range(15), 16) == prefix_hashes([], 16) == []


def test_the_definition() -> None:
    digest = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in (0, 1, 2**32 - 1))).digest()
    assert prefix_hashes([0, 1, 2**32 - 1], 3) == [int.from_bytes(digest[:8], "big")]


def test_a_hash_names_all_that_comes_before() -> None:
    changed = [*range(31), 99]
    assert prefix_hashes(changed, 16)[0] == VECTOR[0]
    assert prefix_hashes(changed, 16)[1] != VECTOR[1]
    assert not set(prefix_hashes([99, *range(1, 32)], 16)) & set(VECTOR)


def test_a_salt_seeds_the_chain() -> None:
    seed = hashlib.sha256("ä7".encode()).digest()
    digest = hashlib.sha256(seed + b"\x05\x00\x00\x00").digest()
    assert prefix_hashes([5], 1, salt="ä7") == [int.from_bytes(digest[:8], "big")]
    assert prefix_hashes([5], 1, salt="") == prefix_hashes([5], 1)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: array.array("I", ids)])
def test_any_sequence_of_ids(kind: type) -> None:
    assert prefix_hashes(kind(list(range(32))), 16) == VECTOR


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"], [None], [0, 1, -1]])
def test_ids_that_are_none(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="tokens: each must be an integer from 0 to 4294967295"):
        prefix_hashes(bad, 1)
    with pytest.raises(ValueError, match="tokens"):
        prefix_hashes(bad, 16)


def test_block_sizes_that_are_none() -> None:
    for call in (lambda: prefix_hashes([1], 0), lambda: text_hashes("a", -1), lambda: PrefixHasher(0)):
        with pytest.raises(ValueError, match="block_size: must be at least 1"):
            call()
    with pytest.raises(TypeError):
        PrefixHasher(1.5)  # type: ignore[arg-type]


def test_long_prompts_are_cut() -> None:
    tokens = [7] * (MAX_HASHES + 3)
    assert len(prefix_hashes(tokens, 1)) == MAX_HASHES
    hasher = PrefixHasher(1)
    hasher.extend(tokens[:-10])
    assert hasher.extend(tokens[-10:]) == prefix_hashes(tokens, 1)
    assert hasher.extend([8]) == hasher.hashes == prefix_hashes(tokens, 1)
    assert len(text_hashes("abcd" * (MAX_HASHES + 3), 1)) == MAX_HASHES


def test_growing_prompts_hash_as_whole_ones() -> None:
    rng = random.Random(5)
    for block_size in (1, 3, 16):
        hasher, prompt = PrefixHasher(block_size, salt="v3"), []
        for _ in range(20):
            turn = [rng.randrange(2**32) for _ in range(rng.randrange(40))]
            prompt += turn
            assert hasher.extend(turn) == prefix_hashes(prompt, block_size, salt="v3")


def test_a_refused_turn_leaves_the_chain_as_it_was() -> None:
    hasher = PrefixHasher(16)
    hasher.extend(range(20))
    for bad in ([*range(20, 32), -1], [-1]):
        with pytest.raises(ValueError, match="tokens"):
            hasher.extend(bad)
    assert hasher.extend(range(20, 32)) == VECTOR


def test_a_turn_hashes_only_what_it_adds() -> None:
    hasher = PrefixHasher(4)
    hasher.extend(range(4000))
    turn = deque(range(4000, 4004))
    assert len(hasher.extend(turn)) == 1001  # type: ignore[arg-type]
    # What the caller does to the answer is its own business.
    hasher.hashes.clear()
    assert len(hasher.hashes) == 1001


def test_text_through_a_tokenizer_is_its_ids() -> None:
    assert text_hashes(" ".join(map(str, range(33))), 16, tokenizer=lambda text: [*map(int, text.split())]) == VECTOR


def test_text_alone_is_cut_by_bytes() -> None:
    text = "Grüße an alle, die dies lesen"
    hashes = text_hashes(text, 2)
    assert len(hashes) == len(text.encode()) // 8
    first = hashlib.sha256(text.encode()[:8]).digest()
    assert hashes[0] == int.from_bytes(first[:8], "big")
    assert text_hashes(text + "?", 2)[: len(hashes)] == hashes
    assert not set(text_hashes(text, 2, salt="v1")) & set(hashes)


def test_the_package_exports_them() -> None:
    assert moorage.prefix_hashes is prefix_hashes
    assert moorage.text_hashes is text_hashes
    assert moorage.PrefixHasher is PrefixHasher
