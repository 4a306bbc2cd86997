"""Weights on a GPU, of a model or of a learned head: which of them are read, in which order of rows, and kept
in which type.

Invariant: what the kernels would leave out of a model is refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.cuda.delta_net import DeltaNet
from paceline.cuda.experts import BesideExperts
from paceline.cuda.gates import gates_apart, with_gates
from paceline.cuda.gathered import Gathered
from paceline.cuda.layer import CHECKED_ROWS, Layer, Weights
from paceline.cuda.linear import Matrix
from paceline.cuda.pack import PackedWeight, pack, pack_float8
from paceline.cuda.reader import WeightReader
from paceline.heads.config import MtpConfig
from paceline.loaders.head_files import Head
from paceline.models.config import ModelConfig
from paceline.models.float8 import to_float8
from paceline.models.kept import DTYPES as KEPT
from paceline.models.kept import Kept, dtypes_kept
from paceline.models.rope import Angles
from paceline.models.shard import COLUMNS, TILE, Group, Shard, Slices

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of weights alone: activations are bfloat16.
PACKED: dict[str, Callable[[Tensor], PackedWeight]] = {
    "fp8": lambda weight: pack_float8(to_float8(weight)),
    "int8": partial(pack, bits=8),
    "int4": partial(pack, bits=4),
}
TURNED = ("q_proj", "k_proj", "q_norm", "k_norm")
MISSING = ("post_norm",)  # what a model may have and these kernels do not do yet
WIDEST_FLOATS = 256  # of float32 heads: a tile of wider ones takes more than a multiprocessor's shared memory


def dtype_of(name: str) -> torch.dtype:
    """Of activations."""
    known = dict.fromkeys((*DTYPES, *PACKED, *KEPT.values()))
    if name not in known:
        raise ConfigError(f"dtype is {name!r}; on a GPU choose auto, {', '.join(known)}")
    return DTYPES.get(name, torch.bfloat16)


def check_config(config: ModelConfig, dtype: str = "auto") -> None:
    """One error for all that the kernels would leave out."""
    usual = {field.name: field.default for field in fields(config)}
    asked = [f"{name} = {getattr(config, name)}" for name in MISSING if getattr(config, name) != usual[name]]
    if config.rope.query_beta:
        asked.append(f"rope.query_beta = {config.rope.query_beta}")
    widest = max(kind.head_dim for kind in config.kinds)
    if dtype == "float32" and widest > WIDEST_FLOATS:
        asked.append(f"float32 with heads of {widest} numbers")
    if asked:
        what = f"{', '.join(asked)} of a {config.family} model"
        raise ConfigError(f"the GPU kernels do not do {what}; use device='cpu', or kernels='torch'")


def turned_apart(config: ModelConfig | MtpConfig, read: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels turn numbers that are half a head apart. Where only the first of a head turn, queries and keys
    are put in another order, alike, so that no score changes: what does not turn comes after either half."""
    dim, half = config.head_dim, config.rotary_width // 2
    has_two_sizes = isinstance(config, ModelConfig) and config.global_head_dim
    assert not (config.rotary_dim and has_two_sizes), "heads of two sizes turn as wholes"
    one, other = torch.arange(dim).split((half + dim // 2, dim // 2 - half))
    order = torch.cat([one[:half], one[2 * half :], one[half : 2 * half], other])

    def turned(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, dim))[:, order].flatten(0, 1)

    def ordered(name: str, *rows: slice) -> Any:
        found = read(name, *rows)
        if found is None or not any(f"self_attn.{each}" in name for each in TURNED):
            return found
        return type(found)(*map(turned, found)) if isinstance(found, Kept) else turned(found)

    return ordered if 2 * half < dim else read


def _read_layer(reader: WeightReader, config: ModelConfig, i: int, rotary: Angles) -> Layer | DeltaNet:
    prefix = f"layers.{i}."
    ffn = reader.ffn(f"{prefix}mlp.", config, config.experts_of(i))
    if config.is_recurrent(i):
        assert not isinstance(ffn, BesideExperts), "no recurrent layer has them"
        return reader.delta_net(prefix, config, ffn)
    scalar = reader.rest(f"{prefix}layer_scalar")
    return reader.layer(prefix, rotary, config.rms_eps, ffn)._replace(
        window=config.sliding_window if config.is_local(i) else None,
        scale=config.residual_scale,
        scalar=1.0 if scalar is None else scalar.item(),
        norms_values=config.value_norm,
        early_rows=CHECKED_ROWS,
    )


def load_weights(
    source: Any, config: ModelConfig, dtype: str, device: torch.device, exact: bool,
    group: Group | None = None,
) -> Weights:  # fmt: skip
    """Of a checkpoint; of a group's rank those that it holds. "fp8" and "mxfp4": matrices that files have in
    either stay what they are; a model that has none is rounded to FP8, and for "mxfp4" unpacked."""
    check_config(config, dtype)
    names, activations = set(config.weight_names()), dtype_of(dtype)
    shard, own = (Shard(), source) if group is None else (group.shard, Slices(source, group.shard))
    keeps = dtype in KEPT.values() and dtype in dtypes_kept(source)
    packed = None if keeps else PACKED.get(dtype)
    ways: list[Callable[..., Any]] = [own.tensor, own.kept]
    if config.gated_attention:
        names, ways = with_gates(names), [gates_apart(config.head_dim, each) for each in ways]
    ways = [turned_apart(config, each) for each in ways]
    read, kept = ways[0], ways[1] if keeps else lambda *_: None
    reader = WeightReader(read, names, device, activations, kept, packed, exact)
    dims = [config.kinds[config.kind_of(i)].head_dim for i in range(config.num_layers)]
    ropes = [(*config.rope_of(i), dim) for i, dim in enumerate(dims)]
    tables = {each: reader.rotary(each[0], each[2], config.max_context, each[1]) for each in set(ropes)}
    layers = [_read_layer(reader, config, i, tables[rope]) for i, rope in enumerate(ropes)]
    embedding = reader.table("embed_tokens")
    tied = shard.of(config.vocab_size, TILE)  # of the embedding, which is whole on every rank
    if config.tie_embeddings and packed is None:
        head = Matrix(pack(embedding[tied], 16), None, exact)
    elif config.tie_embeddings:
        head = reader.stacked([source.tensor("embed_tokens.weight")[tied]], [])
    else:
        head = reader.matrix("lm_head")
    weights = Weights(reader.dtype, embedding, layers, reader.norm("norm"), head)
    return weights if group is None else _spread(weights, config, group)


def _spread(weights: Weights, config: ModelConfig, group: Group) -> Weights:
    """What a rank has read of a model -> the same with exchanges. config: of the whole model."""
    sizes, hidden, inner = group.shard.sizes, config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heads, columns = sizes(queries, queries // config.num_kv_heads), sizes(inner, COLUMNS)
    rows = sizes(hidden, TILE)

    def layer(own: Any) -> Layer:
        """Its ffn is dense: others are refused before anything is read."""
        gate_up, down = own.ffn.gate_up._replace(num_outputs=2 * inner), own.ffn.down
        down = Gathered(down._replace(num_outputs=hidden), group, rows, columns)
        return own._replace(
            qkv=own.qkv._replace(num_outputs=queries + 2 * keys),
            out=Gathered(own.out._replace(num_outputs=hidden), group, rows, heads),
            ffn=own.ffn._replace(gate_up=gate_up, down=down),
        )

    part: Any = weights.head
    head = Gathered(part._replace(num_outputs=config.vocab_size), group, sizes(config.vocab_size, TILE))
    return weights._replace(layers=[layer(each) for each in weights.layers], head=head)


def head_reader(head: Head, target: Weights) -> WeightReader:
    """A learned head has the dtype of the target's activations."""
    names, read, config = set(head.tensors), head.tensors.__getitem__, head.config
    if isinstance(config, MtpConfig):  # its layer is as the target's are
        if config.is_gated:
            names, read = with_gates(names), gates_apart(config.head_dim, read)
        read = turned_apart(config, read)
    return WeightReader(read, names, target.norm.device, target.dtype)
