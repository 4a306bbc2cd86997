"""What a dense decoder is, independent of the file it came from: both loaders produce this one description.

Weight names are Hugging Face's without the leading `model.`; norm weights multiply as they are (gemma's "+1"
is folded in by the loader); phi's fused projections are named by their parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma3",
    "smollm3", "phi3", "olmo2", "olmo3", "ministral3", "granite",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, and how its frequencies are scaled for long contexts."""

    theta: float = 10_000.0
    kind: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8_192  # llama3, yarn, longrope, query_beta
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    # of cosines and sines; yarn: None is 0.1 ln(factor) + 1; longrope: None is 1
    attention_factor: float | None = None
    # [rotary width / 2]: a GGUF `rope_freqs.weight`, or LongRoPE's factors of contexts up to the original
    divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] | None = None  # LongRoPE's factors of longer contexts
    truncate: bool = True  # yarn: the dimensions it blends between are whole numbers
    # Ministral 3: a query is multiplied by 1 + query_beta ln(1 + floor(position / original_context))
    query_beta: float = 0.0


NO_ROPE = RopeConfig(kind="linear", factor=math.inf)  # every angle is zero: nothing turns


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    rope: RopeConfig
    rope_local: RopeConfig | None = None  # gemma 3: rotary embedding of the sliding-window layers
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of what follows attention
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # OLMo: one norm over all heads together
    sandwich_norm: bool = False  # gemma: a second norm after attention and after the MLP
    post_norm: bool = False  # OLMo 2: norms after attention and after the MLP alone
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    attention_scale: float = 0.0  # multiplies q·k; 0 means head_dim ** -0.5
    residual_scale: float = 1.0  # multiplies what attention and the ffn add to the residual stream
    logits_scale: float = 1.0  # multiplies logits
    rotary_dim: int = 0  # the first dimensions of a head, which turn; 0 means all
    rope_layers: tuple[bool, ...] = ()  # which layers turn queries and keys; empty: all
    attention_sinks: bool = False  # gpt-oss: each head has a logit more, which weighs and has no value
    sliding_window: int | None = None
    local_layers: tuple[bool, ...] = ()  # which layers use the sliding window; empty: none

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    @property
    def rotary_width(self) -> int:
        return self.rotary_dim or self.head_dim

    def is_local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]

    def rope_of(self, layer: int) -> RopeConfig:
        if self.rope_layers and not self.rope_layers[layer]:
            return NO_ROPE
        return self.rope_local if self.rope_local and self.is_local(layer) else self.rope

    def weight_names(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the decoder reads, with its shape: loaders check files against it before they read."""
        h, d, inner = self.hidden_size, self.head_dim, self.intermediate_size
        names: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, h), "norm.weight": (h,)}
        if not self.tie_embeddings:
            names["lm_head.weight"] = (self.vocab_size, h)
        layer: dict[str, tuple[int, ...]] = {}

        def linear(name: str, out: int, width: int, has_bias: bool) -> None:
            layer[f"{name}.weight"] = (out, width)
            if has_bias:
                layer[f"{name}.bias"] = (out,)

        for proj, heads in (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
            linear(f"self_attn.{proj}_proj", heads * d, h, self.qkv_bias)
        linear("self_attn.o_proj", h, self.num_heads * d, self.out_bias)
        if self.qk_norm:
            own = (self.num_heads, self.num_kv_heads) if self.qk_norm_whole else (1, 1)
            layer |= {f"self_attn.{n}_norm.weight": (count * d,) for n, count in zip("qk", own, strict=True)}
        if self.attention_sinks:
            layer["self_attn.sinks"] = (self.num_heads,)
        for proj in ("gate", "up"):
            linear(f"mlp.{proj}_proj", inner, h, self.mlp_bias)
        linear("mlp.down_proj", h, inner, self.mlp_bias)
        layer |= {f"{norm}_layernorm.weight": (h,) for norm in self.layer_norms()}
        return names | {
            f"layers.{i}.{n}": shape for i in range(self.num_layers) for n, shape in layer.items()
        }

    def layer_norms(self) -> tuple[str, ...]:
        """Those over the residual stream, without `_layernorm`."""
        if self.post_norm:
            return ("post_attention", "post_feedforward")
        first = ("input", "post_attention")
        return (*first, "pre_feedforward", "post_feedforward") if self.sandwich_norm else first
