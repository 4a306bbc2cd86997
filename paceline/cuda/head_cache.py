"""Keys and values of a learned head on a GPU, in blocks: the CUDA graphs of a head read and write them at
fixed addresses.

A place is one sequence's blocks; row i of it lies in slot blocks[i // 16] * 16 + i % 16. The last slot is
nobody's: padding writes there. Invariant: a block belongs to one place, until that is gone. Where blocks run
out the memory is made anew, twice as large, and `generation` counts: what was recorded for the memory before
is never replayed.
"""

from __future__ import annotations

import torch

from paceline.cuda.batch import BLOCK_SIZE

MOST_BYTES = 2**28  # to begin with


class PagedPlace:
    """The rows of one sequence."""

    __slots__ = ("_cache", "blocks")

    def __init__(self, cache: HeadCache) -> None:
        self._cache, self.blocks = cache, []  # type: HeadCache, list[int]

    def reserve(self, length: int) -> None:
        missing = -(-length // BLOCK_SIZE) - len(self.blocks)
        if missing > 0:
            self.blocks += self._cache.allocate(missing)

    def slot(self, at: int) -> int:
        return self.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE

    def slots(self, start: int, end: int) -> list[int]:
        return [self.slot(at) for at in range(start, end)]

    def __del__(self) -> None:
        self._cache.release(self.blocks)


class HeadCache:
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
    ) -> None:
        """num_blocks: as many as there may be use for; it begins with fewer if those are large."""
        per_block = 2 * num_layers * BLOCK_SIZE * num_kv_heads * head_dim * dtype.itemsize
        self._sizes, self._dtype, self._device = (num_layers, 2, num_kv_heads, head_dim), dtype, device
        self.num_blocks, self.generation = max(1, min(num_blocks, MOST_BYTES // per_block)), 0
        self._free = list(range(self.num_blocks))
        self._data = self._memory()

    def _memory(self) -> torch.Tensor:
        layers, two, heads, dim = self._sizes
        return torch.zeros(
            (layers, two, self.num_blocks + 1, BLOCK_SIZE, heads, dim), dtype=self._dtype, device=self._device
        )

    @property
    def trash_slot(self) -> int:
        return (self.num_blocks + 1) * BLOCK_SIZE - 1

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [slots, kv heads, dim] each."""
        keys, values = self._data[index].flatten(1, 2)
        return keys, values

    def place(self) -> PagedPlace:
        return PagedPlace(self)

    @torch.inference_mode()
    def fork(self, place: PagedPlace, length: int) -> PagedPlace:
        """Another sequence with the same first rows."""
        fresh = self.place()
        fresh.reserve(length)
        self._data[:, :, fresh.blocks] = self._data[:, :, place.blocks[: len(fresh.blocks)]]
        return fresh

    def allocate(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._grow()
        blocks, self._free = self._free[-count:], self._free[:-count]
        return blocks

    def release(self, blocks: list[int]) -> None:
        self._free += blocks

    def _grow(self) -> None:
        before, known = self._data, self.num_blocks
        self.num_blocks, self.generation = 2 * known, self.generation + 1
        self._free += range(known, self.num_blocks)
        self._data = self._memory()
        self._data[:, :, :known] = before[:, :, :known]
