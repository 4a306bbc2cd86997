"""A suffix tree of bounded size: counts of all strings up to a depth in the newest text it was shown.

Invariant: it never holds more than `max_bytes` (`num_bytes` says how many it does). Until then it grows; after that the oldest tokens
are forgotten, one for each that comes. Each token costs at most `depth` steps, however much is held. See cpu/suffixes.py for the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.cpu import suffixes

SLOT_BYTES = 8 * 4 + 2 * 4 + 4  # of a node, its two places in the hash table, and a token of text
FIRST_SIZE = 1024  # slots


class Arrays(NamedTuple):
    """What the kernels read and write."""

    nodes: np.ndarray  # [size, 8] int32
    slots: np.ndarray  # [2 * size] int32: nodes by hash of parent and token
    text: np.ndarray  # [size] int32: a ring
    state: np.ndarray  # [5] int64
    active: np.ndarray  # [depth] int32: nodes of the last tokens that occurred before, longest first


class SuffixTree:
    def __init__(self, depth: int, max_bytes: int) -> None:
        self.max_size = 1 << (max_bytes // SLOT_BYTES).bit_length() - 1
        assert self.max_size >= (depth + 2) ** 2, "a tree holds at least the last `depth` tokens"
        root, empty = np.zeros((1, 8), np.int32), np.full(1, suffixes.SEPARATOR, np.int32)
        root[0, suffixes.WHERE] = -1
        self.arrays = Arrays(root, np.zeros(2, np.int32), empty, np.zeros(5, np.int64), np.zeros(depth, np.int32))
        self._grow(min(FIRST_SIZE, self.max_size))

    @property
    def num_bytes(self) -> int:
        return self.size * SLOT_BYTES

    @property
    def size(self) -> int:
        return len(self.arrays.nodes)

    @property
    def num_pushed(self) -> int:
        """Tokens and ends of texts so far, forgotten ones too."""
        return int(self.arrays.state[suffixes.END])

    @property
    def num_held(self) -> int:
        return self.num_pushed - int(self.arrays.state[suffixes.BEGIN])

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        left = np.array(tokens, np.int32)
        while True:
            may_grow = self.size < self.max_size
            num_taken = suffixes.extend(*self.arrays, left, may_grow)
            if num_taken == len(left):
                return
            left = left[num_taken:]
            self._grow(2 * self.size)

    def close(self, begin: int = 0) -> None:
        """The text is complete, and what comes next is another. All that began before `begin`, as `num_pushed` counts, is forgotten."""
        suffixes.close(*self.arrays, begin)

    def _grow(self, size: int) -> None:
        old = self.arrays
        self.arrays = Arrays(np.zeros((size, 8), np.int32), np.zeros(2 * size, np.int32), np.empty(size, np.int32), old.state, old.active)
        suffixes.move(*self.arrays[:4], old.nodes, old.text)
