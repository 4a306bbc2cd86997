"""Memory for logits, used again: a fresh mapping of a megabyte and a half costs a fault for every page, half a millisecond in all.

Invariant: memory is lent again only when no tensor refers to it any more, so an output stays what it was however long it is kept.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch

KEPT = 2  # blocks: one is written while the last is read


class Recycled:
    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._returned: deque[np.ndarray] = deque()  # any thread may drop the last reference, so this is all that the dropping does

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] float32, of any content."""
        size = rows * columns
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free = sorted(self._free, key=len)[-KEPT:]  # the largest fit most
        fitting = next((i for i, block in enumerate(self._free) if len(block) >= size), None)
        block = np.empty(size, np.float32) if fitting is None else self._free.pop(fitting)
        view = block[:size].reshape(rows, columns)
        weakref.finalize(view, self._returned.append, block).atexit = False
        return torch.from_numpy(view)
