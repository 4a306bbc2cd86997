"""Memory of passes, used again: fresh pages of a megabyte and a half cost half a millisecond.

Invariant: an output's memory is lent again only when no tensor refers to it any more, so it stays what it was
however long it is kept; a workspace never outlives the pass that asked for it but for the next to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import gt
from sys import getrefcount
from typing import Generic, TypeVar

import numpy as np
import torch

from paceline.models.quantize import padded

T = TypeVar("T")
EMPTY, ZEROS = partial(np.empty, dtype=np.float32), partial(np.zeros, dtype=np.uint8)
KEPT = 2  # blocks: one is written while the last is read


def _num_references(blocks: list[np.ndarray], i: int) -> int:
    return getrefcount(blocks[i])


NOT_LENT = _num_references([np.empty(0, np.float32)], 0)  # by the list alone


def address(memory: np.ndarray) -> int:
    """`memory.ctypes.data` ten times as fast."""
    found: int = memory.__array_interface__["data"][0]
    return found


class Recycled:
    """A tensor, like every view of it, refers to its block: nothing has to be told when one is dropped."""

    def __init__(self, empty: Callable[[int], np.ndarray] = EMPTY) -> None:
        """empty: fresh memory for that many floats."""
        self._blocks: list[np.ndarray] = []
        self._empty = empty

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] float32, of any content."""
        return torch.from_numpy(self.block(rows * columns).reshape(rows, columns))

    def block(self, size: int) -> np.ndarray:
        """[size] float32, of any content."""
        for i in range(len(self._blocks)):
            if _num_references(self._blocks, i) == NOT_LENT and len(self._blocks[i]) >= size:
                return self._blocks[i][:size]
        self._blocks = [*self._blocks, self._empty(size)][-KEPT:]
        return self._blocks[-1][:size]


class Workspace(Generic[T]):
    """Memory in which a pass computes: it grows to the largest pass seen."""

    def __init__(
        self, sizes: Callable[..., dict[str, int]], make: Callable[[dict[str, int]], T],
        zeros: Callable[[int], np.ndarray] = ZEROS,
    ) -> None:  # fmt: skip
        """sizes: bytes of each part by the key that `get` is given; make: what is made of their addresses;
        zeros: memory of that many bytes."""
        self._sizes, self._make, self._zeros = sizes, make, zeros
        self._key: tuple[int, ...] = ()
        self._memory = np.empty(0, np.uint8)
        self._made: T | None = None

    def get(self, *key: int) -> T:
        """Whose sizes are at least those of this key."""
        if self._made is None or any(map(gt, key, self._key)):
            self._key = tuple(map(max, key, self._key or key))
            sizes = self._sizes(*self._key)
            starts = np.cumsum([0, *(padded(size, 64) for size in sizes.values())]).tolist()
            self._memory = self._zeros(starts[-1] + 64)
            base = padded(self._memory.ctypes.data, 64)
            self._made = self._make({name: base + start for name, start in zip(sizes, starts, strict=False)})
        return self._made


class Taps(Mapping[int, torch.Tensor]):
    """Hidden states of a pass in one piece of memory: layer -> [rows, width] float32. A reader by address
    keeps this object, and with it the memory, alive; a tensor is made when one is asked for."""

    __slots__ = ("_at", "_layers", "_memory", "_shape", "_size")

    def __init__(self, layers: Sequence[int], memory: np.ndarray, rows: int, width: int) -> None:
        """memory: [layers x rows x width]."""
        self._layers, self._memory, self._shape, self._size = layers, memory, (rows, width), rows * width
        self._at = address(memory)

    def address_of(self, layer: int) -> int:
        return self._at + 4 * self._size * self._layers.index(layer)

    def __getitem__(self, layer: int) -> torch.Tensor:
        if layer not in self._layers:
            raise KeyError(layer)
        first = self._layers.index(layer) * self._size
        return torch.from_numpy(self._memory[first : first + self._size].reshape(self._shape))

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
