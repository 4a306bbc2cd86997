"""Paged K/V of one model, the driver's side: which slots hold which tokens. No tensors (see kv_memory.py).

A sequence's token at index i lives in slot `blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE`. During a
pass the nodes of a tree take the slots after the cached tokens in node order; `commit` moves the accepted
path into place and gives the rest back. Moves are written down here and travel with the next batch.
Invariant: slots at or beyond `num_cached` hold nothing anyone may read; shared blocks are copied before a
write.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import BLOCK_SIZE, Cached, Moves
from paceline.runtime.block_pool import BlockPool, block_names, chain_hash


class KvCache:
    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self._moves: dict[int, int] = {}  # target slot -> the slot whose value before any of them it gets

    def take_moves(self) -> Moves | None:
        """What the next pass must copy first; the caller sees to it."""
        moves, self._moves = self._moves, {}
        return Moves(list(moves.values()), list(moves)) if moves else None

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies as if done now, one call after the other: a slot that is itself to be overwritten is read
        where its new value comes from.
        """
        found = [self._moves.get(source, source) for source in sources]
        self._moves.update(zip(targets, found, strict=True))

    def slots(self, cached: Cached, start: int, end: int) -> list[int]:
        return [cached.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]

    def reserve(self, cached: Cached, num_tokens: int) -> bool:
        """Make slots [num_cached, num_tokens) writable for this sequence alone. False, and nothing changed,
        if blocks run out.
        """
        first, blocks = cached.num_cached // BLOCK_SIZE, cached.blocks
        has_room = num_tokens <= len(blocks) * BLOCK_SIZE == (first + 1) * BLOCK_SIZE
        if has_room and self.pool.is_private(blocks[first]):
            return True  # nearly always: there is room in the last block
        shared = [i for i in range(first, len(blocks)) if not self.pool.is_private(blocks[i])]
        num_new = -(-num_tokens // BLOCK_SIZE) - len(blocks)
        fresh = self.pool.allocate(max(num_new, 0) + len(shared))
        if fresh is None:
            return False
        for i in shared:
            source, copy = blocks[i], fresh.pop()
            inside = range(BLOCK_SIZE)
            self._move([source * BLOCK_SIZE + i for i in inside], [copy * BLOCK_SIZE + i for i in inside])
            blocks[i] = copy
            self.pool.release([source])
        blocks.extend(fresh)
        return True

    def commit(
        self, cached: Cached, first: int, path: Sequence[int], tokens: Sequence[int], has_more: bool = False
    ) -> None:
        """The accepted nodes of a tree rooted at index `first` become tokens first, first + 1, ...; the rest
        is given back, unless a pass that is under way writes to it. tokens: for naming full blocks.
        """
        self.gather(cached, first, path)
        num_full = cached.num_cached // BLOCK_SIZE
        if not has_more and len(cached.blocks) * BLOCK_SIZE >= cached.num_cached + BLOCK_SIZE:
            self.trim(cached)
        if num_full > len(cached.block_hashes):
            self.register(cached, tokens[: cached.num_cached])

    def gather(self, cached: Cached, first: int, path: Sequence[int]) -> None:
        """Move the nodes on a path into place, one after the other from index `first` on."""
        if path and path[-1] != len(path) - 1:  # else all are in place: nodes of a path rise
            slots = self.slots(cached, first, first + path[-1] + 1)
            moved = [(slots[node], slots[i]) for i, node in enumerate(path) if node != i]
            self._move([source for source, _ in moved], [target for _, target in moved])
        cached.num_cached = first + len(path)

    def trim(self, cached: Cached) -> None:
        """Give back the blocks beyond the cached tokens."""
        keep = -(-cached.num_cached // BLOCK_SIZE)
        if keep < len(cached.blocks):
            self.pool.release(cached.blocks[keep:])
            del cached.blocks[keep:]

    def rewind(self, cached: Cached, num_cached: int) -> None:
        """Forget the tokens from `num_cached` on: what a drafter does with the ones that were rejected."""
        cached.num_cached = min(cached.num_cached, num_cached)
        del cached.block_hashes[cached.num_cached // BLOCK_SIZE :]
        self.trim(cached)

    def free(self, cached: Cached) -> None:
        self.pool.release(cached.blocks)
        cached.blocks.clear()
        cached.block_hashes.clear()
        cached.num_cached = 0

    def adopt_prefix(self, cached: Cached, tokens: Sequence[int]) -> int:
        """Start with the longest known prefix of `tokens` in whole blocks, the last token left to compute."""
        assert not cached.blocks, "only a sequence without blocks can adopt a prefix"
        for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE):
            before = cached.block_hashes[-1] if cached.block_hashes else b""
            name = chain_hash(before, tokens[start : start + BLOCK_SIZE])
            block = self.pool.find(name)
            if block is None:
                break
            self.pool.hold(block)
            cached.blocks.append(block)
            cached.block_hashes.append(name)
        cached.num_cached = len(cached.blocks) * BLOCK_SIZE
        return cached.num_cached

    def fork(self, source: Cached, target: Cached, num_tokens: int) -> None:
        """`target` shares the first tokens of `source`, the last block too if it is only part full."""
        assert not target.blocks
        assert num_tokens <= source.num_cached
        target.blocks.extend(source.blocks[: -(-num_tokens // BLOCK_SIZE)])
        for block in target.blocks:
            self.pool.hold(block)
        target.block_hashes.extend(source.block_hashes[: num_tokens // BLOCK_SIZE])
        target.num_cached = num_tokens

    def register(self, cached: Cached, tokens: Sequence[int]) -> None:
        """Make the full blocks of `tokens`, whose K/V are in place, findable by others with that prefix."""
        known = len(cached.block_hashes)
        if len(tokens) // BLOCK_SIZE == known:
            return
        cached.block_hashes[:] = block_names(tokens, BLOCK_SIZE, cached.block_hashes)
        for block, name in zip(cached.blocks[known:], cached.block_hashes[known:], strict=False):
            self.pool.register(block, name)
