"""The arrays of a suffix tree, which kernels fill (suffixes.py has the layout), and how they grow."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from paceline.cpu import suffixes
from paceline.cpu.recycle import address
from paceline.cpu.suffixes import Arrays

SLOT_BYTES = 8 * 4 + 2 * 4 + 4  # of a node, its two places in the hash table, and a token of text
FIRST_SIZE = 1024  # slots


class SuffixTree:
    """Counts of all strings up to a depth in the newest text it was shown.

    Invariant: it never holds more than `max_bytes` (`num_bytes` says how many it does). Until then it grows;
    after that the oldest tokens are forgotten, one for each that comes. A token costs at most `depth` steps.
    """

    def __init__(self, depth: int, max_bytes: int) -> None:
        self.max_size = 1 << (max_bytes // SLOT_BYTES).bit_length() - 1
        assert self.max_size >= (depth + 2) ** 2, "a tree holds at least the last `depth` tokens"
        root, empty = np.zeros((1, 8), np.int32), np.full(1, suffixes.SEPARATOR, np.int32)
        root[0, suffixes.WHERE] = -1
        state, active = np.zeros(5, np.int64), np.zeros(depth, np.int32)
        self.arrays = Arrays(root, np.zeros(2, np.int32), empty, state, active)
        self._resize(min(FIRST_SIZE, self.max_size))

    @property
    def num_bytes(self) -> int:
        return self.size * SLOT_BYTES

    @property
    def num_pushed(self) -> int:
        """Tokens and ends of texts so far, forgotten ones too."""
        return int(self.arrays.state[suffixes.END])

    @property
    def num_held(self) -> int:
        return self.num_pushed - int(self.arrays.state[suffixes.BEGIN])

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        left = array("i", tokens)
        while True:
            num_taken = suffixes.extend(self.at, left.buffer_info()[0], len(left))
            if num_taken == len(left):
                return
            left = left[num_taken:]
            self.grow()

    def close(self, begin: int = 0) -> None:
        """The text is complete, and what comes next is another. All that began before `begin`, as
        `num_pushed` counts, is forgotten."""
        suffixes.close(self.at, begin)

    def grow(self) -> None:
        self._resize(2 * self.size)

    def _resize(self, size: int) -> None:
        old = self.arrays
        nodes, table = np.zeros((size, 8), np.int32), np.zeros(2 * size, np.int32)
        self.arrays = Arrays(nodes, table, np.empty(size, np.int32), old.state, old.active)
        suffixes.move(*self.arrays[:4], old.nodes, old.text)
        self._header = header_of(self.arrays, size, len(old.active), size < self.max_size)
        self.at = self._header.buffer_info()[0]  # what kernels are given
        self.size = size


def header_of(arrays: Iterable[np.ndarray], *sizes: int) -> array[int]:
    """What a kernel is given the address of (`buffer_info()[0]`): where the arrays lie, and their sizes."""
    return array("q", [*(address(each) for each in arrays), *sizes])
