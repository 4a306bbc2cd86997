"""What a dense decoder is, independent of the file it came from: both loaders produce this one description.

Weight names are Hugging Face's without the leading `model.`; norm weights multiply as they are (gemma's "+1"
is folded in by the loader).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, and how its frequencies are scaled for long contexts."""

    theta: float = 10_000.0
    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8_192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    divisors: tuple[float, ...] | None = None  # [head_dim / 2]: a GGUF `rope_freqs.weight`


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
    qk_norm: bool = False
    sandwich_norm: bool = False  # gemma: a second norm after attention and after the MLP
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    attention_scale: float = 0.0  # multiplies q·k; 0 means head_dim ** -0.5
    sliding_window: int | None = None
    local_layers: tuple[bool, ...] = ()  # which layers use the sliding window; empty: none

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    def is_local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]

    def weight_names(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the decoder reads, with its shape: loaders check files against it before they read."""
        h, d, inner = self.hidden_size, self.head_dim, self.intermediate_size
        names: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, h), "norm.weight": (h,)}
        if not self.tie_embeddings:
            names["lm_head.weight"] = (self.vocab_size, h)
        layer: dict[str, tuple[int, ...]] = {}
        for proj, heads in (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
            layer[f"self_attn.{proj}_proj.weight"] = (heads * d, h)
            if self.qkv_bias:
                layer[f"self_attn.{proj}_proj.bias"] = (heads * d,)
        layer["self_attn.o_proj.weight"] = (h, self.num_heads * d)
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
        layer |= {"mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h)}
        layer["mlp.down_proj.weight"] = (h, inner)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.sandwich_norm else []
        layer |= {f"{norm}.weight": (h,) for norm in norms}
        return names | {
            f"layers.{i}.{n}": shape for i in range(self.num_layers) for n, shape in layer.items()
        }
