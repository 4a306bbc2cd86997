"""Hidden states of a pass, layer after layer in one piece of memory.

Invariant: who reads them by address keeps this object, and with it the memory, alive; a tensor is made only
for who asks for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch


class Taps(Mapping[int, torch.Tensor]):
    """layer -> [rows, width] float32."""

    __slots__ = ("_at", "_layers", "_memory", "_shape", "_size")

    def __init__(self, layers: Sequence[int], memory: np.ndarray, rows: int, width: int) -> None:
        """memory: [layers x rows x width]."""
        self._layers, self._memory, self._shape, self._size = layers, memory, (rows, width), rows * width
        self._at: int = memory.__array_interface__["data"][0]  # `memory.ctypes.data` ten times as fast

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


def address_in(hidden: Mapping[int, torch.Tensor], layer: int) -> int:
    """Where the first row of a layer lies."""
    return hidden.address_of(layer) if isinstance(hidden, Taps) else hidden[layer].data_ptr()
