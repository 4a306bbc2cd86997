"""Versions of recurrent states, the driver's side: which sequence holds which slots. No tensors.

A recurrent layer sums up a text in one state, which cannot be cut as keys and values can: a pass leaves a
version after its last known row and after every drafted one, and `commit` keeps that of the last accepted.
Versions at the ends of full blocks stay findable by the block's name, as blocks do, until their slots are
needed. Invariant: a slot has a holder (a sequence, or a name) or is free; slot 0 is the state of no text.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import chain

from paceline.core.types import BLOCK_SIZE, Cached

EMPTY = 0


class States:
    def __init__(self, num_slots: int) -> None:
        assert num_slots > 2, "a sequence needs the state before a pass and the one after it"
        self._holders = [0] * num_slots
        self._free = list(range(num_slots - 1, EMPTY, -1))
        self._by_name: OrderedDict[bytes, int] = OrderedDict()  # least recently found first

    def reserve(self, cached: Cached, num_kept: int, snapshot: int | None) -> bool:
        """Slots for the rows of a pass that leave their states. snapshot: a known token after which it is
        kept, too, if there is room. False, and nothing changed, if slots run out."""
        missing = num_kept + 1 - len(cached.states) - (not cached.states)
        if not self._has(missing):
            return False
        if not cached.states:
            self._hold(cached, EMPTY)
        while len(cached.states) <= num_kept:
            self._hold(cached, self._take())
        if snapshot is not None and cached.snapshot is None and self._has(1):
            cached.snapshot = snapshot, self._take()
            self._holders[cached.snapshot[1]] += 1
        return True

    def _has(self, count: int) -> bool:
        """Whether this number of slots is free, or held by a name alone."""
        held = 0 if count <= len(self._free) else sum(self._holders[s] == 1 for s in self._by_name.values())
        return count <= len(self._free) + held

    def commit(self, cached: Cached, first: int, path: Sequence[int]) -> None:
        """The state after the last accepted node is the text's; those after full blocks are named. first: the
        index of the root among the tokens."""
        if cached.snapshot is not None and cached.snapshot[0] <= first:
            self._name(cached, *cached.snapshot)
            self._release(cached.snapshot[1])
            cached.snapshot = None
        for i, node in enumerate(path):
            self._name(cached, first + i, cached.states[1 + node])
        kept = cached.states.pop(1 + path[-1])
        for slot in cached.states:  # one that has a name now must not be written again
            self._release(slot)
        cached.states = [kept]

    def _name(self, cached: Cached, index: int, slot: int) -> None:
        """A version after the last token of a full block can be found by others; the first keeps the name."""
        if (index + 1) % BLOCK_SIZE == 0 and index // BLOCK_SIZE < len(cached.block_hashes):
            name = cached.block_hashes[index // BLOCK_SIZE]
            if name not in self._by_name:
                self._by_name[name] = slot
                self._holders[slot] += 1

    def find(self, name: bytes) -> bool:
        return name in self._by_name

    def adopt(self, cached: Cached, name: bytes) -> None:
        """Go on from a named version, which is only read."""
        self._by_name.move_to_end(name)
        self._hold(cached, self._by_name[name])

    def free(self, cached: Cached) -> None:
        if cached.snapshot is not None:
            self._release(cached.snapshot[1])
            cached.snapshot = None
        while cached.states:
            self._release(cached.states.pop())

    def _hold(self, cached: Cached, slot: int) -> None:
        self._holders[slot] += 1
        cached.states.append(slot)

    def _take(self) -> int:
        """A free slot, or that of the name that was found longest ago."""
        if not self._free:
            name = next(name for name, slot in self._by_name.items() if self._holders[slot] == 1)
            self._release(self._by_name.pop(name))
        return self._free.pop()

    def _release(self, slot: int) -> None:
        self._holders[slot] -= 1
        assert self._holders[slot] >= 0, f"state {slot} released more often than held"
        if slot != EMPTY and not self._holders[slot]:
            self._free.append(slot)

    def check(self, holdings: Sequence[Cached]) -> None:
        """Assert that the books balance against all sequences."""
        kept = [[cached.snapshot[1]] for cached in holdings if cached.snapshot is not None]
        counts = Counter(chain(*(cached.states for cached in holdings), *kept, self._by_name.values()))
        assert [counts[slot] for slot in range(len(self._holders))] == self._holders, "states are miscounted"
        free = {slot for slot, held in enumerate(self._holders) if not held and slot != EMPTY}
        assert free == set(self._free), "a state is both held and free"
