"""What a decoder is, independent of the file it came from: both loaders produce this one description.

Weight names are Hugging Face's without the leading `model.`; norm weights multiply as they are (gemma's "+1"
is folded in by the loader). Experts of a layer lie one below the other in one matrix, whatever a file does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma3",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "granitemoe", "glm4_moe",
]  # fmt: skip


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
class ExpertsConfig:
    """An ffn of many experts, of which a router wakes a few for each token.

    A softmax over the chosen experts alone is one over all of them with `normalizes`."""

    count: int
    per_token: int
    inner: int  # width of an expert
    router: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: with a correction of what is chosen by
    normalizes: bool = True  # the chosen experts' shares sum up to `scale`
    scale: float = 1.0  # of all shares
    groups: int = 1  # sigmoid: experts are chosen from the best `top_groups` of so many groups
    top_groups: int = 1
    shared_inner: int = 0  # width of an expert that every token wakes; 0: there is none
    has_shared_gate: bool = False  # its share is the sigmoid of a product with the token; else one
    dense_layers: tuple[int, ...] = ()  # which have a dense ffn instead

    def expected_woken(self, rows: float) -> float:
        """Distinct experts that this many rows wake in a layer if each chooses for itself."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)

    def weight_names(self, hidden: int) -> dict[str, tuple[int, ...]]:
        count, inner, shared = self.count, self.inner, self.shared_inner
        names: dict[str, tuple[int, ...]] = {"gate.weight": (count, hidden)}
        if self.router == "sigmoid":
            names["gate.e_score_correction_bias"] = (count,)
        names |= {f"experts.{part}_proj.weight": (count * inner, hidden) for part in ("gate", "up")}
        names["experts.down_proj.weight"] = (count * hidden, inner)
        if shared:
            names |= {f"shared_expert.{part}_proj.weight": (shared, hidden) for part in ("gate", "up")}
            names["shared_expert.down_proj.weight"] = (hidden, shared)
        if self.has_shared_gate:
            names["shared_expert_gate.weight"] = (1, hidden)
        return names


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
    qk_norm_whole: bool = False  # OLMoE: one norm over all heads together
    sandwich_norm: bool = False  # gemma: a second norm after attention and after the MLP
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    attention_scale: float = 0.0  # multiplies q·k; 0 means head_dim ** -0.5
    residual_scale: float = 1.0  # multiplies what attention and the ffn add to the residual stream
    logits_scale: float = 1.0  # multiplies logits
    rotary_dim: int = 0  # the first dimensions of a head, which turn; 0 means all
    sliding_window: int | None = None
    local_layers: tuple[bool, ...] = ()  # which layers use the sliding window; empty: none
    experts: ExpertsConfig | None = None

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    def is_local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None where the ffn is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

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
            widths = (self.num_heads * d, self.num_kv_heads * d) if self.qk_norm_whole else (d, d)
            layer |= {f"self_attn.{p}_norm.weight": (width,) for p, width in zip("qk", widths, strict=True)}
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.sandwich_norm else []
        layer |= {f"{norm}.weight": (h,) for norm in norms}
        dense = {"gate_proj.weight": (inner, h), "up_proj.weight": (inner, h), "down_proj.weight": (h, inner)}
        for i in range(self.num_layers):
            experts = self.experts_of(i)
            ffn = dense if experts is None else experts.weight_names(h)
            own = layer | {f"mlp.{name}": shape for name, shape in ffn.items()}
            names |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
        return names
