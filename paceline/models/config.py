"""What a dense decoder is, independent of the file it came from: both loaders produce this one description.

Weight names are Hugging Face's without the leading `model.`; norm weights multiply as they are (gemma's "+1"
is folded in by the loader).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_5"]


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
class RecurrentConfig:
    """Layers with a gated delta rule (DeltaNet): a matrix of state a head instead of keys and values, and a
    short convolution before it."""

    layers: tuple[bool, ...]  # which are; the others attend
    key_heads: int
    value_heads: int  # a multiple
    key_dim: int
    value_dim: int
    kernel: int = 4  # tokens that the convolution sees

    @property
    def mixed_width(self) -> int:
        """What the convolution reads of a row: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def num_bytes(self) -> int:
        """Of one version of all layers' states."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return 4 * sum(self.layers) * (matrices + (self.kernel - 1) * self.mixed_width)

    def weight_names(self, hidden: int) -> dict[str, tuple[int, ...]]:
        heads, width = self.value_heads, self.value_heads * self.value_dim
        return {
            "in_proj_qkv.weight": (self.mixed_width, hidden), "in_proj_z.weight": (width, hidden),
            "in_proj_b.weight": (heads, hidden), "in_proj_a.weight": (heads, hidden),
            "conv1d.weight": (self.mixed_width, 1, self.kernel), "dt_bias": (heads,), "A_log": (heads,),
            "norm.weight": (self.value_dim,), "out_proj.weight": (hidden, width),
        }  # fmt: skip


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
    gated_attention: bool = False  # what is attended is multiplied by a sigmoid, of rows beside each query's
    recurrent: RecurrentConfig | None = None

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    def is_local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and self.recurrent.layers[layer]

    @property
    def num_attending(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - (sum(self.recurrent.layers) if self.recurrent is not None else 0)

    def weight_names(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the decoder reads, with its shape: loaders check files against it before they read."""
        h, d, inner = self.hidden_size, self.head_dim, self.intermediate_size
        names: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, h), "norm.weight": (h,)}
        if not self.tie_embeddings:
            names["lm_head.weight"] = (self.vocab_size, h)
        attention: dict[str, tuple[int, ...]] = {}
        queries = self.num_heads * (2 if self.gated_attention else 1)
        for proj, heads in (("q", queries), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
            attention[f"self_attn.{proj}_proj.weight"] = (heads * d, h)
            if self.qkv_bias:
                attention[f"self_attn.{proj}_proj.bias"] = (heads * d,)
        attention["self_attn.o_proj.weight"] = (h, self.num_heads * d)
        if self.qk_norm:
            attention |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
        linear = {} if self.recurrent is None else self.recurrent.weight_names(h)
        linear = {f"linear_attn.{name}": shape for name, shape in linear.items()}
        layer: dict[str, tuple[int, ...]] = {f"mlp.{name}_proj.weight": (inner, h) for name in ("gate", "up")}
        layer["mlp.down_proj.weight"] = (h, inner)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.sandwich_norm else []
        layer |= {f"{norm}.weight": (h,) for norm in norms}
        for i in range(self.num_layers):
            mixer = linear if self.is_recurrent(i) else attention
            names |= {f"layers.{i}.{n}": shape for n, shape in (mixer | layer).items()}
        return names
