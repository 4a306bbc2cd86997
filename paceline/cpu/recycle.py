"""Memory for what a pass puts out, used again: a fresh mapping of a megabyte and a half costs a fault for
every page, half a millisecond in all.

Invariant: memory is lent again only when no tensor refers to it any more, so an output stays what it was
however long it is kept.
"""

from __future__ import annotations

from sys import getrefcount

import numpy as np
import torch

KEPT = 2  # blocks: one is written while the last is read


def _num_references(blocks: list[np.ndarray], i: int) -> int:
    return getrefcount(blocks[i])


NOT_LENT = _num_references([np.empty(0, np.float32)], 0)  # by the list alone


class Recycled:
    """A tensor, like every view of it, refers to the block in which it lies: nothing has to be told when one
    is dropped.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] float32, of any content."""
        return torch.from_numpy(self.block(rows * columns).reshape(rows, columns))

    def block(self, size: int) -> np.ndarray:
        """[size] float32, of any content."""
        for i in range(len(self._blocks)):
            if _num_references(self._blocks, i) == NOT_LENT and len(self._blocks[i]) >= size:
                return self._blocks[i][:size]
        self._blocks = [*self._blocks, np.empty(size, np.float32)][-KEPT:]
        return self._blocks[-1][:size]
