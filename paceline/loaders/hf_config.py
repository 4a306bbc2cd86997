"""config.json of a Hugging Face folder to a ModelConfig.

Invariant: an absent key means what the family's default is; a key that asks for something the decoder does
not do is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import MAX_LAYERS, Fields, family_config
from paceline.models.config import Family, ModelConfig, RopeConfig

FAMILIES: dict[str, Family] = {name: name for name in get_args(Family)} | {"gemma3_text": "gemma3"}
REFUSED = (
    "num_local_experts", "num_experts", "attn_logit_softcapping",
    "final_logit_softcapping", "attention_bias", "mlp_bias", "use_bidirectional_attention",
)  # fmt: skip
# What an absent key means; the released multimodal gemma 3 configs rely on it most.
DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4_096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4_096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4_096, "max_window_layers": 28},
    "gemma3": {
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
        "sliding_window": 4_096, "sliding_window_pattern": 6,
    },
}  # fmt: skip


def read_config(source: str, values: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json; `source` names it in errors."""
    outer = Fields(source, values)
    name = outer.text("model_type")
    if name not in FAMILIES:
        raise ModelFileError(f"{source}: model type {name!r} is not supported; use {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    keys = outer.section("text_config") if "text_config" in values else outer
    keys = Fields(keys.source, DEFAULTS[family] | dict(keys.values))
    keys.refuse_any(REFUSED, "use a dense model without it")
    names = ("gelu_pytorch_tanh", "gelu_tanh") if family == "gemma3" else ("silu", "swish")
    for key in ("hidden_act", "hidden_activation"):
        if keys.text(key, names[0]) not in names:
            raise keys.refuse(key, f"is not supported for {family}; use a model with {names[0]}")
    layers = keys.count("num_hidden_layers")
    sizes = layer_sizes(keys, 1_000_000.0 if family == "gemma3" else 10_000.0)
    sizes |= {"num_layers": layers, "max_context": keys.count("max_position_embeddings")}
    sizes["tie_embeddings"] = outer.flag("tie_word_embeddings", keys.flag("tie_word_embeddings", False))
    local_layers = _local_layers(family, keys, min(layers, MAX_LAYERS + 1))
    if any(local_layers):
        sizes |= {"sliding_window": keys.count("sliding_window"), "local_layers": local_layers}
    if family == "gemma3":
        local = keys.section("rope_parameters").section("sliding_attention")
        local_theta = local.number("rope_theta", keys.number("rope_local_base_freq", 10_000.0))
        sizes["rope_local"] = _scaled_rope(local, local_theta, keys)
        scalar = keys.number("query_pre_attn_scalar")
        sizes["attention_scale"] = 0.0 if scalar == sizes["head_dim"] else scalar**-0.5
    return family_config(source, family, qkv_bias=family == "qwen2", **sizes)


def layer_sizes(keys: Fields, default_theta: float = 10_000.0) -> dict[str, Any]:
    """What the configs of models and of heads both say about a layer."""
    sizes: dict[str, Any] = {n: keys.count(n) for n in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = keys.count("num_attention_heads")
    sizes |= {"num_heads": heads, "num_kv_heads": keys.count("num_key_value_heads", heads)}
    sizes["head_dim"] = keys.count("head_dim", sizes["hidden_size"] // heads or None)
    return sizes | {"rms_eps": keys.number("rms_norm_eps", 1e-6), "rope": _rope(keys, default_theta)}


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
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or not all(kind in known for kind in types):
            raise keys.refuse("layer_types", f"holds other kinds than {known}, which are not supported")
        return tuple(kind == "sliding_attention" for kind in types)
    if family == "gemma3":
        period = keys.count("sliding_window_pattern")
        return tuple((i + 1) % period != 0 for i in range(layers))
    first = keys.get("max_window_layers")
    if not isinstance(first, int):
        raise keys.refuse("max_window_layers", "is not a number of layers; fetch the model again")
    return tuple(i >= first for i in range(layers))


def _rope(keys: Fields, default_theta: float) -> RopeConfig:
    """Rotary settings of the layers with full attention, in either spelling."""
    parameters = keys.section("rope_parameters")
    if "full_attention" in parameters.values:
        parameters = parameters.section("full_attention")
    if keys.get("rope_scaling"):
        parameters = keys.section("rope_scaling")
    theta = parameters.number("rope_theta", keys.number("rope_theta", default_theta))
    partial = parameters.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelFileError(f"{keys.source}: partial_rotary_factor = {partial} is not supported, only 1")
    return _scaled_rope(parameters, theta, keys)


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
        return RopeConfig(theta, "llama3", factor, low, high, original)
    if kind != "yarn":
        raise parameters.refuse(key, "is not supported; use a model with default, linear, llama3 or yarn")
    parameters.refuse_any(("mscale", "mscale_all_dim"), "use a model with plain yarn scaling")
    if not parameters.flag("truncate", True):
        raise parameters.refuse("truncate", "is not supported; use a model with plain yarn scaling")
    fast, slow = parameters.number("beta_fast", 32.0), parameters.number("beta_slow", 1.0)
    boost = None if parameters.get("attention_factor") is None else parameters.number("attention_factor")
    return RopeConfig(theta, "yarn", factor, 1.0, 4.0, original, fast, slow, boost)
