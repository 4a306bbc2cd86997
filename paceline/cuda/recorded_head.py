"""What learned heads on a GPU share: drafts as CUDA graphs, and keys and values in blocks at fixed addresses.

Graphs are recorded for the shape of what they read, and for one memory of keys and values. A place is one
sequence's blocks; row i of it lies in slot blocks[i // 16] * 16 + i % 16. Where blocks run out the memory is
made anew, twice as large, and `generation` counts: what was recorded for the memory before is never replayed.
Invariant: a block belongs to one place, until that is gone; padding reads features that are zero and writes
to the last slot, which belongs to no place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch

from paceline.core.types import BLOCK_SIZE
from paceline.cuda.batch import Buffer
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.features import gather
from paceline.cuda.graphs import Graphs, Recording
from paceline.cuda.pick import Guessing
from paceline.cuda.weights import WeightReader
from paceline.heads.config import LayeredConfig
from paceline.loaders.head_files import Head

MOST_BYTES = 2**28  # of keys and values, to begin with
BEYOND = 256  # positions after the target's last: a draft may be longer than what is left of the context


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
        self, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, num_blocks: int
    ) -> None:
        """sizes: layers, KV heads, width of a head. num_blocks: the most needed; it may begin with fewer."""
        per_block = 2 * math.prod(sizes) * BLOCK_SIZE * dtype.itemsize
        self._sizes, self._dtype, self._device = sizes, dtype, device
        self.num_blocks, self.generation = max(1, min(num_blocks, MOST_BYTES // per_block)), 0
        self._free = list(range(self.num_blocks))
        self._data = self._memory()

    def _memory(self) -> torch.Tensor:
        layers, heads, dim = self._sizes
        shape = (layers, 2, self.num_blocks + 1, BLOCK_SIZE, heads, dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

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


class RecordedHead:
    """`prepare` of the subclass makes the passes of a shape and the buffer that they read."""

    def __init__(self, head: Head, decoder: CudaDecoder) -> None:
        self.device, self.decoder, self.dtype = decoder.device, decoder, decoder.weights.dtype
        ids = head.tensors.get("draft_ids")  # [words]: draft id -> target id
        self._ids = None if ids is None else ids.to(self.device, torch.int32).contiguous()
        self._eps, self._hidden_size = head.config.rms_eps, head.config.hidden_size
        self._graphs = Graphs(decoder.capture)
        self._zeros = self._empty(self._hidden_size).zero_()
        self.nowhere = self._zeros.data_ptr()  # address of features for rows that have none

    @property
    def generation(self) -> int:
        """A recording is good for one of them."""
        return 0

    def can_guess(self, temperature: float) -> bool:
        return True

    def prepare(self, shape: Any) -> tuple[Callable[[], Any], Buffer]:
        """What launches the passes of a shape, and what they read."""
        raise NotImplementedError

    def _recorded(self, shape: Hashable) -> tuple[Recording, Buffer]:
        return self._graphs.get((shape, self.generation), partial(self.prepare, shape))

    def _launch(self, shape: Hashable, values: Mapping[str, Any], is_recorded: bool) -> Any:
        """The outputs of the passes; what was recorded overwrites them in the next call."""
        if is_recorded:
            recording, buffer = self._recorded(shape)
            buffer.fill(values)
            recording.replay()
            return recording.outputs
        run, buffer = self.prepare(shape)
        buffer.fill(values)
        return run()

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _gathered(self, addresses: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
        """[T, parts] -> [T, parts * hidden]: features, normed if there is a norm."""
        out = self._empty(len(addresses), addresses.shape[1] * self._hidden_size)
        gather(addresses, norm, self._eps, out)
        return out

    def _guessing(self, at: Mapping[str, torch.Tensor]) -> Guessing:
        return Guessing(at["temperatures"], at["seeds"], at["places"], self._ids)


class CachedHead(RecordedHead):
    """A head with layers that attend."""

    def __init__(
        self, head: Head, decoder: CudaDecoder, num_blocks: int, reader: WeightReader, prefixes: list[str]
    ) -> None:
        """prefixes: of the names of each layer's tensors."""
        super().__init__(head, decoder)
        config = head.config
        assert isinstance(config, LayeredConfig)
        rotary = reader.rotary(config.rope, config.head_dim, decoder.config.max_context + BEYOND)
        self._layers = [reader.layer(prefix, rotary, config.rms_eps) for prefix in prefixes]
        self._scale = config.head_dim**-0.5
        sizes = (len(prefixes), config.num_kv_heads, config.head_dim)
        self._cache = HeadCache(sizes, self.dtype, self.device, num_blocks)
        self.place, self.fork = self._cache.place, self._cache.fork

    @property
    def generation(self) -> int:
        return self._cache.generation
