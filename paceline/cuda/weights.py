"""Weights on a GPU, of a model or of a learned head: matrices in half precision or as small integers, norms
and rotary tables in float32.

Invariant: a matrix is on the device in its final form before the next is read, so loading needs little more
memory than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch

from paceline.core.errors import ConfigError
from paceline.cuda import rows
from paceline.cuda.attention import Attending, attend
from paceline.cuda.batch import DeviceBatch
from paceline.cuda.linear import Matrix
from paceline.cuda.pack import pack
from paceline.cuda.rows import Activation
from paceline.loaders.head_files import Head
from paceline.models.attention import LayerCache
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.rope import Angles, rotary_tables

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {"int8": 8, "int4": 4}  # weights alone: activations are bfloat16
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


class Layer(NamedTuple):
    dtype: torch.dtype  # of activations
    eps: float
    attention_norm: torch.Tensor
    qkv: Matrix
    qk_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    rotary: Angles
    window: int | None
    out: Matrix
    after_attention: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    after_mlp: torch.Tensor | None

    def queries(
        self, qkv: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], cache: LayerCache
    ) -> torch.Tensor:
        """qkv [parts, T, (heads + 2 * kv_heads) * dim] at positions and slots [T]: keys and values go to the
        cache -> queries [T, heads, dim]."""
        dim = 2 * self.rotary.cos.shape[1]
        shape = (qkv.shape[1], self.out.weight.shape[1] // dim, dim)
        q = torch.empty(shape, dtype=self.dtype, device=qkv.device)
        rows.place(qkv, where, self.rotary, cache, self.qk_norms, self.eps, q)
        return q

    def attend(
        self, qkv: torch.Tensor, slots: torch.Tensor, batch: DeviceBatch, cache: LayerCache, how: Attending
    ) -> torch.Tensor:
        """qkv as above, written at `slots` [T] -> [T, heads * dim]."""
        q = self.queries(qkv, (batch.positions, slots), cache)
        out = torch.empty_like(q)
        attend(q, cache, batch, how._replace(window=self.window), out)
        return out.view(len(out), -1)

    def mlp(self, normed: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[T, hidden] -> [parts, T, hidden]: what is added to the residual stream."""
        return self.down.parts(self.gate_up(normed, activation))


class Weights(NamedTuple):
    dtype: torch.dtype  # of activations
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: torch.Tensor
    head: Matrix

    @property
    def num_bytes(self) -> int:
        """Of the matrices, which a pass reads in full."""
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(matrix.num_bytes for matrix in (*matrices, self.head))


def dtype_of(name: str) -> torch.dtype:
    """Of activations."""
    if name not in {*DTYPES, *BITS}:
        raise ConfigError(f"dtype is {name!r}; on a GPU choose auto, {', '.join([*DTYPES, *BITS])}")
    return DTYPES.get(name, torch.bfloat16)


class WeightReader:
    """Tensors by their names, brought to the device."""

    def __init__(self, read: Callable[[str], torch.Tensor], names: Container[str], device: torch.device,
                 dtype: torch.dtype, bits: int | None = None, is_exact: bool = False) -> None:  # fmt: skip
        """read: a tensor of a name, float32; names: those there are; dtype: of activations."""
        self._read, self._names, self.device = read, names, device
        self.dtype, self._bits, self._is_exact = dtype, bits, is_exact

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._names

    def norm(self, name: str) -> torch.Tensor | None:
        """float32, if there is one."""
        return self._read(f"{name}.weight").to(self.device).contiguous() if self.has(name) else None

    def table(self, name: str) -> torch.Tensor:
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

    def layer(self, prefix: str, rotary: Angles, eps: float, window: int | None = None) -> Layer:
        """Gemma norms what a block adds, too: then there are four norms."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        before, after, before_mlp, after_mlp = (self.norm(f"{prefix}{name}_layernorm") for name in NORMS)
        assert after is not None, "every layer norms what its MLP reads"
        return Layer(
            dtype=self.dtype,
            eps=eps,
            attention_norm=torch.ones_like(after) if before is None else before,
            qkv=self.matrix(*(f"{attention}{name}_proj" for name in "qkv")),
            qk_norms=(self.norm(f"{attention}q_norm"), self.norm(f"{attention}k_norm")),
            rotary=rotary,
            window=window,
            out=self.matrix(f"{attention}o_proj"),
            after_attention=None if before_mlp is None else after,
            mlp_norm=after if before_mlp is None else before_mlp,
            gate_up=self.matrix(f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self.matrix(f"{mlp}down_proj"),
            after_mlp=after_mlp,
        )


def load_weights(
    source: Any, config: ModelConfig, dtype: str, device: torch.device, exact: bool,
    progress: Callable[[int, int], None] | None,
) -> Weights:  # fmt: skip
    """Of a checkpoint; `progress` is told layers done and layers in all."""
    reader = WeightReader(
        source.tensor, config.weight_names(), device, dtype_of(dtype), BITS.get(dtype), is_exact=exact
    )
    size = config.head_dim, config.max_context
    tables = reader.rotary(config.rope, *size)
    local_tables = tables if config.rope_local is None else reader.rotary(config.rope_local, *size)
    layers = []
    for i in range(config.num_layers):
        is_local, prefix = config.is_local(i), f"layers.{i}."
        window = config.sliding_window if is_local else None
        layers.append(reader.layer(prefix, local_tables if is_local else tables, config.rms_eps, window))
        if progress is not None:
            progress(i + 1, config.num_layers)
    embedding, norm = reader.table("embed_tokens"), reader.norm("norm")
    assert norm is not None, "a model norms what its output layer reads"
    if config.tie_embeddings and dtype not in BITS:
        head = Matrix(pack(embedding, 16), None, exact)
    else:
        head = reader.matrix("embed_tokens" if config.tie_embeddings else "lm_head")
    return Weights(reader.dtype, embedding, layers, norm, head)


def head_reader(head: Head, target: Weights) -> WeightReader:
    """A learned head has the dtype of the target's activations."""
    return WeightReader(head.tensors.__getitem__, head.tensors, target.norm.device, target.dtype)
