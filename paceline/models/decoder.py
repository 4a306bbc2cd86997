"""One decoder for all families: a stack of attention and MLP blocks described by ModelConfig.

Invariant: with the exact kernels (the default on the CPU) a row's logits and hidden states are bitwise the same however many rows
are in the pass, whatever the other rows are and however its context was split into passes. Speculation is lossless because of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch.nn import functional

from paceline.errors import ConfigError
from paceline.models.attention import Heads, LayerCache, TorchAttention, rms_norm
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.linear import ExactLinear, Linear, TorchLinear
from paceline.models.rope import RotaryTables, rotary_tables
from paceline.types import Batch, Output

Progress = Callable[[int, int], None]  # layers done, layers in all


class Checkpoint(Protocol):
    @property
    def config(self) -> ModelConfig: ...
    def tensor(self, name: str) -> torch.Tensor: ...  # float32


Attention = Callable[[torch.Tensor, LayerCache, Heads], torch.Tensor]


class Kernels(NamedTuple):
    """The ways to compute that differ between devices; chosen once, when a decoder is built."""

    linear: Callable[..., Linear]
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    gate: Callable[[torch.Tensor, str], torch.Tensor]  # [T, 2 * width] (gate, then up) -> [T, width]
    attention: Callable[[Batch], Attention]  # made anew for each pass
    scope: Callable[[], AbstractContextManager[None]] = nullcontext  # entered for each pass
    fuse: Callable[..., Callable[..., torch.Tensor]] | None = None  # makes one call of a whole layer


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Our kernels have their own threads; torch's would spin beside them waiting for work and take their cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def _torch_gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


def choose_kernels(kind: str, device: str, dtype: torch.dtype, config: ModelConfig) -> Kernels:
    if kind == "torch":
        return Kernels(TorchLinear, rms_norm, _torch_gate, TorchAttention)
    if kind != "exact":
        raise ConfigError(f"unknown kernels {kind!r}; choose 'exact' or 'torch'")
    if torch.device(device).type != "cpu" or dtype is not torch.float32:
        raise ConfigError(f"the exact kernels run in float32 on the CPU, not in {dtype} on {device}; use kernels='torch'")
    if config.head_dim % 16:
        raise ConfigError(f"the exact kernels need heads whose width is a multiple of 16, not {config.head_dim}; use kernels='torch'")
    from paceline.cpu.block import fuse
    from paceline.cpu.paged import Attention as ExactAttention
    from paceline.cpu.rows import gate_rows, norm_rows

    return Kernels(ExactLinear, norm_rows, gate_rows, ExactAttention, one_torch_thread, fuse)


class Decoder:
    """Built by `Decoder.load`."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, embedding: Linear, layers: list[Layer], norm: torch.Tensor, head: Linear
    ) -> None:
        self.config, self.kernels = config, kernels
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head
        fuse = kernels.fuse or (lambda layer, _config: partial(self._block, layer))
        self._blocks = [fuse(layer, config) for layer in layers]

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        kernels: str = "exact",  # or "torch"
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        bits: int | None = None,
        group: int = 64,
        context: int | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Read every weight; `bits` quantizes all linear layers; positions from `context` on will not be asked for."""
        config = replace(checkpoint.config, max_context=min(checkpoint.config.max_context, context or checkpoint.config.max_context))
        builder = _Builder(checkpoint, config, choose_kernels(kernels, device, dtype, config), device, dtype, bits, group)
        layers = []
        for i in range(config.num_layers):
            layers.append(builder.layer(i))
            if progress is not None:
                progress(i + 1, config.num_layers)
        embedding: Linear
        if config.tie_embeddings:
            embedding = head = builder.linear("embed_tokens")
        else:
            embedding, head = TorchLinear(builder.tensor("embed_tokens.weight")), builder.linear("lm_head")
        return cls(config, builder.kernels, embedding, layers, builder.tensor("norm.weight"), head)

    @property
    def num_bytes(self) -> int:
        """Memory held by weights; norms and rotary tables not counted."""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
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
        return self.head(self.kernels.norm(hidden, self.norm, self.config.rms_eps)).float()

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: Sequence[LayerCache], *, num_layers: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> Output:
        """Write K/V of every row at `batch.slots`; logits of `batch.rows`. `num_layers` stops early; hidden[n] is the residual stream
        after n layers, hidden[0] the embeddings."""
        depth = self.config.num_layers if num_layers is None else num_layers
        assert all(0 <= n <= depth <= self.config.num_layers for n in (0, *hidden_layers)), "no such layer"
        with self.kernels.scope():
            return self._pass(batch, kv, depth, frozenset(hidden_layers))

    def _pass(self, batch: Batch, kv: Sequence[LayerCache], depth: int, wanted: frozenset[int]) -> Output:
        attention, hidden = self.kernels.attention(batch), {}
        x = self.embed(batch.input_ids)  # [T, hidden]
        for i in range(depth):
            if i in wanted:
                hidden[i] = x
            x = self._blocks[i](x, attention, kv[i])
        if depth in wanted:
            hidden[depth] = x
        return Output(self.logits(x[batch.rows]), hidden)

    def _block(self, layer: Layer, x: torch.Tensor, attention: Attention, cache: LayerCache) -> torch.Tensor:
        """One layer: x [T, hidden] -> [T, hidden], in new memory."""
        norm, eps = self.kernels.norm, self.config.rms_eps
        added = layer.out(attention(layer.qkv(norm(x, layer.attention_norm, eps)), cache, layer.heads))
        if layer.after_attention is not None:
            added = norm(added, layer.after_attention, eps)
        x = x + added
        added = layer.down(self.kernels.gate(layer.gate_up(norm(x, layer.mlp_norm, eps)), self.config.activation))
        if layer.after_mlp is not None:
            added = norm(added, layer.after_mlp, eps)
        return x + added


class _Builder:
    """Turns named tensors into layers."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, kernels: Kernels, device: str, dtype: torch.dtype, bits: int | None, group: int
    ) -> None:
        self.checkpoint, self.config, self.kernels = checkpoint, config, kernels
        self.device, self.dtype, self.bits, self.group = device, dtype, bits, group
        self.tables = self._tables(config.rope)
        self.local_tables = self._tables(config.rope_local) if config.rope_local is not None else self.tables

    def _tables(self, rope: RopeConfig) -> RotaryTables:
        tables = rotary_tables(rope, self.config.head_dim, self.config.max_context)
        return RotaryTables(*(table.to(self.device) for table in tables))

    def tensor(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(name).to(self.device, self.dtype).contiguous()

    def linear(self, *names: str, prefix: str = "") -> Linear:
        """One linear layer from the rows of several: one call instead of three."""
        weight = torch.cat([self.tensor(f"{prefix}{name}.weight") for name in names])
        has_bias = f"{prefix}{names[0]}.bias" in self.config.weight_names()
        bias = torch.cat([self.tensor(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        # Not every width is a multiple of the group asked for; a smaller group is only more precise.
        group = math.gcd(weight.shape[1], self.group)
        return self.kernels.linear(weight, bias, bits=self.bits, group=group)

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"layers.{index}."
        norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
        before, after, *sandwich = [self.tensor(f"{prefix}{n}.weight") for n in norms[: 4 if config.sandwich_norm else 2]]
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
        return Heads(self.local_tables if is_local else self.tables, norms, config.rms_eps, config.scale, window)
