"""The KV cache's bookkeeping: which block belongs to whom. No tensors here.

A block holds `block_size` tokens and is counted by its holders. A full block may be *registered* under the
chained hash of its tokens; when its last holder lets go it stays findable until it is the least recently used
free block and is needed. Invariant: every block is either held (count > 0) or free, never both; free + used
== total.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block: its tokens and everything before them."""
    packed = b"".join(t.to_bytes(4, "little") for t in tokens)
    return hashlib.blake2b(parent + packed, digest_size=16).digest()


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        # least recently freed first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, the least recently used ones, or None if there are not enough."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._holders[block] = 1
        return blocks

    def hold(self, block: int) -> None:
        """One more holder: a sharer, or a prefix-cache hit on a free block."""
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer each. A sequence's tail is reused before its head, which is likelier shared."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} released more often than held"
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)  # nothing in it worth keeping: reuse it first

    def find(self, name: bytes) -> int | None:
        return self._by_hash.get(name)

    def register(self, block: int, name: bytes) -> None:
        """Make a full block findable. The first block of a name keeps it; an equal one stays private."""
        if name not in self._by_hash and block not in self._hash_of:
            self._by_hash[name] = block
            self._hash_of[block] = name

    def is_private(self, block: int) -> bool:
        """May its holder write to it? Not if others hold it or can find it: they read what it held before."""
        return self._holders[block] == 1 and block not in self._hash_of

    def _forget(self, block: int) -> None:
        name = self._hash_of.pop(block, None)
        if name is not None:
            del self._by_hash[name]

    def check(self, holdings: Sequence[Sequence[int]]) -> None:
        """Assert that the books balance against all sequences' block lists."""
        counts = [0] * self.num_blocks
        for blocks in holdings:
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "a block's count differs from the number of sequences that list it"
        assert all((self._holders[b] == 0) == (b in self._free) for b in range(self.num_blocks)), (
            "a block is both held and free"
        )
        assert self.num_free + self.num_used == self.num_blocks
        assert all(self._hash_of[b] == name for name, b in self._by_hash.items())
        assert len(self._by_hash) == len(self._hash_of)


def block_names(tokens: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Chained hashes of the full blocks of `tokens`, continuing those already known."""
    names = list(known)
    edges = range(len(names) * block_size, len(tokens) + 1, block_size)
    for start, end in pairwise(edges):
        names.append(chain_hash(names[-1] if names else b"", tokens[start:end]))
    return names
