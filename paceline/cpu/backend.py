"""The CPU's backend: numba kernels for the decoder, the heads, top-k and bursts of one greedy request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.cpu.block_head import BlockHead
from paceline.cpu.burst import LONGEST, CpuBurstBackend
from paceline.cpu.chain_head import ChainHead
from paceline.cpu.compile import compile_beside
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.medusa import MedusaHead
from paceline.cpu.parallel import CpuGroup
from paceline.cpu.top import top
from paceline.heads.config import DflashConfig, LayeredConfig, MedusaConfig
from paceline.loaders.head_files import HeadInput
from paceline.models.attention import FLOATS, KvFormat
from paceline.models.quantize import bits_of


class CpuBackend:
    device, is_async = torch.device("cpu"), False
    num_recordings = 0
    most_drafted = most_matched = 1 << 30

    def __init__(self, use_cache: bool = True, group: CpuGroup | None = None) -> None:
        """use_cache: keep packed weights on disk; group: the ranks that run what it loads together."""
        self._use_cache, self._group = use_cache, group

    def check_dtype(self, dtype: str) -> None:
        bits_of(dtype)

    def default_dtype(self, source: Any) -> str:
        return "int8"

    def kv_format(self, dtype: str, asked: str) -> KvFormat:
        """As exact as the pass: a quantized model's keys and values are integers, as its weights are."""
        if asked not in ("auto", "int8"):
            raise ConfigError(f"kv_cache_dtype is {asked!r}; choose auto or int8")
        is_integer = bits_of(dtype) < 32
        if asked == "int8" and not is_integer:
            remedy = "on a CPU choose dtype int8 or int4, or leave it out"
            raise ConfigError(f"kv_cache_dtype is 'int8' and the weights are float32; {remedy}")
        return KvFormat(torch.int8, torch.int8, has_value_scales=False) if is_integer else FLOATS

    def load(self, source: Any, dtype: str, context: int | None = None) -> CpuDecoder:
        # what drafts of the default model run, while the decoder's own pass is compiled here
        names = "votes.draft", "chain_head.draft_chains", "burst_kernel.run_burst", "draw.draw_rows"
        if source.config.has_embedding and (self._group is None or self._group.shard.rank == 0):
            compile_beside(*names)
        return CpuDecoder.load(source, dtype, context, self._use_cache, self._group)

    def record(self, *_: Any) -> None:
        """There is nothing to record."""

    def chain_head(self, given: HeadInput) -> ChainHead:
        assert isinstance(given.head.config, LayeredConfig)
        return ChainHead(given.head.config, given.head.tensors, given.decoder, given.norm)

    def block_head(self, given: HeadInput) -> BlockHead:
        assert isinstance(given.head.config, DflashConfig)
        return BlockHead(given.head.config, given.head.tensors, given.decoder)

    def side_heads(self, given: HeadInput) -> MedusaHead:
        assert isinstance(given.head.config, MedusaConfig)
        assert given.norm is not None
        return MedusaHead(given.head.config, given.head.tensors, given.norm)

    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        return top(logits, k)

    def burst(
        self, decoder: CpuDecoder, kv: Sequence[Any], head: Any, length: int, _trees: Any = ()
    ) -> CpuBurstBackend | None:
        """head: a ChainHead of ours, or None. It drafts no trees."""
        is_whole = decoder.config.has_embedding and decoder.config.has_head
        is_drafted = head is None or 0 < length <= LONGEST
        if not is_whole or not is_drafted or decoder.config.recurrent is not None:
            return None
        return CpuBurstBackend(head, decoder, kv)
