"""Modules for multi-token prediction (MTP) that a target's own checkpoint holds, as heads.

A module reads the next token's embedding beside the target's last hidden state, each normed, through one
layer; logits are the target's output layer's. Told by the names of its tensors. Invariant: shapes are checked
before anything is read; a module with something that our heads do not do is not taken for one that has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import MtpConfig
from paceline.heads.modules import tensor_shapes
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.fields import check_shapes
from paceline.loaders.head_files import Head
from paceline.loaders.safetensors import OFFSET
from paceline.loaders.stored import TYPES, StoredTensor, read_tensor

LAYER = "midlayer."


class Names(NamedTuple):
    """What a module's tensors are called in files, after the prefix; ours are the fields'."""

    prefix: str
    fc: str
    embed_norm: str
    hidden_norm: str
    norm: str
    layer: str = ""  # of its one layer
    is_swapped: bool = False  # the hidden state comes before the embedding

    def stored(self, name: str) -> str:
        if name.startswith(LAYER):
            return self.prefix + self.layer + name.removeprefix(LAYER)
        module, _, kind = name.rpartition(".")
        return f"{self.prefix}{getattr(self, module)}.{kind}"


DIALECTS = {
    "qwen": Names(
        "mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", layer="layers.0."
    ),
    "mimo": Names(
        "model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
        is_swapped=True,
    ),
}  # fmt: skip


def _stored(target: Checkpoint) -> Mapping[str, StoredTensor]:
    """Tensors of its files that hold plain numbers, where those are safetensors."""
    stored: Mapping[str, StoredTensor] = getattr(target, "stored", {})
    return {name: tensor for name, tensor in stored.items() if tensor.dtype in TYPES}


def dialect_of(target: Checkpoint) -> str | None:
    """Of the module that the target's files hold, if they do and our heads can run it."""
    stored = _stored(target)
    found = (n for n, names in DIALECTS.items() if names.stored("fc.weight") in stored)
    dialect = next(found, None)
    has_dense = dialect and DIALECTS[dialect].stored("midlayer.mlp.down_proj.weight") in stored
    return dialect if has_dense else None


def mtp_head(target: Checkpoint) -> Head:
    dialect, model = dialect_of(target), target.config
    if dialect is None:
        remedy = "leave speculative_config out, or name another method"
        raise ConfigError(f"{target.name} holds no module for multi-token prediction that is known; {remedy}")
    config = MtpConfig(
        target_name=target.name, target_hash="", vocab_size=model.vocab_size, hidden_size=model.hidden_size,
        target_layers=model.num_layers, rms_eps=model.rms_eps, draft_vocab_size=model.vocab_size,
        has_lm_head=False, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, intermediate_size=model.intermediate_size, rope=model.rope,
        qk_norm=model.qk_norm, has_bias=model.qkv_bias, is_gated=model.gated_attention,
        rotary_dim=model.rotary_dim,
    )  # fmt: skip
    names, stored = DIALECTS[dialect], _stored(target)
    shapes = tensor_shapes(config)
    wanted = {names.stored(name): shape for name, shape in shapes.items()}
    check_shapes(target.path, {name: stored[name].shape for name in wanted if name in stored}, wanted)
    tensors = {}
    for name in shapes:
        where = names.stored(name)
        weight = read_tensor(stored[where].file, where).to(torch.float32)
        if not bool(torch.isfinite(weight).all()):
            raise ModelFileError(f"{target.path}: tensor {where} holds numbers that are not finite; fetch it")
        tensors[name] = weight + 1 if model.family in OFFSET and "norm" in name else weight
    if names.is_swapped:
        tensors["fc.weight"] = tensors["fc.weight"].roll(model.hidden_size, 1)
    tied = model.tie_embeddings
    tensors["lm_head.weight"] = target.tensor("embed_tokens.weight" if tied else "lm_head.weight")
    return Head(config, tensors, str(target.path), dialect)
