"""What a GGUF file says before its weights: metadata, where each tensor lies, and the ModelConfig of both.

Invariant: every count, length and offset is checked against the bytes that are really there before it sizes
anything, so a hostile file costs no more memory than itself (the gguf package's own reader trusts counts); a
key that would change the computation is honoured or refused by name.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline.core.errors import ModelFileError
from paceline.loaders.expert_config import EXPERT_FAMILIES, gguf_experts
from paceline.loaders.fields import MAX_LAYERS, Fields, family_config
from paceline.loaders.hf_config import PARTLY_TURNED
from paceline.models.config import Family, ModelConfig, RecurrentConfig, RopeConfig

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # metadata keys; tensors
MAX_ELEMENTS = 1 << 23  # of all metadata arrays together; the largest vocabularies need about a million
MAX_STRING = 1 << 24
MAX_DIMS = 4

# The format's value types, by number. Strings (8) and arrays (9) have a length of their own.
STRING, ARRAY = 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SCALARS = {kind: struct.Struct("<" + code) for kind, code in CODES.items()}
UINT32, UINT64 = SCALARS[4], SCALARS[10]

# by architecture; some of the same architecture are told apart by what they hold
FAMILIES: dict[str, Family] = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3",
    "smollm3": "smollm3", "phi3": "phi3", "olmo2": "olmo2", "granite": "granite", "mistral3": "ministral3",
    "olmoe": "olmoe", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "granitemoe": "granitemoe", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss",
    "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe", "qwen3next": "qwen3_next",
}  # fmt: skip
PATTERN = "attention.sliding_window_pattern"
REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "attention.temperature_length")
# What only some families' graphs read, under the names of ModelConfig.
SCALES = {"embedding_scale": "embed_scale", "residual_scale": "residual_scale", "logit_scale": "logits_scale"}
# of layers with windows, or without rotary embedding
PERIODS = {"gemma3": 6, "olmo3": 4, "smollm3": 4, "gpt_oss": 2}
HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# The one gemma 3 whose attention scale is not that of its head size; its files do not say so.
GEMMA3_27B_LAYERS = 62

Divisors = tuple[float, ...] | None  # [head_dim / 2]
TOP_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip
WHOLE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip
AFTER = {"post_attention_layernorm": "post_attention_norm"}
HYBRID = {
    **AFTER, "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    **{f"linear_attn.{name}": f"ssm_{name}" for name in ("conv1d", "norm")},
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
SANDWICH = {**AFTER, "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
FAMILY_NAMES: dict[Family, dict[str, str]] = {
    "gemma3": SANDWICH, "olmo2": SANDWICH, "olmo3": SANDWICH, "glm4_moe": AFTER, "gpt_oss": AFTER,
    "qwen3_5": HYBRID, "qwen3_5_moe": HYBRID,
    "qwen3_next": HYBRID | {f"linear_attn.in_proj_{name}": "ssm_ba" for name in "ba"},
    "phi3": {  # the gate lies before what it gates
        **{f"self_attn.{name}_proj": "attn_qkv" for name in "qkv"},
        "mlp.gate_proj": "ffn_up", "mlp.up_proj": "ffn_up",
    },
}  # fmt: skip


class TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]  # outermost dimension first, as numpy and torch have it
    kind: int  # number of the quantization type
    offset: int  # from the start of the data section


class GgufHeader(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_start: int
    file_size: int


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header of `path`, or raise a ModelFileError that names the damage."""
    try:
        size = path.stat().st_size
        if size < len(MAGIC):
            raise ModelFileError(f"{path} is only {size} bytes long, which no GGUF file is; fetch it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data, size).header()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error


class _Cursor:
    """A position in the mapped file that only moves forward, and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.at = 0
        self.elements_left = MAX_ELEMENTS

    def header(self) -> GgufHeader:
        if (start := self.take(4)) != MAGIC:
            raise ModelFileError(f"{self.path} is not a GGUF file: it starts with {start!r}, not {MAGIC!r}")
        version = self.number(UINT32)
        if version not in VERSIONS:
            raise self.damage(f"GGUF version {version} is not one of {VERSIONS} (big-endian is not read)")
        num_tensors, num_keys = self.number(UINT64), self.number(UINT64)
        if max(num_tensors, num_keys) > MAX_ENTRIES:
            raise self.damage(f"{num_tensors} tensors and {num_keys} metadata keys, over {MAX_ENTRIES}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text()
            if key in metadata:
                raise self.damage(f"metadata key {key!r} is there twice")
            metadata[key] = self.value(key, self.number(UINT32))
        tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name, num_dims = self.text(), self.number(UINT32)
            if name in tensors:
                raise self.damage(f"tensor {name!r} is there twice")
            if num_dims > MAX_DIMS:
                raise self.damage(f"tensor {name!r} has {num_dims} dimensions")
            shape = tuple(self.number(UINT64) for _ in range(num_dims))[::-1]
            tensors[name] = TensorInfo(name, shape, self.number(UINT32), self.number(UINT64))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.damage(f"general.alignment {alignment!r} is not a power of two")
        data_start = (self.at + alignment - 1) // alignment * alignment
        return GgufHeader(metadata, tensors, data_start, self.size)

    def value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise self.damage(f"metadata key {key!r} has the unknown value type {kind}")
        kind, length = self.number(UINT32), self.number(UINT64)
        self.elements_left -= length
        if self.elements_left < 0:
            raise self.damage(f"metadata array {key!r} has {length} elements, over {MAX_ELEMENTS} in all")
        if kind == STRING:
            return [self.text() for _ in range(length)]
        if kind not in SCALARS:
            raise self.damage(f"metadata array {key!r} has the unknown element type {kind}")
        data = self.take(length * SCALARS[kind].size)
        return list(struct.unpack(f"<{length}{CODES[kind]}", data))

    def text(self) -> str:
        length = self.number(UINT64)
        if length > MAX_STRING:
            raise self.damage(f"a string of {length} bytes, more than the {MAX_STRING} allowed")
        # Some vocabularies hold tokens cut inside a character; a tokenizer must see that they are there.
        return self.take(length).decode("utf-8", errors="replace")

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def take(self, length: int) -> bytes:
        start, self.at = self.at, self.at + length
        if self.at > self.size:
            raise ModelFileError(f"{self.path} is truncated in its header, byte {self.size}; fetch it again")
        return self.data[start : self.at]

    def damage(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} has a damaged GGUF header: {what}; fetch it again")


def gguf_name(config: ModelConfig, name: str) -> str:
    """Where a GGUF file keeps the weight that `config.weight_names()` calls `name`."""
    stem, _, kind = name.rpartition(".")  # kind: weight or bias
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, layer, part = name.split(".", 2)
    if part in WHOLE_NAMES:
        return f"blk.{layer}.{WHOLE_NAMES[part]}"
    names = LAYER_NAMES | FAMILY_NAMES.get(config.family, {})
    return f"blk.{layer}.{names[part.removesuffix(f'.{kind}')]}.{kind}"


def read_config(
    path: Path, header: GgufHeader, divisors: Divisors = None, long_divisors: Divisors = None
) -> ModelConfig:
    """divisors: the rotary ones where the file stores them; a description can do without."""
    arch = Fields(str(path), header.metadata).text("general.architecture")
    if arch not in FAMILIES:
        raise ModelFileError(f"{path}: architecture {arch!r} is not supported; use {', '.join(FAMILIES)}")
    family = FAMILIES[arch]
    # Floats as they were before they became float32.
    exact = {k: float(str(np.float32(v))) if isinstance(v, float) else v for k, v in header.metadata.items()}
    own = {key.removeprefix(f"{arch}."): v for key, v in exact.items() if key.startswith(f"{arch}.")}
    keys = Fields(f"{path}: {arch} metadata", own)
    # mixtral and mistral models have the llama architecture; only the name tells the latter apart.
    if family == "llama" and keys.get("expert_count"):
        family = "mixtral"
    dense = () if family in EXPERT_FAMILIES else ("expert_count",)
    keys.refuse_any((*REFUSED, *dense), "use a model without it")
    if family == "llama" and "mistral" in str(header.metadata.get("general.name", "")).lower():
        family = "mistral"
    if family == "olmo2" and keys.get("attention.sliding_window"):
        family = "olmo3"
    is_gemma = family == "gemma3"
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    layers, embedding = keys.count("block_count"), header.tensors.get("token_embd.weight")
    if keys.get("nextn_predict_layers"):  # the last layers only draft
        layers = max(layers - keys.count("nextn_predict_layers"), 1)
    head_dim = keys.count("attention.key_length", hidden // heads or None)
    turned = keys.count("rope.dimension_count", head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        is_part = key == "rope.dimension_count" and family in PARTLY_TURNED
        if keys.count(key, head_dim) != head_dim and not is_part:
            raise keys.refuse(key, f"differs from the head size {head_dim}, which is not supported")
    window = keys.count("attention.sliding_window") if keys.get("attention.sliding_window") else None
    scale = (hidden / heads) ** -0.5 if is_gemma and layers == GEMMA3_27B_LAYERS else 0.0
    vocab_size = keys.count("vocab_size", embedding.shape[0] if embedding and embedding.shape else None)
    rope = _rope(keys, 1_000_000.0 if is_gemma else 10_000.0, divisors, long_divisors)
    rope = replace(rope, truncate=family != "gpt_oss")
    local = RopeConfig(theta=keys.number("rope.freq_base_swa", 10_000.0 if is_gemma else rope.theta))
    some_layers = range(min(layers, MAX_LAYERS + 1))
    has_norms = "blk.0.attn_q_norm.weight" in header.tensors
    more: dict[str, Any] = {"qk_norm": has_norms} if family == "glm4_moe" else {}
    if family in HYBRID_FAMILIES:
        more |= {"gated_attention": True, "recurrent": _recurrent(keys, header, some_layers)}
    return family_config(
        str(path), family, hidden_size=hidden, vocab_size=vocab_size, num_layers=layers, num_heads=heads,
        head_dim=head_dim, num_kv_heads=keys.count("attention.head_count_kv", heads),
        intermediate_size=keys.count("feed_forward_length", keys.get("expert_feed_forward_length")),
        max_context=keys.count("context_length"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope if family != "ministral3" else _with_query_scale(keys, rope),
        rope_local=local if is_gemma or (family == "olmo3" and local != rope) else None,
        rope_layers=tuple((i + 1) % PERIODS[family] > 0 for i in some_layers) if family == "smollm3" else (),
        rotary_dim=0 if turned == head_dim else turned,
        tie_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors, out_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors, sliding_window=window,
        local_layers=_windows(keys, family, some_layers) if window else (),
        attention_scale=keys.number("attention.scale") if keys.get("attention.scale") else scale,
        experts=gguf_experts(family, keys, layers, header.tensors), **more, **_scales(keys, family),
    )  # fmt: skip


def _recurrent(keys: Fields, header: GgufHeader, layers: range) -> RecurrentConfig:
    heads = keys.count("ssm.time_step_rank")
    return RecurrentConfig(
        tuple(f"blk.{i}.ssm_a" in header.tensors for i in layers), keys.count("ssm.group_count"), heads,
        keys.count("ssm.state_size"), keys.count("ssm.inner_size") // heads, keys.count("ssm.conv_kernel"),
    )  # fmt: skip


def _windows(keys: Fields, family: Family, layers: range) -> tuple[bool, ...]:
    """Which layers have one: a flag a layer, or each but the last of every period; 0 means all."""
    if isinstance(pattern := keys.get(PATTERN), list):
        return tuple(map(bool, pattern))
    period = keys.count(PATTERN) if pattern else PERIODS.get(family, 0)
    return tuple(not period or i % period < period - 1 for i in layers)


def _scales(keys: Fields, family: Family) -> dict[str, float]:
    """Granite's; logits are divided by what its files say."""
    if family not in ("granite", "granitemoe"):
        keys.refuse_any(SCALES, f"no {family} model has it")
        return {}
    scales = {name: keys.number(key, 1.0) for key, name in SCALES.items()}
    return scales | {"logits_scale": 1.0 / scales["logits_scale"]}


def _with_query_scale(keys: Fields, rope: RopeConfig) -> RopeConfig:
    if not keys.get("attention.temperature_scale"):
        return rope
    original = keys.count("rope.scaling.original_context_length")
    return replace(rope, query_beta=keys.number("attention.temperature_scale"), original_context=original)


def _rope(keys: Fields, default_theta: float, divisors: Divisors, long_divisors: Divisors) -> RopeConfig:
    kind = keys.text("rope.scaling.type", "none")
    theta = keys.number("rope.freq_base", default_theta)
    if long_divisors is not None:  # whatever the type is called: phi files leave it out
        context = keys.count("context_length")
        original = keys.count("rope.scaling.original_context_length", context)
        return RopeConfig(
            theta, "longrope", context / original, divisors=divisors, long_divisors=long_divisors,
            original_context=original, attention_factor=keys.number("rope.scaling.attn_factor", 1.0),
        )  # fmt: skip
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
        attention_factor=_boost(keys, factor, boost),
    )  # fmt: skip


def _boost(keys: Fields, factor: float, boost: float) -> float | None:
    """Yarn's factor of cosines and sines: as stated, or from the logarithm of its scaling (None)."""
    if keys.get("rope.scaling.yarn_attn_factor"):
        return keys.number("rope.scaling.yarn_attn_factor")
    usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
    if keys.get("rope.scaling.yarn_log_multiplier"):
        slope = 0.1 * keys.number("rope.scaling.yarn_log_multiplier")
        return boost * usual / (slope * math.log(max(factor, 1.0)) + 1.0)
    return None if boost == 1.0 else boost * usual
