"""Weights on a GPU, of a model or of a learned head; norms and rotary tables are float32.

Invariant: a matrix is on the device in its final form before the next is read, so loading needs little more
memory than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.cuda import rows
from paceline.cuda.attention import Attending, attend
from paceline.cuda.batch import DeviceBatch
from paceline.cuda.linear import Matrix
from paceline.cuda.pack import pack
from paceline.loaders.head_files import Head
from paceline.models.attention import LayerCache
from paceline.models.config import Activation, ModelConfig, RopeConfig
from paceline.models.rope import Angles, rotary_tables

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {"int8": 8, "int4": 4}  # weights alone: activations are bfloat16
# Up to these numbers of rows products let the next kernel start at their own start (measured on an H200).
PLAIN_ROWS, CHECKED_ROWS = 8, 64
NORMS = ("input", "pre_feedforward", "post_feedforward")  # not of every layer
# What a model may have and these kernels do not do yet.
MISSING = (
    "out_bias", "mlp_bias", "qk_norm_over_heads", "post_norm", "residual_scale", "logits_scale", "rotary_dim",
    "attention_sinks", "gated_attention", "recurrent", "experts",
)  # fmt: skip


class Layer(NamedTuple):
    eps: float
    attention_norm: Tensor
    qkv: Matrix
    qk_norms: tuple[Tensor | None, Tensor | None]
    rotary: Angles
    out: Matrix
    after_attention: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    after_mlp: Tensor | None
    activation: Activation = "silu"
    window: int | None = None
    early_rows: int = PLAIN_ROWS  # up to which products let the next kernel start at their own start

    def queries(self, x: Tensor, where: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        """x [T, width] at positions and slots [T]: K/V to the cache -> queries [T, heads, dim]."""
        qkv = self.qkv.parts(x, is_early=len(x) <= self.early_rows)
        dim = 2 * self.rotary.cos.shape[1]
        q = torch.empty((len(x), self.out.weight.shape[1] // dim, dim), dtype=x.dtype, device=x.device)
        rows.place(qkv, where, self.rotary, cache, self.qk_norms, self.eps, q)
        return q

    def run(
        self, x: Tensor, q: Tensor, batch: DeviceBatch, cache: LayerCache, how: Attending, normed: Tensor
    ) -> Tensor:
        """Add attention of the queries q to the residual stream x [T, hidden] -> [parts, T, hidden]: what the
        MLP adds. `normed` [T, hidden] is overwritten."""
        out = torch.empty_like(q)
        attend(q, cache, batch, how._replace(window=self.window), out)
        is_early = PLAIN_ROWS < len(x) <= self.early_rows and self.out.weight.is_whole
        attended = self.out.parts(out.view(len(out), -1), is_early=is_early)
        rows.add_norm(x, attended, self.after_attention, self.mlp_norm, self.eps, normed)
        return self.down.parts(self.gate_up(normed, self.activation))


class Weights(NamedTuple):
    dtype: torch.dtype  # of activations
    embedding: Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: Tensor
    head: Matrix


def dtype_of(name: str) -> torch.dtype:
    """Of activations."""
    if name not in {*DTYPES, *BITS}:
        raise ConfigError(f"dtype is {name!r}; on a GPU choose auto, {', '.join([*DTYPES, *BITS])}")
    return DTYPES.get(name, torch.bfloat16)


class WeightReader:
    """Tensors by their names, brought to the device."""

    def __init__(self, read: Callable[[str], Tensor], names: Container[str], device: torch.device,
                 dtype: torch.dtype, bits: int | None = None, is_exact: bool = False) -> None:  # fmt: skip
        """read: a tensor of a name, float32; names: those there are; dtype: of activations."""
        self._read, self._names, self.device = read, names, device
        self.dtype, self._bits, self._is_exact = dtype, bits, is_exact

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._names

    def norm(self, name: str) -> Tensor:
        """float32."""
        return self._read(f"{name}.weight").to(self.device).contiguous()

    def norm_if_any(self, name: str) -> Tensor | None:
        return self.norm(name) if self.has(name) else None

    def table(self, name: str) -> Tensor:
        return self._read(f"{name}.weight").to(self.device).to(self.dtype).contiguous()

    def matrix(self, *names: str) -> Matrix:
        """One matrix from the rows of several: one launch instead of three."""
        dtype = self.dtype if self._bits is None else torch.float32
        weight = torch.cat([self._read(f"{name}.weight").to(self.device).to(dtype) for name in names])
        has_bias = f"{names[0]}.bias" in self._names
        biases = [self._read(f"{name}.bias").to(self.device).to(self.dtype) for name in names if has_bias]
        return Matrix(pack(weight, self._bits or 16), torch.cat(biases) if biases else None, self._is_exact)

    def rotary(self, rope: RopeConfig, head_dim: int, num_positions: int) -> Angles:
        tables = rotary_tables(rope, head_dim, num_positions)
        return Angles(*(table.to(self.device).contiguous() for table in tables))

    def layer(self, prefix: str, rotary: Angles, eps: float) -> Layer:
        """Gemma norms what a block adds, too: then there are four norms."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        before, before_mlp, after_mlp = (self.norm_if_any(f"{prefix}{name}_layernorm") for name in NORMS)
        after = self.norm(f"{prefix}post_attention_layernorm")
        return Layer(
            eps=eps,
            attention_norm=torch.ones_like(after) if before is None else before,
            qkv=self.matrix(*(f"{attention}{name}_proj" for name in "qkv")),
            qk_norms=(self.norm_if_any(f"{attention}q_norm"), self.norm_if_any(f"{attention}k_norm")),
            rotary=rotary,
            out=self.matrix(f"{attention}o_proj"),
            after_attention=None if before_mlp is None else after,
            mlp_norm=after if before_mlp is None else before_mlp,
            gate_up=self.matrix(f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self.matrix(f"{mlp}down_proj"),
            after_mlp=after_mlp,
        )


def check_config(config: ModelConfig) -> None:
    """One error for all that the kernels would leave out."""
    usual = {field.name: field.default for field in fields(config)}
    asked = [f"{name} = {getattr(config, name)}" for name in MISSING if getattr(config, name) != usual[name]]
    if config.rope.query_beta:
        asked.append(f"rope.query_beta = {config.rope.query_beta}")
    if asked:
        what = f"{', '.join(asked)} of a {config.family} model"
        raise ConfigError(f"the GPU kernels do not do {what}; use device='cpu', or kernels='torch'")


def load_weights(source: Any, config: ModelConfig, dtype: str, device: torch.device, exact: bool) -> Weights:
    """Of a checkpoint."""
    check_config(config)
    names, activations = config.weight_names(), dtype_of(dtype)
    reader = WeightReader(source.tensor, names, device, activations, BITS.get(dtype), exact)
    ropes = [config.rope_of(i) for i in range(config.num_layers)]
    tables = {rope: reader.rotary(rope, config.head_dim, config.max_context) for rope in set(ropes)}
    layers = []
    for i, rope in enumerate(ropes):
        window = config.sliding_window if config.is_local(i) else None
        layer = reader.layer(f"layers.{i}.", tables[rope], config.rms_eps)
        layers.append(layer._replace(activation=config.activation, window=window, early_rows=CHECKED_ROWS))
    embedding = reader.table("embed_tokens")
    if config.tie_embeddings and dtype not in BITS:
        head = Matrix(pack(embedding, 16), None, exact)
    else:
        head = reader.matrix("embed_tokens" if config.tie_embeddings else "lm_head")
    return Weights(reader.dtype, embedding, layers, reader.norm("norm"), head)


def head_reader(head: Head, target: Weights) -> WeightReader:
    """A learned head has the dtype of the target's activations."""
    return WeightReader(head.tensors.__getitem__, head.tensors, target.norm.device, target.dtype)
