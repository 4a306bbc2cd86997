"""A model's weights on a GPU: matrices in half precision or as small integers, norms and rotary tables in
float32.

Invariant: a matrix is on the device in its final form before the next is read, so loading needs little more
memory than the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.core.errors import ConfigError
from paceline.cuda.linear import Activation, PackedWeight, pack, parts, product
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.rope import RotaryTables, rotary_tables

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {"int8": 8, "int4": 4}  # weights alone: activations are bfloat16


class Matrix(NamedTuple):
    weight: PackedWeight  # [N, K]
    bias: torch.Tensor | None
    is_exact: bool  # the same bits with any number of rows, prompts too

    def __call__(
        self, x: torch.Tensor, activation: Activation | None = None
    ) -> torch.Tensor:  # [T, K] -> [T, N], or [T, N / 2]
        return product(x, self.weight, self.bias, activation=activation, is_exact=self.is_exact)

    def parts(
        self, x: torch.Tensor, *, is_early: bool = False
    ) -> torch.Tensor:  # [T, K] -> [S, T, N], to be added up
        return parts(x, self.weight, self.bias, is_exact=self.is_exact, is_early=is_early)

    @property
    def num_bytes(self) -> int:
        return self.weight.packed.nbytes + self.weight.scales.nbytes


class Layer(NamedTuple):
    attention_norm: torch.Tensor
    qkv: Matrix
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    tables: RotaryTables
    window: int | None
    out: Matrix
    after_attention: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    after_mlp: torch.Tensor | None


class Weights(NamedTuple):
    dtype: torch.dtype  # of activations
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: torch.Tensor
    head: Matrix


def dtype_of(name: str) -> torch.dtype:
    if name not in {*DTYPES, *BITS}:
        raise ConfigError(f"dtype is {name!r}; on a GPU choose auto, {', '.join([*DTYPES, *BITS])}")
    return DTYPES.get(name, torch.bfloat16)


def load_weights(
    checkpoint: Any,
    config: ModelConfig,
    dtype: str,
    device: torch.device,
    is_exact: bool,
    progress: Callable[[int, int], None],
) -> Weights:
    reader = _Reader(checkpoint, config, dtype, device, is_exact)
    layers = []
    for i in range(config.num_layers):
        layers.append(reader.layer(i))
        progress(i + 1, config.num_layers)
    embedding = reader.tensor("embed_tokens.weight").to(reader.dtype)
    head = (
        Matrix(pack(embedding, 16), None, is_exact)
        if config.tie_embeddings and not reader.bits
        else reader.matrix("embed_tokens" if config.tie_embeddings else "lm_head")
    )
    return Weights(reader.dtype, embedding, layers, reader.tensor("norm.weight"), head)


class _Reader:
    def __init__(
        self, checkpoint: Any, config: ModelConfig, dtype: str, device: torch.device, is_exact: bool
    ) -> None:
        self.checkpoint, self.config, self.device = checkpoint, config, device
        self.dtype, self.bits, self.is_exact = dtype_of(dtype), BITS.get(dtype), is_exact
        self.tables = self._tables(config.rope)
        self.local_tables = self._tables(config.rope_local) if config.rope_local is not None else self.tables

    def _tables(self, rope: RopeConfig) -> RotaryTables:
        tables = rotary_tables(rope, self.config.head_dim, self.config.max_context)
        return RotaryTables(*(table.to(self.device).contiguous() for table in tables))

    def tensor(self, name: str) -> torch.Tensor:
        """float32 on the device."""
        return self.checkpoint.tensor(name).to(self.device).contiguous()

    def matrix(self, *names: str) -> Matrix:
        """One matrix from the rows of several: one launch instead of three."""
        weight = torch.cat(
            [
                self.tensor(f"{name}.weight").to(self.dtype if self.bits is None else torch.float32)
                for name in names
            ]
        )
        has_bias = f"{names[0]}.bias" in self.config.weight_names()
        bias = torch.cat([self.tensor(f"{name}.bias").to(self.dtype) for name in names]) if has_bias else None
        return Matrix(pack(weight, self.bits or 16), bias, self.is_exact)

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"layers.{index}."
        attention, mlp, is_local = f"{prefix}self_attn.", f"{prefix}mlp.", config.is_local(index)
        names = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        norms = [self.tensor(f"{prefix}{name}.weight") for name in names[: 4 if config.sandwich_norm else 2]]
        return Layer(
            attention_norm=norms[0],
            qkv=self.matrix(*(f"{attention}{name}_proj" for name in "qkv")),
            q_norm=self.tensor(f"{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=self.tensor(f"{attention}k_norm.weight") if config.qk_norm else None,
            tables=self.local_tables if is_local else self.tables,
            window=config.sliding_window if is_local else None,
            out=self.matrix(f"{attention}o_proj"),
            after_attention=norms[1] if config.sandwich_norm else None,
            mlp_norm=norms[2] if config.sandwich_norm else norms[1],
            gate_up=self.matrix(f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self.matrix(f"{mlp}down_proj"),
            after_mlp=norms[3] if config.sandwich_norm else None,
        )
