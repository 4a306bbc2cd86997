"""GGUF metadata to a ModelConfig, and canonical weight names to GGUF's.

Invariant: a key that would change the computation is either honoured or refused by name, never ignored.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import MAX_LAYERS, Fields, family_config
from paceline.loaders.gguf_header import GgufHeader
from paceline.models.config import Family, ModelConfig, RopeConfig

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
REFUSED = ("expert_count", "attn_logit_softcapping", "final_logit_softcapping")
# The one gemma 3 whose attention scale is not that of its head size; its files do not say so.
GEMMA3_27B_LAYERS = 62

Divisors = tuple[float, ...] | None  # [head_dim / 2]
TOP_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
SANDWICH_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(config: ModelConfig, name: str) -> str:
    """Where a GGUF file keeps the weight that `config.weight_names()` calls `name`."""
    stem, _, kind = name.rpartition(".")  # kind: weight or bias
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".", 2)
    names = LAYER_NAMES | SANDWICH_NAMES if config.sandwich_norm else LAYER_NAMES
    return f"blk.{layer}.{names[part]}.{kind}"


def read_config(path: Path, header: GgufHeader, divisors: Divisors = None) -> ModelConfig:
    """The config of a supported architecture. `divisors` are the rotary ones where the file stores them; they
    change no size, so a description can do without.
    """
    arch = Fields(str(path), header.metadata).text("general.architecture")
    family = next((name for name in FAMILIES if name == arch), None)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelFileError(f"{path}: architecture {arch!r} is not supported; use one of {known}")
    # Floats as they were before they became float32.
    exact = {k: float(str(np.float32(v))) if isinstance(v, float) else v for k, v in header.metadata.items()}
    own = {key.removeprefix(f"{arch}."): v for key, v in exact.items() if key.startswith(f"{arch}.")}
    keys = Fields(f"{path}: {arch} metadata", own)
    keys.refuse_any(REFUSED, "use a dense model without it")
    # mistral models are stored under the llama architecture; only the name tells them apart.
    if family == "llama" and "mistral" in str(header.metadata.get("general.name", "")).lower():
        family = "mistral"
    is_gemma = family == "gemma3"
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    layers, embedding = keys.count("block_count"), header.tensors.get("token_embd.weight")
    head_dim = keys.count("attention.key_length", hidden // heads or None)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.count(key, head_dim) != head_dim:
            raise keys.refuse(key, f"differs from the head size {head_dim}, which is not supported")
    window = keys.count("attention.sliding_window") if keys.get("attention.sliding_window") else None
    scale = (hidden / heads) ** -0.5 if is_gemma and layers == GEMMA3_27B_LAYERS else 0.0
    vocab_size = keys.count("vocab_size", embedding.shape[0] if embedding and embedding.shape else None)
    local_theta = keys.number("rope.freq_base_swa", 10_000.0)
    slides = _local_layers(keys, min(layers, MAX_LAYERS + 1), 6 if is_gemma else 0) if window else ()
    return family_config(
        str(path), family, hidden_size=hidden, vocab_size=vocab_size, num_layers=layers, num_heads=heads,
        head_dim=head_dim, num_kv_heads=keys.count("attention.head_count_kv", heads),
        intermediate_size=keys.count("feed_forward_length"), max_context=keys.count("context_length"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, 1_000_000.0 if is_gemma else 10_000.0, divisors),
        rope_local=RopeConfig(theta=local_theta) if is_gemma else None,
        tie_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors, sliding_window=window, local_layers=slides,
        attention_scale=keys.number("attention.scale") if keys.get("attention.scale") else scale,
    )  # fmt: skip


def _local_layers(keys: Fields, layers: int, default_period: int) -> tuple[bool, ...]:
    """Which layers slide: a flag a layer, or each layer but the last of every period; 0 means all."""
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return tuple(bool(flag) for flag in pattern)
    period = keys.count("attention.sliding_window_pattern") if pattern else default_period
    return tuple(not period or i % period < period - 1 for i in range(layers))


def _rope(keys: Fields, default_theta: float, divisors: Divisors) -> RopeConfig:
    kind = keys.text("rope.scaling.type", "none")
    theta = keys.number("rope.freq_base", default_theta)
    if kind == "none":
        return RopeConfig(theta=theta, divisors=divisors)
    if kind not in ("linear", "yarn"):
        raise keys.refuse("rope.scaling.type", "is not supported; use a model with none, linear or yarn")
    scaling: Literal["linear", "yarn"] = "linear" if kind == "linear" else "yarn"
    factor, boost = keys.number("rope.scaling.factor", 1.0), keys.number("rope.scaling.attn_factor", 1.0)
    return RopeConfig(
        theta, scaling, factor, divisors=divisors,
        original_context=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if boost == 1.0 else boost * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )  # fmt: skip
