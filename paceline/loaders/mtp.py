"""Modules for multi-token prediction (MTP) that a target's own checkpoint holds, as heads.

A module reads the next token's embedding beside the target's last hidden state, each normed, through one
layer; logits are the target's output layer's. Told by the names of its tensors. Invariant: shapes are checked
before anything is read; a module with something that our heads do not do is not taken for one that has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import MtpConfig
from paceline.heads.modules import layer_config, tensor_shapes
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.fields import ALL, check_shapes
from paceline.loaders.head_files import Head
from paceline.loaders.places import Place, places_of
from paceline.loaders.safetensors import OFFSET
from paceline.loaders.stored import TYPES, StoredTensor, read_part

LAYER = "midlayer."
DOWN = ("mlp.down_proj.weight", "mlp.experts.0.down_proj.weight", "mlp.experts.down_proj")


class Names(NamedTuple):
    """What a module's tensors are called in files, after the prefix; ours are the fields'."""

    prefix: str  # {}: of how many layers the target has
    fc: str
    embed_norm: str
    hidden_norm: str
    norm: str
    layer: str = ""  # of its one layer
    is_swapped: bool = False  # the hidden state comes before the embedding
    norm_output: bool = True  # the next step reads what comes out of the last norm

    def stored(self, name: str, num_layers: int) -> str:
        prefix = self.prefix.format(num_layers)
        if name.startswith(LAYER):
            return prefix + self.layer + name.removeprefix(LAYER)
        module, _, kind = name.rpartition(".")
        return f"{prefix}{getattr(self, module)}.{kind}"


DIALECTS = {
    "qwen": Names(
        "mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", layer="layers.0."
    ),
    "mimo": Names(
        "model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
        is_swapped=True,
    ),
    "glm": Names("model.layers.{}.", "eh_proj", "enorm", "hnorm", "shared_head.norm", norm_output=False),
}  # fmt: skip


def _stored(target: Checkpoint) -> Mapping[str, StoredTensor]:
    """Tensors of its files that hold plain numbers, where those are safetensors."""
    stored: Mapping[str, StoredTensor] = getattr(target, "stored", {})
    return {name: tensor for name, tensor in stored.items() if tensor.dtype in TYPES}


def dialect_of(target: Checkpoint) -> str | None:
    """Of the module that the target's files hold, if they do and our heads can run it."""
    stored, layers = _stored(target), target.config.num_layers
    for dialect, names in DIALECTS.items():
        if names.stored("fc.weight", layers) in stored:
            found = [down for down in DOWN if names.stored(LAYER + down, layers) in stored]
            return dialect if found and (found[0] == DOWN[0] or target.config.experts) else None
    return None


def mtp_head(target: Checkpoint) -> Head:
    dialect, model, stored = dialect_of(target), target.config, _stored(target)
    if dialect is None:
        remedy = "leave speculative_config out, or name another method"
        raise ConfigError(f"{target.name} holds no module for multi-token prediction that is known; {remedy}")
    names = DIALECTS[dialect]
    is_dense = names.stored("midlayer.mlp.down_proj.weight", model.num_layers) in stored
    experts = None if is_dense or model.experts is None else replace(model.experts, dense_layers=())
    config = MtpConfig(
        target_name=target.name, target_hash="", vocab_size=model.vocab_size, hidden_size=model.hidden_size,
        target_layers=model.num_layers, rms_eps=model.rms_eps, draft_vocab_size=model.vocab_size,
        has_lm_head=False, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, intermediate_size=model.intermediate_size, rope=model.rope,
        qk_norm=model.qk_norm, has_bias=model.qkv_bias, is_gated=model.gated_attention,
        rotary_dim=model.rotary_dim, experts=experts, norm_output=names.norm_output,
    )  # fmt: skip
    tensors = dict[str, torch.Tensor]()
    for name, place in _places(target, names, config).items():
        found = {tensor: stored[tensor].shape for tensor in place.tensors if tensor in stored}
        check_shapes(target.path, found, dict.fromkeys(place.tensors, place.shape))
        weight = torch.cat([read_part(stored[part.tensor], part) for part in place.parts(ALL)])
        if not bool(torch.isfinite(weight).all()):
            where = place.tensors[0]
            raise ModelFileError(f"{target.path}: tensor {where} holds numbers that are not finite; fetch it")
        if ".mlp.experts." not in name:  # they are many, and stay in the type they are stored in
            weight = weight.to(torch.float32)
        tensors[name] = weight + 1 if model.family in OFFSET and "norm" in name else weight
    if names.is_swapped:
        tensors["fc.weight"] = tensors["fc.weight"].roll(model.hidden_size, 1)
    tied = model.tie_embeddings
    tensors["lm_head.weight"] = target.tensor("embed_tokens.weight" if tied else "lm_head.weight")
    return Head(config, tensors, str(target.path), dialect)


def _places(target: Checkpoint, names: Names, config: MtpConfig) -> dict[str, Place]:
    """Of every tensor of the head: its layer's are found as those of a model of one layer are."""
    layers, own = target.config.num_layers, "layers.0."
    begin = names.stored(LAYER, layers)
    there = {own + name.removeprefix(begin) for name in _stored(target) if name.startswith(begin)}
    found = places_of(layer_config(config), there, "", "")
    places = {}
    for name, shape in tensor_shapes(config).items():
        if name.startswith(LAYER):
            place = found[own + name.removeprefix(LAYER)]
            tensors = [begin + tensor.removeprefix(own) for tensor in place.tensors]
            places[name] = place._replace(tensors=tensors)
        else:
            places[name] = Place([names.stored(name, layers)], shape, (range(shape[0]),))
    return places
