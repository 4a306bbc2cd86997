"""Weights on a GPU, of a model or of a learned head; norms and rotary tables are float32.

Invariant: a matrix is on the device in its final form before the next is read, so loading needs little more
memory than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.errors import ConfigError
from paceline.cuda import rows
from paceline.cuda.attention import LOG2_E, Attending, attend
from paceline.cuda.batch import DeviceBatch
from paceline.cuda.experts import DenseFfn, Experts
from paceline.cuda.linear import Matrix
from paceline.cuda.pack import pack
from paceline.loaders.head_files import Head
from paceline.models.attention import LayerCache
from paceline.models.config import Activation, ExpertsConfig, ModelConfig, RopeConfig
from paceline.models.rope import Angles, rotary_tables

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {"int8": 8, "int4": 4}  # weights alone: activations are bfloat16
# Up to these numbers of rows products let the next kernel start at their own start (measured on an H200).
PLAIN_ROWS, CHECKED_ROWS = 8, 64
NORMS = ("input", "pre_feedforward", "post_feedforward")  # not of every layer
# What a model may have and these kernels do not do yet.
MISSING = (
    "post_norm", "gated_attention", "recurrent",
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
    ffn: DenseFfn | Experts
    after_mlp: Tensor | None
    window: int | None = None
    sinks: Tensor | None = None  # [heads] float32, times log2(e)
    scale: float = 1.0  # of what attention and the ffn add
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
        attend(q, cache, batch, how._replace(window=self.window, sinks=self.sinks), out)
        is_early = PLAIN_ROWS < len(x) <= self.early_rows and self.out.weight.is_whole
        attended = self.out.parts(out.view(len(out), -1), is_early=is_early)
        rows.add_norm(x, attended, self.after_attention, self.mlp_norm, self.eps, normed, self.scale)
        return self.ffn(normed)


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

    def __init__(self, read: Callable[..., Tensor], names: Container[str], device: torch.device,
                 dtype: torch.dtype, bits: int | None = None, is_exact: bool = False) -> None:  # fmt: skip
        """read: a tensor of a name, or some rows, float32; names: those there are; dtype: of activations."""
        self._read, self._names, self.device = read, names, device
        self.dtype, self._bits, self._is_exact = dtype, bits, is_exact

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._names

    def norm(self, name: str) -> Tensor:
        """float32."""
        return self._read(f"{name}.weight").to(self.device).contiguous()

    def rest(self, name: str, scale: float = 1.0) -> Tensor | None:
        """float32, if there is any."""
        return scale * self._read(name).to(self.device) if name in self._names else None

    def norm_if_any(self, name: str) -> Tensor | None:
        return self.norm(name) if self.has(name) else None

    def table(self, name: str) -> Tensor:
        return self._read(f"{name}.weight").to(self.device).to(self.dtype).contiguous()

    def matrix(self, *names: str) -> Matrix:
        """One matrix from the rows of several: one launch instead of three."""
        has_bias = f"{names[0]}.bias" in self._names
        biases = [self._read(f"{name}.bias") for name in names if has_bias]
        return self._stacked((self._read(f"{name}.weight") for name in names), biases)

    def _stacked(self, weights: Iterable[Tensor], biases: list[Tensor]) -> Matrix:
        dtype = self.dtype if self._bits is None else torch.float32
        weight = torch.cat([each.to(self.device).to(dtype) for each in weights])
        bias = torch.cat([each.to(self.device).to(self.dtype) for each in biases]) if biases else None
        return Matrix(pack(weight, self._bits or 16), bias, self._is_exact)

    def dense(self, prefix: str, activation: Activation = "silu") -> DenseFfn:
        gate_up = self.matrix(f"{prefix}gate_proj", f"{prefix}up_proj")
        return DenseFfn(gate_up, self.matrix(f"{prefix}down_proj"), activation)

    def experts(self, prefix: str, config: ExpertsConfig, hidden: int, activation: Activation) -> Experts:
        """One by one; an expert that every row wakes is several at the end, filled up with zeros."""
        count, inner, read, own = config.count, config.inner, self._read, f"{prefix}experts."
        halves, shared = ("gate_proj", "up_proj"), -(-config.shared_inner // config.inner)

        def pieces(name: str, size: int) -> Iterable[Tensor]:
            for e in range(count):
                yield read(f"{own}{name}.weight", slice(e * size, (e + 1) * size))
            if shared:
                whole, extra = (
                    read(f"{prefix}shared_expert.{name}.weight"),
                    shared * inner - config.shared_inner,
                )
                filled = (0, 0, 0, extra) if name in halves else (0, extra)
                yield from functional.pad(whole, filled).chunk(shared, int(name not in halves))

        both: list[Tensor] = []
        downs = [read(f"{own}down_proj.bias")] if config.has_bias else []
        if config.has_bias:
            both = [torch.stack([read(f"{own}{name}.bias").view(count, -1) for name in halves], 1).flatten()]
        routers = [self.rest(f"{prefix}{name}.weight") for name in ("gate", "shared_expert_gate")]
        router = pack(torch.cat([each for each in routers if each is not None]).to(self.dtype), 16)
        return Experts(
            config,
            Matrix(router, self.rest(f"{prefix}gate.bias")),
            self.rest(f"{prefix}gate.e_score_correction_bias"),
            torch.zeros(count + 1, dtype=torch.int32, device=self.device),
            self._stacked(chain.from_iterable(zip(*(pieces(n, inner) for n in halves), strict=True)), both),
            self._stacked(pieces("down_proj", hidden), downs),
            activation,
        )

    def rotary(self, rope: RopeConfig, head_dim: int, num_positions: int, rotary_dim: int = 0) -> Angles:
        """What does not turn has angles of zero."""
        turned = rotary_dim or head_dim
        tables, extra = rotary_tables(rope, turned, num_positions), (head_dim - turned) // 2
        filled = (functional.pad(table, (0, extra), value=i) for table, i in zip(tables, (1, 0), strict=True))
        return Angles(*(table.to(self.device).contiguous() for table in filled))

    def layer(self, prefix: str, rotary: Angles, eps: float, ffn: DenseFfn | Experts | None = None) -> Layer:
        """Gemma norms what a block adds, too: then there are four norms."""
        attention = f"{prefix}self_attn."
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
            ffn=ffn or self.dense(f"{prefix}mlp."),
            sinks=self.rest(f"{attention}sinks", LOG2_E),
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


def turned_apart(config: ModelConfig, read: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Kernels turn numbers that are half a head apart. Where only the first of a head turn, queries and keys
    are put in another order, alike, so that no score changes: what does not turn comes after either half."""
    dim, half = config.head_dim, config.rotary_width // 2
    one, other = torch.arange(dim).split((half + dim // 2, dim // 2 - half))
    order = torch.cat([one[:half], one[2 * half :], one[half : 2 * half], other])

    def ordered(name: str, *rows: slice) -> Tensor:
        is_turned = any(f"self_attn.{each}" in name for each in ("q_proj", "k_proj", "q_norm", "k_norm"))
        tensor = read(name, *rows)
        return tensor.unflatten(0, (-1, dim))[:, order].flatten(0, 1) if is_turned else tensor

    return ordered if 2 * half < dim else read


def load_weights(source: Any, config: ModelConfig, dtype: str, device: torch.device, exact: bool) -> Weights:
    """Of a checkpoint."""
    check_config(config)
    names, activations = config.weight_names(), dtype_of(dtype)
    read = turned_apart(config, source.tensor)
    reader = WeightReader(read, names, device, activations, BITS.get(dtype), exact)
    ropes = [config.rope_of(i) for i in range(config.num_layers)]
    widths = (config.head_dim, config.max_context, config.rotary_width)
    tables = {rope: reader.rotary(rope, *widths) for rope in set(ropes)}
    layers = []
    for i, rope in enumerate(ropes):
        window = config.sliding_window if config.is_local(i) else None
        mlp, experts, act = f"layers.{i}.mlp.", config.experts_of(i), config.activation
        ffn = reader.experts(mlp, experts, config.hidden_size, act) if experts else reader.dense(mlp, act)
        layer = reader.layer(f"layers.{i}.", tables[rope], config.rms_eps, ffn)
        layers.append(layer._replace(window=window, scale=config.residual_scale, early_rows=CHECKED_ROWS))
    embedding = reader.table("embed_tokens")
    if config.tie_embeddings and dtype not in BITS:
        head = Matrix(pack(embedding, 16), None, exact)
    else:
        head = reader.matrix("embed_tokens" if config.tie_embeddings else "lm_head")
    return Weights(reader.dtype, embedding, layers, reader.norm("norm"), head)


def head_reader(head: Head, target: Weights) -> WeightReader:
    """A learned head has the dtype of the target's activations."""
    return WeightReader(head.tensors.__getitem__, head.tensors, target.norm.device, target.dtype)
