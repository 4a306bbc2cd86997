"""The memory of a paged KV cache on one device: tensors, their sizes, and the copies a batch asks for.

Invariant: nothing but an executor holds one, so where K/V lie is one module's affair.
"""

from __future__ import annotations

import math
import mmap

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE, Moves
from paceline.models.config import ModelConfig
from paceline.models.kv_format import FLOATS, KvFormat, bytes_per_token, row_widths


def blocks_in(memory: int, config: ModelConfig, kept: KvFormat) -> int:
    """How many blocks fit into `memory` bytes."""
    per_block = BLOCK_SIZE * bytes_per_token(config, kept)
    if memory < per_block * 2:
        raise ConfigError(
            f"kv_cache_memory is {memory:,} bytes, two blocks take {2 * per_block:,}; give more"
        )
    return memory // per_block - 1  # one more is allocated, see KvMemory


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU pages that are mapped when first written: unused memory costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size].view(dtype).view(shape)


class KvMemory:
    def __init__(
        self, config: ModelConfig, num_blocks: int, device: torch.device | str = "cpu",
        kept: KvFormat = FLOATS,
    ) -> None:  # fmt: skip
        """There is one block more than is given out: rows that fill up a CUDA graph write to it."""
        self.num_blocks, self.kept = num_blocks, kept
        shape = (config.num_layers, (num_blocks + 1) * BLOCK_SIZE, config.num_kv_heads)
        of_keys, of_values = row_widths(config, kept)
        # both [layers, slots, KV heads, width]
        self.keys = _zeros((*shape, of_keys), torch.device(device), kept.keys)
        self.values = _zeros((*shape, of_values), torch.device(device), kept.values)
        self.device = self.keys.device
        self.layers = list(zip(self.keys, self.values, strict=True))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def apply(self, moves: Moves) -> None:
        for data in (self.keys, self.values):  # all are gathered before any is written
            data[:, moves.targets] = data[:, moves.sources]

    def touch(self, blocks: list[int]) -> None:
        """Write zeros there: memory that was never written may not be mapped, and its first use is slow."""
        for data in (self.keys, self.values):
            for block in blocks:
                data[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
