"""Block accounting: references, reuse by hash, order of eviction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.blocks import BlockPool, extend_hashes


def hashes(tokens: list[int], block_size: int = 4) -> list[int]:
    found: list[int] = []
    extend_hashes(found, tokens, block_size)
    return found


def hold(pool: BlockPool, chain: list[int]) -> list[int]:
    """Hold all of a chain as a request would: what is cached of it, then new blocks."""
    blocks = pool.match(chain)
    pool.take(blocks)
    blocks += pool.allocate(len(chain) - len(blocks))
    for block, block_hash in zip(blocks, chain, strict=True):
        pool.publish(block, block_hash)
    return blocks


def test_hashes_chain_and_cover_full_blocks_only() -> None:
    assert len(hashes(list(range(11)))) == 2
    assert hashes(list(range(8))) == hashes(list(range(11)))
    assert hashes([9, 1, 2, 3, 4, 5, 6, 7])[1] != hashes(list(range(8)))[1]


def test_hashes_extend_in_place_and_fit_64_bits() -> None:
    grown = hashes(list(range(8)))
    extend_hashes(grown, list(range(20)), 4)
    assert grown == hashes(list(range(20)))
    assert all(0 <= value < 2**64 for value in grown)


def test_released_blocks_are_found_again_until_evicted() -> None:
    pool = BlockPool(4)
    chain = hashes(list(range(12)))
    blocks = hold(pool, chain)
    pool.release(blocks)
    assert (pool.free, pool.cached_free) == (4, 3)
    assert pool.match(chain) == blocks
    pool.allocate(4)
    assert pool.match(chain) == []


def test_uncached_blocks_go_first_then_the_longest_unused_from_the_end_of_its_context() -> None:
    pool = BlockPool(5)
    old, new = hashes(list(range(8))), hashes(list(range(100, 108)))
    for chain in (old, new):
        pool.release(hold(pool, chain))
    private = pool.allocate(1)
    pool.release(private)
    assert pool.allocate(1) == private
    pool.allocate(1)
    assert (len(pool.match(old)), len(pool.match(new))) == (1, 2)
    pool.allocate(1)
    assert (len(pool.match(old)), len(pool.match(new))) == (0, 2)


def test_a_hit_makes_blocks_young_again() -> None:
    pool = BlockPool(4)
    old, new = hashes(list(range(8))), hashes(list(range(100, 108)))
    for chain in (old, new, old):
        pool.release(hold(pool, chain))
    pool.allocate(2)
    assert (len(pool.match(old)), len(pool.match(new))) == (2, 0)


def test_shared_blocks_stay_until_the_last_holder_leaves() -> None:
    pool = BlockPool(3)
    chain = hashes(list(range(8)))
    first, second = hold(pool, chain), hold(pool, chain)
    assert first == second
    assert [pool.references(block) for block in first] == [2, 2]
    pool.release(first)
    assert pool.free == 1
    pool.release(second)
    assert pool.free == 3


def test_the_cost_of_cached_blocks_is_what_they_take_from_the_free_ones() -> None:
    pool = BlockPool(6)
    chain = hashes(list(range(8)))
    held = hold(pool, chain)
    assert pool.cost(pool.match(chain), 3) == 1
    pool.release(held)
    assert pool.cost(pool.match(chain), 3) == 3


def test_overdraft_and_double_release_are_errors() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="is not held"):
        pool.release(blocks)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_accounting_balances_whatever_comes(actions: list[tuple[int, int]]) -> None:
    pool = BlockPool(12)
    held: list[list[int]] = []
    for owner, blocks in actions:
        chain = hashes([owner * 1_000 + i for i in range(4 * blocks)])
        if pool.cost(pool.match(chain), len(chain)) <= pool.free:
            held.append(hold(pool, chain))
        elif held:
            pool.release(held.pop(owner % len(held)))
        distinct = {block for blocks_held in held for block in blocks_held}
        assert pool.free == 12 - len(distinct)
        assert 0 <= pool.cached_free <= pool.free
        for block in distinct:
            assert pool.references(block) == sum(blocks_held.count(block) for blocks_held in held)
    for blocks_held in held:
        pool.release(blocks_held)
    assert pool.free == 12


def test_a_cleared_cache_finds_nothing_and_keeps_what_is_held() -> None:
    pool = BlockPool(4)
    chain = hashes(list(range(8)))
    held = hold(pool, chain)
    pool.forget()
    assert pool.match(chain) == []
    assert (pool.free, pool.cached_free) == (2, 0)
    pool.release(held)
    assert (pool.free, pool.cached_free) == (4, 0)
    assert pool.match(chain) == []
