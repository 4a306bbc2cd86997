"""One decoder for all families, in plain torch: a stack of attention and MLP blocks described by ModelConfig.

The reference on the CPU, where paceline/cpu/ has the fast one with the same interface. Invariant: `forward`
depends on the batch and the caches alone; K/V of a row go to its slot and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, Self

import torch
from torch.nn import functional

from paceline.core.types import Batch, Output
from paceline.models.attention import Heads, LayerCache, TorchAttention, rms_norm
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.linear import Linear
from paceline.models.quantize import bits_of, head_bits
from paceline.models.rope import RotaryTables, rotary_tables

Progress = Callable[[int, int], None]  # layers done, layers in all


class Checkpoint(Protocol):
    @property
    def config(self) -> ModelConfig: ...
    def tensor(self, name: str) -> torch.Tensor: ...  # float32


class Layer(NamedTuple):
    attention_norm: torch.Tensor
    qkv: Linear
    heads: Heads
    out: Linear
    after_attention: torch.Tensor | None  # gemma: norms what a block adds
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    after_mlp: torch.Tensor | None


def _gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """[T, 2 * width] (gate, then up) -> [T, width]."""
    gate, up = x.chunk(2, -1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


class Decoder:
    """Built by `Decoder.load`."""

    def __init__(
        self, config: ModelConfig, embedding: Linear, layers: list[Layer], norm: torch.Tensor, head: Linear
    ) -> None:
        self.config = config
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        # of the weights; "int8" and "int4" round as the CPU kernels do, and save nothing
        dtype: str = "float32",
        device: str = "cpu",
        context: int | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Read every weight; positions from `context` on will not be asked for."""
        config = replace(
            checkpoint.config,
            max_context=min(checkpoint.config.max_context, context or checkpoint.config.max_context),
        )
        builder = _Builder(checkpoint, config, device, bits_of(dtype))
        layers = []
        for i in range(config.num_layers):
            layers.append(builder.layer(i))
            if progress is not None:
                progress(i + 1, config.num_layers)
        embedding = head = builder.linear("embed_tokens", bits=head_bits(builder.bits))
        if not config.tie_embeddings:
            head = builder.linear("lm_head", bits=head_bits(builder.bits))
        return cls(config, embedding, layers, builder.tensor("norm.weight"), head)

    @property
    def checks_trees(self) -> bool:
        return True

    @property
    def runs_by_itself(self) -> bool:
        return False

    @property
    def latest(self) -> None:
        return None

    @property
    def is_exact(self) -> bool:
        return False  # torch chooses its kernels by the number of rows

    @property
    def num_bytes(self) -> int:
        """Memory held by weights; norms and rotary tables not counted."""
        linears = [
            linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        ends = [self.head] if self.head is self.embedding else [self.head, self.embedding]
        return sum(linear.num_bytes for linear in linears + ends)

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]: what enters the first layer."""
        x = self.embedding.rows(ids)
        return x if self.config.embed_scale == 1.0 else x * self.config.embed_scale

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Residual stream [n, hidden] -> final norm and output layer, [n, vocab] float32."""
        return self.head(rms_norm(hidden, self.norm, self.config.rms_eps)).float()

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv: Sequence[LayerCache],
        *,
        num_layers: int | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        """Write K/V of every row at `batch.slots`; logits of `batch.rows`. `num_layers` stops early;
        hidden[n] is the residual stream after n layers, hidden[0] the embeddings."""
        depth = self.config.num_layers if num_layers is None else num_layers
        assert all(0 <= n <= depth <= self.config.num_layers for n in (0, *hidden_layers)), "no such layer"
        tensors, hidden = batch.tensors(), {}
        attention = TorchAttention(tensors)
        x = self.embed(tensors.input_ids)  # [T, hidden]
        for i, layer in enumerate(self.layers[:depth]):
            if i in hidden_layers:
                hidden[i] = x
            x = self._block(layer, x, attention, kv[i])
        if depth in hidden_layers:
            hidden[depth] = x
        return Output(self.logits(x[tensors.rows]), hidden)

    def _block(
        self, layer: Layer, x: torch.Tensor, attention: TorchAttention, cache: LayerCache
    ) -> torch.Tensor:
        """One layer: x [T, hidden] -> [T, hidden], in new memory."""
        eps = self.config.rms_eps
        added = layer.out(attention(layer.qkv(rms_norm(x, layer.attention_norm, eps)), cache, layer.heads))
        if layer.after_attention is not None:
            added = rms_norm(added, layer.after_attention, eps)
        x = x + added
        added = layer.down(_gate(layer.gate_up(rms_norm(x, layer.mlp_norm, eps)), self.config.activation))
        if layer.after_mlp is not None:
            added = rms_norm(added, layer.after_mlp, eps)
        return x + added


class _Builder:
    """Turns named tensors into layers."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: str, bits: int) -> None:
        self.checkpoint, self.config, self.device, self.bits = checkpoint, config, device, bits
        self.tables = self._tables(config.rope)
        self.local_tables = self._tables(config.rope_local) if config.rope_local is not None else self.tables

    def _tables(self, rope: RopeConfig) -> RotaryTables:
        tables = rotary_tables(rope, self.config.head_dim, self.config.max_context)
        return RotaryTables(*(table.to(self.device) for table in tables))

    def tensor(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(name).to(self.device).contiguous()

    def linear(self, *names: str, prefix: str = "", bits: int | None = None) -> Linear:
        """One linear layer from the rows of several: one call instead of three."""
        weight = torch.cat([self.tensor(f"{prefix}{name}.weight") for name in names])
        has_bias = f"{prefix}{names[0]}.bias" in self.config.weight_names()
        bias = torch.cat([self.tensor(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return Linear(weight, bias, bits=bits or self.bits)

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"layers.{index}."
        norms = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        before, after, *sandwich = [
            self.tensor(f"{prefix}{n}.weight") for n in norms[: 4 if config.sandwich_norm else 2]
        ]
        return Layer(
            attention_norm=before,
            qkv=self.linear("q_proj", "k_proj", "v_proj", prefix=f"{prefix}self_attn."),
            heads=self._heads(index),
            out=self.linear("o_proj", prefix=f"{prefix}self_attn."),
            after_attention=after if sandwich else None,
            mlp_norm=sandwich[0] if sandwich else after,
            gate_up=self.linear("gate_proj", "up_proj", prefix=f"{prefix}mlp."),
            down=self.linear("down_proj", prefix=f"{prefix}mlp."),
            after_mlp=sandwich[1] if sandwich else None,
        )

    def _heads(self, index: int) -> Heads:
        config, is_local = self.config, self.config.is_local(index)
        norms = None
        if config.qk_norm:
            prefix = f"layers.{index}.self_attn."
            norms = (self.tensor(f"{prefix}q_norm.weight"), self.tensor(f"{prefix}k_norm.weight"))
        window = config.sliding_window if is_local else None
        return Heads(
            self.local_tables if is_local else self.tables,
            norms,
            config.rms_eps,
            config.scale,
            window,
            self.bits < 32,
        )
