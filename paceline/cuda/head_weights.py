"""A learned head's weights on a GPU, as the decoder's are: matrices in the dtype of the target's activations,
norms in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from paceline.cuda.linear import pack
from paceline.cuda.weights import Layer, Matrix
from paceline.heads.config import LayeredConfig
from paceline.models.rope import RotaryTables, rotary_tables

if TYPE_CHECKING:
    from paceline.cuda.decoder import CudaDecoder

BEYOND = 256  # positions after the target's last: a draft may be longer than what is left of the context


class HeadReader:
    def __init__(self, tensors: Mapping[str, torch.Tensor], decoder: CudaDecoder) -> None:
        self._tensors, self.device, self.dtype = tensors, decoder.device, decoder.weights.dtype
        self._context = decoder.config.max_context + BEYOND

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._tensors

    def norm(self, name: str) -> torch.Tensor:
        return self._tensors[f"{name}.weight"].to(self.device, torch.float32).contiguous()

    def norm_if_any(self, name: str) -> torch.Tensor | None:
        return self.norm(name) if self.has(name) else None

    def table(self, name: str) -> torch.Tensor:
        return self._tensors[f"{name}.weight"].to(self.device, self.dtype).contiguous()

    def matrix(self, *names: str) -> Matrix:
        """One matrix from the rows of several."""
        weight = torch.cat([self.table(name) for name in names])
        biases = [
            self._tensors[f"{name}.bias"].to(self.device, self.dtype)
            for name in names
            if f"{name}.bias" in self._tensors
        ]
        return Matrix(pack(weight, 16), torch.cat(biases) if biases else None, is_exact=False)

    def ids(self) -> torch.Tensor | None:
        """[words] int32: draft id -> target id."""
        ids = self._tensors.get("draft_ids")
        return None if ids is None else ids.to(self.device, torch.int32).contiguous()

    def layers(self, config: LayeredConfig, prefixes: list[str]) -> list[Layer]:
        found = rotary_tables(config.rope, config.head_dim, self._context)
        tables = RotaryTables(*(table.to(self.device).contiguous() for table in found))
        return [self._layer(prefix, tables, config.hidden_size) for prefix in prefixes]

    def _layer(self, prefix: str, tables: RotaryTables, hidden: int) -> Layer:
        before, attention, mlp = f"{prefix}input_layernorm", f"{prefix}self_attn.", f"{prefix}mlp."
        return Layer(
            attention_norm=self.norm(before) if self.has(before) else torch.ones(hidden, device=self.device),
            qkv=self.matrix(*(f"{attention}{name}_proj" for name in "qkv")),
            q_norm=self.norm_if_any(f"{attention}q_norm"),
            k_norm=self.norm_if_any(f"{attention}k_norm"),
            tables=tables,
            window=None,
            out=self.matrix(f"{attention}o_proj"),
            after_attention=None,
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm"),
            gate_up=self.matrix(f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self.matrix(f"{mlp}down_proj"),
            after_mlp=None,
        )
