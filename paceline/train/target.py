"""The target as a teacher: a plain batched forward over whole sequences that gives hidden states and logits,
and keeps no gradients.

Sequences are filled up on the right, so causal attention needs no other mask. The same arithmetic as
models/decoder.py for every family; on a GPU in bfloat16. Invariant: nothing here is trained.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch.nn import functional

from paceline.loaders.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.rope import RotaryTables, rotary_tables, rotate

Weights = dict[str, torch.Tensor]


class Seen(NamedTuple):
    """What the target shows of a batch."""

    taps: torch.Tensor  # [B, S, taps * hidden]: the residual stream after those layers, side by side
    last: torch.Tensor  # [B, S, hidden]: after the last layer, before the final norm


class Target:
    def __init__(
        self, config: ModelConfig, weights: Weights, tables: RotaryTables, local_tables: RotaryTables
    ) -> None:
        self.config, self.weights = config, weights
        self.tables, self.local_tables = tables, local_tables

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, max_length: int) -> Self:
        config = checkpoint.config
        length = min(max_length, config.max_context)
        weights = {name: checkpoint.tensor(name).to(device, dtype) for name in config.weight_names()}
        tables, local = (
            RotaryTables(*(t.to(device) for t in rotary_tables(rope, config.head_dim, length)))
            for rope in (config.rope, config.rope_local or config.rope)
        )
        return cls(config, weights, tables, local)

    @property
    def embedding(self) -> torch.Tensor:
        return self.weights["embed_tokens.weight"]

    @property
    def head(self) -> torch.Tensor:
        return self.embedding if self.config.tie_embeddings else self.weights["lm_head.weight"]

    @property
    def norm(self) -> torch.Tensor:
        return self.weights["norm.weight"]

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(ids, self.embedding)
        return x if self.config.embed_scale == 1.0 else x * self.config.embed_scale

    @torch.no_grad()
    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream after the last layer -> what the output layer reads."""
        return functional.rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.rms_eps)

    @torch.no_grad()
    def read(self, ids: torch.Tensor, taps: tuple[int, ...]) -> Seen:
        """ids [B, S]."""
        config, kept = self.config, {}
        x = self.embed(ids)
        for i in range(config.num_layers):
            if i in taps:
                kept[i] = x
            x = self._layer(i, x)
        kept[config.num_layers] = x
        features = torch.cat([kept[tap] for tap in taps], -1) if taps else x.new_empty((*ids.shape, 0))
        return Seen(features, x)

    def _layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        config, w, prefix = self.config, self.weights, f"layers.{index}."

        def norm(y: torch.Tensor, name: str) -> torch.Tensor:
            return functional.rms_norm(y, y.shape[-1:], w[f"{prefix}{name}.weight"], config.rms_eps)

        before_mlp = "pre_feedforward_layernorm" if config.sandwich_norm else "post_attention_layernorm"
        added = self._attend(index, norm(x, "input_layernorm"))
        x = x + (norm(added, "post_attention_layernorm") if config.sandwich_norm else added)
        y = norm(x, before_mlp)
        gate = functional.linear(y, w[f"{prefix}mlp.gate_proj.weight"])
        gate = (
            functional.silu(gate)
            if config.activation == "silu"
            else functional.gelu(gate, approximate="tanh")
        )
        added = functional.linear(
            gate * functional.linear(y, w[f"{prefix}mlp.up_proj.weight"]), w[f"{prefix}mlp.down_proj.weight"]
        )
        return x + (norm(added, "post_feedforward_layernorm") if config.sandwich_norm else added)

    def _attend(self, index: int, x: torch.Tensor) -> torch.Tensor:
        config, w, prefix = self.config, self.weights, f"layers.{index}.self_attn."
        is_local = config.is_local(index)

        def project(name: str, heads: int) -> torch.Tensor:  # -> [B, S, heads, dim]
            y = functional.linear(x, w[f"{prefix}{name}_proj.weight"], w.get(f"{prefix}{name}_proj.bias"))
            y = y.view(*x.shape[:2], heads, config.head_dim)
            if config.qk_norm and name != "v":
                y = functional.rms_norm(y, y.shape[-1:], w[f"{prefix}{name}_norm.weight"], config.rms_eps)
            return y

        q, k, v = (
            project("q", config.num_heads),
            project("k", config.num_kv_heads),
            project("v", config.num_kv_heads),
        )
        q, k = (turned(y, self.local_tables if is_local else self.tables) for y in (q, k))
        window = config.sliding_window if is_local else None
        out = causal(q, k, v, config.scale, window)
        return functional.linear(out, w[f"{prefix}o_proj.weight"])


def turned(x: torch.Tensor, tables: RotaryTables, shift: int = 0) -> torch.Tensor:
    """x [B, S, heads, dim] at positions shift .. shift + S - 1."""
    batch, length = x.shape[:2]
    cos, sin = (table[shift : shift + length].to(x.dtype).repeat(batch, 1) for table in tables)
    return rotate(x.flatten(0, 1), cos, sin).view_as(x)


def causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """[B, S, heads, dim] each, keys and values of fewer heads -> [B, S, heads * dim]."""
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    q, k, v = q.transpose(1, 2), *(y.transpose(1, 2).repeat_interleave(group, 1) for y in (k, v))
    options: dict[str, Any] = {"is_causal": True}
    if window is not None and window < length:
        back = torch.arange(length, device=q.device)
        back = back[:, None] - back
        options = {"attn_mask": (back >= 0) & (back < window)}
    return functional.scaled_dot_product_attention(q, k, v, scale=scale, **options).transpose(1, 2).flatten(2)
