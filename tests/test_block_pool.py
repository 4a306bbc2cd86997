"""The block pool alone: counts, names, least-recently-used reuse."""

from __future__ import annotations

import pytest

from paceline.runtime.block_pool import BlockPool, block_names, chain_hash


def test_blocks_are_held_by_counts_and_come_back() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.allocate(2) is None
    pool.hold(blocks[0])
    pool.release(blocks)
    assert (pool.num_used, pool.num_free) == (1, 3)
    pool.check([[blocks[0]]])
    pool.release([blocks[0]])
    pool.check([])


def test_a_freed_block_is_found_by_name_until_it_is_needed() -> None:
    pool = BlockPool(2)
    (first,) = pool.allocate(1) or []
    pool.register(first, b"a")
    pool.release([first])
    assert pool.find(b"a") == first
    pool.hold(first)
    pool.release([first])
    (other,) = pool.allocate(1) or []  # the unnamed one goes first
    assert other != first
    assert pool.find(b"a") == first
    assert pool.allocate(1) == [first]
    assert pool.find(b"a") is None


def test_the_least_recently_used_name_is_forgotten_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block, name)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release([block])
    pool.allocate(1)
    assert (pool.find(b"a"), pool.find(b"b"), pool.find(b"c")) == (blocks[0], None, blocks[2])


def test_names_depend_on_everything_before() -> None:
    one = block_names(list(range(33)), 16)
    two = block_names([99, *range(1, 33)], 16)
    assert len(one) == 2
    assert one[0] != two[0]
    assert one[1] != two[1]
    assert block_names(list(range(33)), 16, one[:1]) == one
    assert chain_hash(b"", [1, 2]) != chain_hash(b"", [2, 1])


def test_books_that_do_not_balance_are_seen() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1) or []
    with pytest.raises(AssertionError, match="differs"):
        pool.check([])
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)
