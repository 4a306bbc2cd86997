"""Where passes of a model run: in this process; and its paged KV cache's memory, which nothing else holds.

Target and draft models both have one. Invariant: moves that the driver has written down are applied before
the next pass reads or writes anything.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.core.batch import build
from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE, Batch, Burst, Cached, Moves, Output, PassSizes, Pick, Segment
from paceline.heads.rows import BurstBackend, BurstInput
from paceline.models.attention import FLOATS, KvFormat, LayerCache, bytes_per_token, row_widths
from paceline.models.config import ModelConfig, RecurrentConfig
from paceline.runtime.backend import Backend, Decoder
from paceline.runtime.kv_cache import KvCache, whole_blocks


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
        kept: KvFormat = FLOATS, num_states: int = 0,
    ) -> None:  # fmt: skip
        """There is one block more than is given out: rows that fill up a CUDA graph write to it. num_states:
        slots of each recurrent layer."""
        self.num_blocks, self.num_states = num_blocks, num_states
        layers = range(config.num_layers)
        # keys and values of each kind of layer: [layers, slots, KV heads, width]
        self.parts: list[torch.Tensor] = []
        of_kinds = []
        for kind, own in enumerate(config.kinds):
            count = sum(config.kind_of(i) == kind and not config.is_recurrent(i) for i in layers)
            shape = (count, (num_blocks + 1) * BLOCK_SIZE, own.num_kv_heads)
            widths = zip(row_widths(own, kept), (kept.keys, kept.values), strict=True)
            pair = [_zeros((*shape, width), torch.device(device), dtype) for width, dtype in widths]
            self.parts += pair
            of_kinds.append(zip(*pair, strict=True))
        self.device = self.parts[0].device
        self.layers: list[LayerCache] = [
            self._states(config.recurrent, num_states)
            if config.recurrent is not None and config.is_recurrent(i)
            else next(of_kinds[config.kind_of(i)])
            for i in layers
        ]

    def _states(self, sizes: RecurrentConfig, num: int) -> LayerCache:
        """A layer's: [slots, heads, key, value] and, for its convolution, [slots, kernel - 1, mixed]."""
        shapes = (sizes.value_heads, sizes.key_dim, sizes.value_dim), (sizes.kernel - 1, sizes.mixed_width)
        states, tails = (_zeros((num, *shape), self.device, torch.float32) for shape in shapes)
        return states, tails

    def apply(self, moves: Moves) -> None:
        for data in self.parts:  # all are gathered before any is written
            data[:, moves.targets] = data[:, moves.sources]

    def blocks(self) -> dict[str, torch.Tensor]:
        """[layers, blocks, BLOCK_SIZE, KV heads, width] each: keys and values of each kind of layer."""
        return {f"{i}": data.unflatten(1, (-1, BLOCK_SIZE)) for i, data in enumerate(self.parts)}

    def touch(self, blocks: list[int]) -> None:
        """Write zeros there: memory that was never written may not be mapped, and its first use is slow."""
        for data in self.parts:
            for block in blocks:
                data[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0


class LocalExecutor:
    num_ranks = num_stages = 1
    num_under_way = 1  # passes, each with its share of the requests

    def __init__(self, backend: Backend, decoder: Decoder, memory: KvMemory) -> None:
        self.backend, self.decoder, self.memory = backend, decoder, memory
        self.kv = KvCache(memory.num_blocks, memory.num_states)  # the driver's books of that memory

    @classmethod
    def load(
        cls, backend: Backend, source: Any, num_blocks: int, *, dtype: str = "", kv: str = "auto",
        context: int | None = None,
    ) -> LocalExecutor:  # fmt: skip
        """kv: the kv_cache_dtype asked for."""
        dtype = dtype or backend.default_dtype(source)
        decoder, kept = backend.load(source, dtype, context), backend.kv_format(dtype, kv)
        return cls(backend, decoder, KvMemory(source.config, num_blocks, backend.device, kept))

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def can_pick(self, pick: Pick) -> bool:
        return pick == Pick(pick.temperature, pick.seed) or self.decoder.picks_cuts

    def forward(
        self, segments: Sequence[Segment], *, num_layers: int | None = None,
        hidden_layers: Sequence[int] = (), top_tokens: int = 0,
    ) -> Output:  # fmt: skip
        """Logits of the rows each segment asks for, in order. Stops after `num_layers` layers if given."""
        output = self.run(self._ready(segments), num_layers, hidden_layers)
        return output._replace(top=self.backend.top(output.logits, top_tokens)) if top_tokens else output

    def run(
        self, batch: Batch, num_layers: int | None, hidden_layers: Sequence[int],
        x: torch.Tensor | None = None,
    ) -> Output:  # fmt: skip
        """x: what enters a stage of a pipeline behind the first."""
        layers, more = self.memory.layers, dict[str, Any]() if x is None else {"x": x}
        return self.decoder.forward(batch, layers, num_layers=num_layers, hidden_layers=hidden_layers, **more)

    def apply(self, moves: Moves) -> None:
        self.memory.apply(moves)

    def burst(self, backend: BurstBackend, segments: Sequence[Segment], given: BurstInput) -> Burst:
        """Passes without the host. segments: the longest draft of each request, of which only the root is
        known; slots for all rounds are reserved."""
        return backend.launch(self._ready(segments), given)

    def _ready(self, segments: Sequence[Segment]) -> Batch:
        batch = build(segments, self.memory.device, self.kv.take_moves())
        if batch.moves is not None:
            self.apply(batch.moves)
        return batch

    def kept(self, count: int) -> dict[str, torch.Tensor]:
        """What `export` gives of so many tokens, without memory."""
        blocks = self.memory.blocks()
        return {
            name: torch.empty(data[:, : count // BLOCK_SIZE].shape, dtype=data.dtype, device="meta")
            for name, data in blocks.items()
        }

    def export(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """K/V of a prompt's whole blocks, if all of them are found; nothing else."""
        cached = Cached()
        self.kv.adopt_prefix(cached, tokens)
        try:
            if cached.num_cached < whole_blocks(tokens):
                return {}
            self._move()
            return {name: data[:, cached.blocks].cpu() for name, data in self.memory.blocks().items()}
        finally:
            self.kv.free(cached)

    def adopt(self, tokens: Sequence[int], parts: Mapping[str, torch.Tensor]) -> bool:
        """Such K/V become findable here; False if there is no room."""
        cached, count = Cached(), whole_blocks(tokens)
        self.kv.adopt_prefix(cached, tokens)
        first = len(cached.blocks)
        try:
            if not self.kv.reserve(cached, count):
                return False
            self._move()
            for name, data in self.memory.blocks().items():
                data[:, cached.blocks[first:]] = parts[name][:, first:].to(data.device)
            cached.num_cached = count
            self.kv.register(cached, tokens[:count])
        finally:
            self.kv.free(cached)
        return True

    def _move(self) -> None:
        """What is written down for the next pass, now: others look at the memory."""
        if (moves := self.kv.take_moves()) is not None:
            self.memory.apply(moves)

    def warm_up(self, top_tokens: int = 0) -> None:
        """One token through all layers: what is compiled or read lazily is done before a request waits."""
        cached = Cached()
        if self.kv.reserve(cached, 1):
            len(self.forward([Segment([0], cached, num_logits=1)], top_tokens=top_tokens).logits)
            self.kv.free(cached)

    def record(self, sizes: PassSizes, layers: Sequence[int] = (), depth: int | None = None) -> None:
        """All passes that will be asked for, where a device replays them."""
        self.backend.record(self.decoder, self.memory.layers, sizes, layers, depth)

    def close(self) -> None:
        """Whatever runs elsewhere ends."""
