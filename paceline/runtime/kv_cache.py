"""Paged K/V of one model, the driver's side: which sequence holds which blocks. No tensors (see executor.py).

A sequence's token at index i lives in slot `blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE`. During a
pass the nodes of a tree take the slots after the cached tokens in node order; `commit` moves the accepted
path into place and gives the rest back. Moves are written down here and travel with the next batch.

A full block is named by the chained hash of its tokens. When the last sequence that holds it lets go it stays
findable until it is the least recently used free block and is needed. Invariant: a block is either held or
free; slots at or beyond `num_cached` hold nothing that may be read; shared blocks are copied before a write.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile

from paceline.core.types import BLOCK_SIZE, Cached, Moves
from paceline.runtime.states import States

# A block's name, the name before it and its tokens when it becomes findable; None for both when it is lost.
BlockEvent = tuple[bytes, bytes | None, Sequence[int] | None]


def block_names(tokens: Sequence[int], known: Sequence[bytes] = ()) -> Iterator[bytes]:
    """Of the full blocks of `tokens` after the known ones: each stands for its tokens and all before them."""
    name = known[-1] if known else b""
    for start in range(len(known) * BLOCK_SIZE, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        packed = array("I", tokens[start : start + BLOCK_SIZE]).tobytes()
        name = hashlib.blake2b(name + packed, digest_size=16).digest()
        yield name


def whole_blocks(tokens: Sequence[int]) -> int:
    """Tokens in the full blocks of a prompt that others may find: its last token is always computed."""
    return max(len(tokens) - 1, 0) // BLOCK_SIZE * BLOCK_SIZE


class KvCache:
    def __init__(self, num_blocks: int, num_states: int = 0) -> None:
        """num_states: slots for a model with recurrent layers."""
        self.num_blocks = num_blocks
        self.states = States(num_states) if num_states else None
        self._holders = [0] * num_blocks
        # least recently freed first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_name: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.events: list[BlockEvent] | None = None  # where a publisher reads them
        self._moves: dict[int, int] = {}  # target slot -> the slot whose value before any of them it gets

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take_moves(self) -> Moves | None:
        """What the next pass must copy first; the caller sees to it."""
        moves, self._moves = self._moves, {}
        return Moves(list(moves.values()), list(moves)) if moves else None

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies as if done now, one call after the other: a slot that is itself to be overwritten is read
        where its new value comes from."""
        found = [self._moves.get(source, source) for source in sources]
        self._moves.update(zip(targets, found, strict=True))

    def slots(self, cached: Cached, start: int, end: int) -> list[int]:
        return [cached.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]

    def _is_private(self, block: int) -> bool:
        """May its holder write to it? Not if others hold it or can find it: they read what it held before."""
        return self._holders[block] == 1 and block not in self._name_of

    def reserve(self, cached: Cached, num_tokens: int, num_nodes: int = 0) -> bool:
        """Make slots [num_cached, num_tokens) writable for this sequence alone, the last `num_nodes` of them
        for drafted tokens. False, and no block taken, if blocks or states run out."""
        if self.states is not None:
            known = num_tokens - num_nodes
            end = (known - 1) // BLOCK_SIZE * BLOCK_SIZE  # a prompt's next use leaves its last token out
            snapshot = end - 1 if end > cached.num_cached and known > cached.num_cached + 1 else None
            if not self.states.reserve(cached, 1 + num_nodes, snapshot):
                return False
        first, blocks = cached.num_cached // BLOCK_SIZE, cached.blocks
        has_room = num_tokens <= len(blocks) * BLOCK_SIZE == (first + 1) * BLOCK_SIZE
        if has_room and self._is_private(blocks[first]):
            return True  # nearly always: there is room in the last block
        shared = [i for i in range(first, len(blocks)) if not self._is_private(blocks[i])]
        num_new = max(-(-num_tokens // BLOCK_SIZE) - len(blocks), 0) + len(shared)
        if num_new > len(self._free):
            return False
        fresh = [self._free.popitem(last=False)[0] for _ in range(num_new)]
        for block in fresh:
            self._holders[block] = 1
            if block in self._name_of:
                del self._by_name[name := self._name_of.pop(block)]
                if self.events is not None:
                    self.events.append((name, None, None))
        for i in shared:
            source, copy = blocks[i], fresh.pop()
            inside = range(BLOCK_SIZE)
            self._move([source * BLOCK_SIZE + i for i in inside], [copy * BLOCK_SIZE + i for i in inside])
            blocks[i] = copy
            self._release([source])
        blocks.extend(fresh)
        return True

    def commit(
        self, cached: Cached, first: int, path: Sequence[int], tokens: Sequence[int], has_more: bool = False
    ) -> None:
        """The accepted nodes of a tree rooted at index `first` become tokens first, first + 1, ...; the rest
        is given back, unless a pass that is under way writes to it. tokens: for naming full blocks."""
        self.gather(cached, first, path)
        if not has_more and len(cached.blocks) * BLOCK_SIZE >= cached.num_cached + BLOCK_SIZE:
            self._trim(cached)
        if cached.num_cached // BLOCK_SIZE > len(cached.block_hashes):
            self.register(cached, tokens[: cached.num_cached])
        if self.states is not None and path:
            self.states.commit(cached, first, path)

    def gather(self, cached: Cached, first: int, path: Sequence[int]) -> None:
        """Move the nodes on a path into place, one after the other from index `first` on."""
        if path and path[-1] != len(path) - 1:  # else all are in place: nodes of a path rise
            slots = self.slots(cached, first, first + path[-1] + 1)
            moved = [(slots[node], slots[i]) for i, node in enumerate(path) if node != i]
            self._move([source for source, _ in moved], [target for _, target in moved])
        cached.num_cached = first + len(path)

    def _trim(self, cached: Cached) -> None:
        """Give back the blocks beyond the cached tokens."""
        keep = -(-cached.num_cached // BLOCK_SIZE)
        self._release(cached.blocks[keep:])
        del cached.blocks[keep:]

    def _release(self, blocks: Sequence[int]) -> None:
        """One holder fewer each. A sequence's tail is reused before its head, which is likelier shared."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} released more often than held"
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._name_of:
                    self._free.move_to_end(block, last=False)  # nothing in it worth keeping: reuse it first

    def rewind(self, cached: Cached, num_cached: int) -> None:
        """Forget the tokens from `num_cached` on: what a drafter does with the ones that were rejected."""
        if self.states is not None:
            assert num_cached == 0, "a recurrent state cannot be cut"
            self.states.free(cached)
        cached.num_cached = min(cached.num_cached, num_cached)
        del cached.block_hashes[cached.num_cached // BLOCK_SIZE :]
        self._trim(cached)

    def free(self, cached: Cached) -> None:
        self.rewind(cached, 0)

    def _share(self, cached: Cached, block: int) -> None:
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1
        cached.blocks.append(block)

    def adopt_prefix(self, cached: Cached, tokens: Sequence[int]) -> None:
        """Start with the longest known prefix of `tokens` in whole blocks, the last token left to compute."""
        assert not cached.blocks, "only a sequence without blocks can adopt a prefix"
        names = list(takewhile(self._by_name.__contains__, block_names(tokens[:-1])))
        if self.states is not None:
            while names and not self.states.find(names[-1]):
                names.pop()
            if names:
                self.states.adopt(cached, names[-1])
        for name in names:
            self._share(cached, self._by_name[name])
            cached.block_hashes.append(name)
        cached.num_cached = len(cached.blocks) * BLOCK_SIZE

    def num_known(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that would be found."""
        return BLOCK_SIZE * sum(1 for _ in takewhile(self._by_name.__contains__, block_names(tokens[:-1])))

    def fork(self, source: Cached, target: Cached, num_tokens: int) -> None:
        """`target` shares the first tokens of `source`, the last block too if it is only part full."""
        assert not target.blocks
        assert num_tokens <= source.num_cached
        for block in source.blocks[: -(-num_tokens // BLOCK_SIZE)]:
            self._share(target, block)
        target.block_hashes.extend(source.block_hashes[: num_tokens // BLOCK_SIZE])
        target.num_cached = num_tokens

    def register(self, cached: Cached, tokens: Sequence[int]) -> None:
        """Make the full blocks of `tokens`, whose K/V are in place, findable by others with that prefix. The
        first block of a name keeps it; an equal one stays private."""
        for name in block_names(tokens, cached.block_hashes):
            number = len(cached.block_hashes)
            block, before = cached.blocks[number], cached.block_hashes[-1] if number else b""
            cached.block_hashes.append(name)
            if name not in self._by_name and block not in self._name_of:
                self._by_name[name], self._name_of[block] = block, name
                if self.events is not None:
                    own = tokens[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
                    self.events.append((name, before, own))

    def check(self, holdings: Sequence[Cached]) -> None:
        """Assert that the books balance against all sequences."""
        counts = Counter(chain.from_iterable(cached.blocks for cached in holdings))
        is_counted = [counts[block] for block in range(self.num_blocks)] == self._holders
        assert is_counted, "a block's count differs from the number of sequences that list it"
        free = {block for block, held in enumerate(self._holders) if not held}
        assert free == set(self._free), "a block is both held and free"
        assert {block: name for name, block in self._by_name.items()} == self._name_of
        if self.states is not None:
            self.states.check(holdings)
