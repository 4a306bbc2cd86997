"""The books of the KV cache alone: who holds a block, names, least-recently-used reuse."""

from __future__ import annotations

import pytest

from paceline.core.types import BLOCK_SIZE, Cached
from paceline.runtime.kv_cache import KvCache, block_names


def written(kv: KvCache, tokens: list[int]) -> Cached:
    """A sequence whose tokens have been computed."""
    cached = Cached()
    assert kv.reserve(cached, len(tokens))
    kv.commit(cached, 0, range(len(tokens)), tokens)
    return cached


def block_of(token: int) -> list[int]:
    return [token] * BLOCK_SIZE


def finds(kv: KvCache, token: int) -> bool:
    """Is there a block of this token alone?"""
    cached = Cached()
    kv.adopt_prefix(cached, [*block_of(token), 0])
    found = bool(cached.blocks)
    kv.free(cached)
    return found


def test_blocks_are_held_by_counts_and_come_back() -> None:
    kv = KvCache(4)
    one, other = written(kv, [1] * 33), Cached()
    assert not kv.reserve(Cached(), 2 * BLOCK_SIZE)
    kv.fork(one, other, BLOCK_SIZE)
    kv.free(one)
    assert (kv.num_used, kv.num_free) == (1, 3)
    kv.check([other])
    kv.free(other)
    kv.check([])


def test_a_freed_block_is_found_by_name_until_it_is_needed() -> None:
    kv = KvCache(2)
    first = written(kv, block_of(1))
    (block,) = first.blocks
    kv.free(first)
    assert finds(kv, 1)
    other = Cached()
    assert kv.reserve(other, 1)
    assert other.blocks != [block], "the unnamed one goes first"
    assert finds(kv, 1)
    assert kv.reserve(other, BLOCK_SIZE + 1)
    assert other.blocks[1] == block
    assert not finds(kv, 1)


def test_the_least_recently_used_name_is_forgotten_first() -> None:
    kv = KvCache(3)
    sequences = [written(kv, block_of(token)) for token in range(3)]
    for index in (1, 0, 2):
        kv.free(sequences[index])
    assert kv.reserve(Cached(), 1)
    assert [finds(kv, token) for token in range(3)] == [True, False, True]


def test_names_depend_on_everything_before() -> None:
    one = list(block_names(list(range(33))))
    two = list(block_names([99, *range(1, 33)]))
    assert len(one) == 2
    assert one[0] != two[0]
    assert one[1] != two[1]
    assert list(block_names(list(range(33)), one[:1])) == one[1:]
    assert list(block_names(range(16))) != list(block_names(range(16)[::-1]))


def test_books_that_do_not_balance_are_seen() -> None:
    kv, cached = KvCache(2), Cached()
    assert kv.reserve(cached, 1)
    with pytest.raises(AssertionError, match="differs"):
        kv.check([])
    copy = Cached(list(cached.blocks))
    kv.free(cached)
    with pytest.raises(AssertionError, match="more often"):
        kv.free(copy)
