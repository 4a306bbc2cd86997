"""The reference: every pass and head in plain torch on any device. Slow and readable: for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError
from paceline.heads.attending import TorchBlockHead, TorchChainHead
from paceline.heads.config import DflashConfig, LayeredConfig, MedusaConfig
from paceline.heads.rows import BlockBackend, ChainHead, SideBackend
from paceline.heads.torch_heads import TorchMedusaHead
from paceline.models.attention import FLOATS, KvFormat
from paceline.models.decoder import Decoder
from paceline.models.quantize import bits_of

if TYPE_CHECKING:
    from paceline.loaders.head_files import HeadInput
    from paceline.runtime.backend import LayerCache


class TorchBackend:
    default_dtype, is_async, num_recordings, most_drafted = "float32", False, 0, 1 << 30

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check_dtype(self, dtype: str) -> None:
        bits_of(dtype)

    def kv_format(self, dtype: str, asked: str) -> KvFormat:
        if asked != "auto":
            raise ConfigError(f"kv_cache_dtype is {asked!r}; the torch kernels keep float32, leave it out")
        return FLOATS

    def load(self, source: Any, dtype: str, context: int | None = None) -> Decoder:
        return Decoder.load(source, dtype=dtype, device=str(self.device), context=context)

    def chain_head(self, given: HeadInput) -> ChainHead:
        head, norm = given.head, given.norm
        assert isinstance(head.config, LayeredConfig)
        return TorchChainHead(head.config, dict(head.tensors), given.decoder, norm, self.device)

    def block_head(self, given: HeadInput) -> BlockBackend:
        assert isinstance(given.head.config, DflashConfig)
        return TorchBlockHead(given.head.config, given.head.tensors, given.decoder, self.device)

    def side_heads(self, given: HeadInput) -> SideBackend:
        assert isinstance(given.head.config, MedusaConfig)
        assert given.norm is not None
        return TorchMedusaHead(given.head.config, given.head.tensors, given.norm, self.device)

    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        return logits.argsort(dim=-1, descending=True, stable=True)[:, :k]

    def burst(self, decoder: Any, kv: Sequence[LayerCache], head: Any, length: int) -> None:
        return None
