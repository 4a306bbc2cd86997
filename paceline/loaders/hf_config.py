"""config.json of a Hugging Face folder to a ModelConfig.

Invariant: what the family's defaults are, an absent key means; a key that asks for something the decoder does
not do is refused by name. Rotary settings are read in both spellings: `rope_theta` + `rope_scaling`, and the
newer `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import MAX_LAYERS, Fields, check_config
from paceline.models.config import Family, ModelConfig, RopeConfig

FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
ACTIVATIONS = {
    "llama": "silu",
    "mistral": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
    "gemma3": "gelu_pytorch_tanh",
}
REFUSED = (
    "quantization_config",
    "num_local_experts",
    "num_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_bias",
    "mlp_bias",
    "use_bidirectional_attention",
)
# What an absent key means; the released multimodal gemma 3 configs rely on it most.
DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4_096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4_096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4_096, "max_window_layers": 28},
    "gemma3": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4_096,
        "sliding_window_pattern": 6,
    },
}


def read_config(source: str, values: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json; `source` names it in errors."""
    outer = Fields(source, values)
    model_type = outer.text("model_type")
    if model_type not in FAMILIES:
        raise ModelFileError(
            f"{source}: model type {model_type!r} is not supported; use one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    if outer.get("quantization_config"):
        raise outer.refuse(
            "quantization_config", "is not supported; use the unquantized model or a GGUF file"
        )
    keys = outer.section("text_config") if "text_config" in values else outer
    keys = Fields(keys.source, DEFAULTS[family] | dict(keys.values))
    _refuse_unsupported(family, keys)
    config = _config(family, keys, outer)
    check_config(source, config)
    return config


def _refuse_unsupported(family: Family, keys: Fields) -> None:
    for key in REFUSED:
        if keys.get(key):
            raise keys.refuse(key, "is not supported; use a dense model without it")
    wanted = ACTIVATIONS[family]
    for key in ("hidden_act", "hidden_activation"):
        if keys.text(key, wanted) not in (wanted, "gelu_tanh" if family == "gemma3" else "swish"):
            raise keys.refuse(key, f"is not supported for {family}; use a model with {wanted}")


def _config(family: Family, keys: Fields, outer: Fields) -> ModelConfig:
    is_gemma = family == "gemma3"
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    head_dim = keys.count("head_dim", hidden // heads or None)
    layers = keys.count("num_hidden_layers")
    local_layers = _local_layers(family, keys, min(layers, MAX_LAYERS + 1))
    return ModelConfig(
        family=family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", heads),
        head_dim=head_dim,
        max_context=keys.count("max_position_embeddings"),
        rms_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope(keys, "full_attention", 1_000_000.0 if is_gemma else 10_000.0),
        rope_local=_gemma_local_rope(keys) if is_gemma else None,
        tie_embeddings=outer.flag("tie_word_embeddings", keys.flag("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norm=is_gemma,
        activation="gelu_tanh" if is_gemma else "silu",
        embed_scale=float(np.float32(hidden**0.5)) if is_gemma else 1.0,
        attention_scale=_gemma_scale(keys, head_dim) if is_gemma else 0.0,
        sliding_window=keys.count("sliding_window") if any(local_layers) else None,
        local_layers=local_layers if any(local_layers) else (),
    )


def _gemma_scale(keys: Fields, head_dim: int) -> float:
    scalar = keys.number("query_pre_attn_scalar")
    return 0.0 if scalar == head_dim else scalar**-0.5


def _local_layers(family: Family, keys: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers see only a sliding window."""
    if family == "llama" or keys.get("sliding_window") is None:
        return ()
    if family == "mistral":
        return (True,) * layers
    if family in ("qwen2", "qwen3") and not keys.flag("use_sliding_window", False):
        return ()
    types = keys.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or not all(
            t in ("full_attention", "sliding_attention") for t in types
        ):
            raise keys.refuse(
                "layer_types",
                "holds other kinds than full_attention and sliding_attention, which are not supported",
            )
        return tuple(t == "sliding_attention" for t in types)
    if family == "gemma3":
        period = keys.count("sliding_window_pattern")
        return tuple((i + 1) % period != 0 for i in range(layers))
    first = keys.get("max_window_layers")
    if not isinstance(first, int):
        raise keys.refuse("max_window_layers", "is not a number of layers; fetch the model again")
    return tuple(i >= first for i in range(layers))


def _rope(keys: Fields, layer_type: str, default_theta: float) -> RopeConfig:
    """Rotary settings of one kind of layer, whichever spelling the file uses."""
    parameters = keys.section("rope_parameters")
    if layer_type in parameters.values:
        parameters = parameters.section(layer_type)
    if keys.get("rope_scaling"):
        parameters = keys.section("rope_scaling")
    theta = parameters.number("rope_theta", keys.number("rope_theta", default_theta))
    partial = parameters.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelFileError(
            f"{keys.source}: partial_rotary_factor = {partial} is not supported; use a model that rotates whole heads"
        )
    return _scaled_rope(parameters, theta, keys)


def rope_of(keys: Fields) -> RopeConfig:
    """Of a config whose layers are all alike."""
    return _rope(keys, "full_attention", 10_000.0)


def _gemma_local_rope(keys: Fields) -> RopeConfig:
    local = keys.section("rope_parameters").section("sliding_attention")
    return _scaled_rope(
        local, local.number("rope_theta", keys.number("rope_local_base_freq", 10_000.0)), keys
    )


def _scaled_rope(parameters: Fields, theta: float, keys: Fields) -> RopeConfig:
    key = "rope_type" if parameters.get("rope_type") is not None else "type"  # `type` is the oldest spelling
    kind = parameters.text(key, "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = parameters.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    original = parameters.count("original_max_position_embeddings", keys.count("max_position_embeddings"))
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=original,
        )
    if kind == "yarn":
        return _yarn(parameters, theta, factor, original)
    raise parameters.refuse(
        key, "is not supported; use a model with default, linear, llama3 or yarn rotary embedding"
    )


def _yarn(parameters: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    for key in ("mscale", "mscale_all_dim"):
        if parameters.get(key):
            raise parameters.refuse(key, "is not supported; use a model with plain yarn scaling")
    if not parameters.flag("truncate", True):
        raise parameters.refuse("truncate", "is not supported; use a model with plain yarn scaling")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        attention_factor=parameters.number("attention_factor")
        if parameters.get("attention_factor") is not None
        else None,
    )
