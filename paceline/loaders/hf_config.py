"""config.json of a Hugging Face folder to a ModelConfig.

Invariant: an absent key means what the family's default is; a key that asks for something the decoder does
not do is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log, sqrt
from typing import Any, get_args

from paceline.core.errors import ModelFileError
from paceline.loaders.expert_config import COUNTS, EXPERT_FAMILIES, hf_experts
from paceline.loaders.fields import MAX_COUNT, MAX_LAYERS, Fields, family_config
from paceline.models.config import Family, ModelConfig, RecurrentConfig, RopeConfig
from paceline.models.layer import CLAMP, SLOPE

FAMILIES: dict[str, Family] = {name: name for name in get_args(Family)} | {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "clip_qkv")
# of its smallest models: embeddings for each layer, layers that read another's keys and values
OF_GEMMA4 = ("hidden_size_per_layer_input", "num_kv_shared_layers")
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")  # attention over a compressed cache
# Whose classes have biases where these keys ask for them: of q, k, v and o (of the first three alone in some,
# and there in some always); of the MLP.
BIASED = {
    "attention_bias": (
        "llama", "qwen2", "qwen3", "gemma3", "smollm3", "olmo2", "olmo3", "granite", "glm4_moe", "gpt_oss",
    ),
    "mlp_bias": ("llama", "smollm3", "granite"),
}  # fmt: skip
ALWAYS_BIASED, ONLY_INPUTS_BIASED = ("qwen2", "qwen2_moe"), ("qwen2", "glm4_moe")
HYBRID = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
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
    "gemma4": {
        "vocab_size": 262_144, "hidden_size": 2_304, "intermediate_size": 9_216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True, "sliding_window": 512,
        "hidden_size_per_layer_input": 256, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0,
            },
        },
    },
    "qwen3_5": {"num_key_value_heads": 4, **HYBRID},
    "qwen3_5_moe": {
        "num_key_value_heads": 2, "intermediate_size": 512, "shared_expert_intermediate_size": 512, **HYBRID,
    },
    "qwen3_next": {
        "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "norm_topk_prob": True, **HYBRID,
    },
    "smollm3": {
        "num_key_value_heads": 4, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0, "no_rope_layer_interval": 4,
    },
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4_096},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4_096, "sliding_window_pattern": 4,
    },
    "ministral3": {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1,
        },
    },
    "granite": {},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "olmoe": {"rms_norm_eps": 1e-5},
    "qwen2_moe": {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5_632},
    "qwen3_moe": {"num_key_value_heads": 4},
    "granitemoe": {},
    "glm4_moe": {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "norm_topk_prob": True,
        "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128,
        "sliding_window_pattern": 2, "attention_bias": True, "rope_theta": 150_000.0,
    },
}  # fmt: skip
# families with rotary embedding of a part of each head
PARTLY_TURNED = ("phi3", "glm4_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")
MULTIMODAL = ("mistral3",)  # what the text model is, its own section says


def read_config(source: str, values: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json; `source` names it in errors."""
    outer = Fields(source, values)
    name = outer.text("model_type")
    if name in MULTIMODAL:
        name = outer.section("text_config").text("model_type")
    if name in LATENT:
        raise ModelFileError(f"{source}: {name}'s latent attention (MLA) is not supported; use another model")
    if name not in FAMILIES:
        raise ModelFileError(f"{source}: model type {name!r} is not supported; use {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    keys = outer.section("text_config") if "text_config" in values else outer
    keys = Fields(keys.source, DEFAULTS[family] | dict(keys.values))
    refused = (
        *(OF_GEMMA4 if family == "gemma4" else REFUSED),
        *(("use_sliding_window",) if family in EXPERT_FAMILIES else COUNTS),
    )
    keys.refuse_any(refused, "use a model without it")
    names = ("gelu_pytorch_tanh", "gelu_tanh") if family in ("gemma3", "gemma4") else ("silu", "swish")
    for key in ("hidden_act", "hidden_activation"):
        if keys.text(key, names[0]) not in names:
            raise keys.refuse(key, f"is not supported for {family}; use a model with {names[0]}")
    layers = keys.count("num_hidden_layers")
    turns_part = family in PARTLY_TURNED
    sizes = layer_sizes(keys, 1_000_000.0 if family == "gemma3" else 10_000.0, turns_part=turns_part)
    sizes |= {"num_layers": layers, "max_context": keys.count("max_position_embeddings")}
    sizes |= _biases(family, keys)
    sizes["tie_embeddings"] = outer.flag("tie_word_embeddings", keys.flag("tie_word_embeddings", False))
    if "linear_num_key_heads" in DEFAULTS[family]:
        sizes |= {"gated_attention": True, "recurrent": _recurrent(keys, min(layers, MAX_LAYERS + 1))}
    local_layers = _local_layers(family, keys, min(layers, MAX_LAYERS + 1))
    if any(local_layers):
        sizes |= {"sliding_window": keys.count("sliding_window"), "local_layers": local_layers}
    sizes |= {"experts": hf_experts(family, keys, layers)} | _own_settings(family, keys, sizes)
    return family_config(source, family, **sizes)


def _own_settings(family: Family, keys: Fields, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What only configs of one family say."""
    if family == "gemma4":
        return _of_gemma4(keys, sizes)
    if family in ("gemma3", "olmo3"):  # layers with a window have rotary settings of their own
        local = keys.section("rope_parameters").section("sliding_attention")
        key = "rope_local_base_freq" if family == "gemma3" else "rope_theta"
        rope = _scaled_rope(local, local.number("rope_theta", keys.number(key, 10_000.0)), keys)
        if family == "olmo3":
            return {"rope_local": None if rope == sizes["rope"] else rope}
        scalar = keys.number("query_pre_attn_scalar")
        return {"rope_local": rope, "attention_scale": 0.0 if scalar == sizes["head_dim"] else scalar**-0.5}
    if family == "smollm3":
        has_rope = _rope_layers(keys, min(sizes["num_layers"], MAX_LAYERS + 1))
        return {"rope_layers": () if all(has_rope) else has_rope}
    if family == "ministral3" and keys.section("rope_parameters").get("llama_4_scaling_beta"):
        parameters = keys.section("rope_parameters")
        original = parameters.count("original_max_position_embeddings")
        beta = parameters.number("llama_4_scaling_beta")
        return {"rope": replace(sizes["rope"], query_beta=beta, original_context=original)}
    for key, known in (("swiglu_limit", CLAMP), ("swiglu_alpha", SLOPE)):
        if family == "gpt_oss" and keys.number(key, known) != known:
            raise keys.refuse(key, f"is not supported; use a model with {known}")
    if family in ("granite", "granitemoe"):
        scales = {"embed": "embedding", "attention": "attention", "residual": "residual"}
        found = {f"{ours}_scale": keys.number(f"{theirs}_multiplier", 1.0) for ours, theirs in scales.items()}
        return found | {"logits_scale": 1.0 / keys.number("logits_scaling", 1.0)}
    return {"qk_norm": keys.flag("use_qk_norm", False)} if family == "glm4_moe" else {}


def _of_gemma4(keys: Fields, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without a window have heads of their own, as released files or as newer ones say it."""
    if keys.get("use_bidirectional_attention") not in (None, "vision"):
        raise keys.refuse("use_bidirectional_attention", "is not supported; use a model without it")
    cap = keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else 0.0
    local = keys.section("rope_parameters").section("sliding_attention")
    found: dict[str, Any] = {
        "logits_cap": cap, "rope_local": _scaled_rope(local, local.number("rope_theta", 10_000.0), keys),
        "global_head_dim": keys.count("global_head_dim"), "global_kv_heads": sizes["num_kv_heads"],
    }  # fmt: skip
    if keys.flag("attention_k_eq_v", False):
        found["global_kv_heads"] = keys.count("num_global_key_value_heads", sizes["num_kv_heads"])
    layers = keys.section("per_layer_config")
    stated = [layers.section(key) for key in layers.values]
    for own in stated:
        if own.values != stated[0].values or own.values.keys() - {"head_dim", "num_key_value_heads"}:
            raise keys.refuse("per_layer_config", "is not supported; use a model with two kinds of heads")
        found["global_head_dim"] = own.count("head_dim", found["global_head_dim"])
        found["global_kv_heads"] = own.count("num_key_value_heads", found["global_kv_heads"])
    numbers = [
        str(i) for i in range(sizes["num_layers"]) if not any(sizes.get("local_layers", ())[i : i + 1])
    ]
    if stated and sorted(layers.values) != sorted(numbers):
        raise keys.refuse("per_layer_config", "is not of the layers with full attention; fetch it again")
    return found


def _biases(family: Family, keys: Fields) -> dict[str, bool]:
    for key, families in BIASED.items():
        if family not in families:
            keys.refuse_any([key], f"no {family} model has it, use one without")
    asked, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    qkv_bias = asked or (family in ALWAYS_BIASED and keys.flag("qkv_bias", True))
    out_bias = asked and family not in ONLY_INPUTS_BIASED
    return {"qkv_bias": qkv_bias, "out_bias": out_bias, "mlp_bias": mlp_bias}


def _rope_layers(keys: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers turn queries and keys."""
    stated = keys.get("no_rope_layers")
    if stated is None:
        return _but_last(keys.count("no_rope_layer_interval"), layers)
    if not isinstance(stated, list) or not all(flag in (0, 1) for flag in stated):
        raise keys.refuse("no_rope_layers", "is not a list of 0 and 1, one a layer; fetch the model again")
    return tuple(map(bool, stated))


def layer_sizes(keys: Fields, default_theta: float = 10_000.0, *, turns_part: bool = False) -> dict[str, Any]:
    """What the configs of models and of heads both say about a layer. turns_part: rotary embedding may be of
    a part of each head."""
    sizes: dict[str, Any] = {n: keys.count(n) for n in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = keys.count("num_attention_heads")
    sizes |= {"num_heads": heads, "num_kv_heads": keys.count("num_key_value_heads", heads)}
    sizes["head_dim"] = keys.count("head_dim", sizes["hidden_size"] // heads or None)
    parameters, theta = _rope_parameters(keys, default_theta)
    partial = parameters.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if partial != 1.0 and parameters.get("rope_type") != "proportional":
        sizes["rotary_dim"] = int(sizes["head_dim"] * partial)
        if not (turns_part and 0 < sizes["rotary_dim"] < sizes["head_dim"]):
            known = f"only 1, and less for {', '.join(PARTLY_TURNED)}"
            what = f"partial_rotary_factor = {partial} is not supported, {known}"
            raise ModelFileError(f"{keys.source}: {what}")
    rope = _scaled_rope(parameters, theta, keys)
    return sizes | {"rms_eps": keys.number("rms_norm_eps", 1e-6), "rope": rope}


def _recurrent(keys: Fields, layers: int) -> RecurrentConfig:
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    spelled = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = {name: keys.count(f"linear_{key}") for name, key in zip(names, spelled, strict=True)}
    period, listed = keys.count("full_attention_interval", 4), _layers_of(keys, "linear_attention")
    return RecurrentConfig(_but_last(period, layers) if listed is None else listed, **sizes)


def _layers_of(keys: Fields, kind: str) -> tuple[bool, ...] | None:
    """Which layers are of a kind, all others having full attention; None: the config does not list them."""
    types, known = keys.get("layer_types"), ("full_attention", kind)
    if types is None:
        return None
    if not isinstance(types, list) or not all(each in known for each in types):
        raise keys.refuse("layer_types", f"holds other kinds than {known}, which are not supported")
    return tuple(each == kind for each in types)


def _but_last(period: int, layers: int) -> tuple[bool, ...]:
    """Each layer but the last of every period."""
    return tuple((i + 1) % period != 0 for i in range(layers))


def _local_layers(family: Family, keys: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers see only a sliding window."""
    if family in ("llama", "olmo2", "granite", "qwen3_5") or keys.get("sliding_window") is None:
        return ()
    if family in ("mistral", "ministral3", "phi3", "mixtral"):
        return (True,) * layers
    asks, never = ("qwen2", "qwen3", "smollm3"), set(EXPERT_FAMILIES) - {"gpt_oss", "gemma4"}
    if family in never or (family in asks and not keys.flag("use_sliding_window", False)):
        return ()
    if (listed := _layers_of(keys, "sliding_attention")) is not None:
        return listed
    if family == "gemma4":
        return (*_but_last(6, layers)[:-1], False)
    if family in ("gemma3", "olmo3", "gpt_oss"):
        return _but_last(keys.count("sliding_window_pattern"), layers)
    if family == "smollm3":
        return tuple(not has_rope for has_rope in _rope_layers(keys, layers))
    first = keys.get("max_window_layers")
    if not isinstance(first, int):
        raise keys.refuse("max_window_layers", "is not a number of layers; fetch the model again")
    return tuple(i >= first for i in range(layers))


def _rope_parameters(keys: Fields, default_theta: float) -> tuple[Fields, float]:
    """Rotary settings of the layers with full attention, in either spelling, and their base."""
    parameters = keys.section("rope_parameters")
    if "full_attention" in parameters.values:
        parameters = parameters.section("full_attention")
    if keys.get("rope_scaling"):
        parameters = keys.section("rope_scaling")
    return parameters, parameters.number("rope_theta", keys.number("rope_theta", default_theta))


def _scaled_rope(parameters: Fields, theta: float, keys: Fields) -> RopeConfig:
    key = parameters.spelling("rope_type", "type")
    kind = parameters.text(key, "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "longrope" or parameters.get("long_factor"):  # phi's old names of it: su, yarn
        return _long_rope(parameters, theta, keys)
    if kind == "proportional" and parameters.get("factor") is None:
        return RopeConfig(theta, "proportional", parameters.number("partial_rotary_factor", 1.0))
    factor = parameters.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    original = parameters.count("original_max_position_embeddings", keys.count("max_position_embeddings"))
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        return RopeConfig(theta, "llama3", factor, low, high, original)
    if kind != "yarn":
        known = "default, linear, llama3, yarn or longrope"
        raise parameters.refuse(key, f"is not supported; use a model with {known}")
    fast, slow = parameters.number("beta_fast", 32.0), parameters.number("beta_slow", 1.0)
    boost = None
    if parameters.get("attention_factor") is not None:
        boost = parameters.number("attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        slope = 0.1 * log(max(factor, 1.0))
        boost = 1 + slope * parameters.number("mscale")
        boost /= 1 + slope * parameters.number("mscale_all_dim")
    truncate = parameters.flag("truncate", True)
    return RopeConfig(theta, "yarn", factor, 1.0, 4.0, original, fast, slow, boost, truncate=truncate)


def _long_rope(parameters: Fields, theta: float, keys: Fields) -> RopeConfig:
    """The boost is of the context that the file states, whichever set of factors applies (models/rope.py)."""
    longest, name = keys.count("max_position_embeddings"), "original_max_position_embeddings"
    original = keys.count(name) if keys.get(name) is not None else parameters.count(name, longest)
    factor = parameters.number("factor", min(longest / original, MAX_COUNT))
    boost = sqrt(1 + log(factor) / log(original)) if factor > 1 < original else 1.0
    if parameters.get("attention_factor") is not None:
        boost = parameters.number("attention_factor")
    return RopeConfig(
        theta, "longrope", factor, original_context=original, attention_factor=boost,
        divisors=parameters.factors("short_factor"), long_divisors=parameters.factors("long_factor"),
    )  # fmt: skip
