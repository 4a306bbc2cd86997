"""What a decoder is, independent of the file it came from: both loaders produce this one description.

Weight names are Hugging Face's without the leading `model.`; norm weights multiply as they are (gemma's "+1"
is folded in by the loader); phi's fused projections are named by their parts. Experts of a layer lie one
below the other in one matrix, whatever a file does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma4", "qwen3_5",
    "smollm3", "phi3", "olmo2", "olmo3", "ministral3", "granite",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "granitemoe", "glm4_moe", "gpt_oss",
    "qwen3_5_moe", "qwen3_next",
]  # fmt: skip

# what gates the MLP; clamped: gpt-oss's, silu of a larger slope and with limits, and one is added to `up`
Activation = Literal["silu", "gelu_tanh", "clamped"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, and how its frequencies are scaled for long contexts."""

    theta: float = 10_000.0
    kind: Literal["none", "linear", "proportional", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0  # proportional: the part of a head that turns, with the frequencies of a whole one
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


# of gemma 4: of what experts, the shared one and the router read, and of what the first two add
NORMS_OF_EXPERTS = ("experts", "shared", "router", "after_experts", "after_shared")
NO_ROPE = RopeConfig(kind="linear", factor=math.inf)  # every angle is zero: nothing turns


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
    def state_bytes(self) -> int:
        """Of a layer's matrices, in float32."""
        return 4 * self.value_heads * self.key_dim * self.value_dim

    @property
    def tail_bytes(self) -> int:
        """Of the rows that a layer's convolution will still see."""
        return 4 * (self.kernel - 1) * self.mixed_width

    @property
    def num_bytes(self) -> int:
        """Of one version of all layers' states."""
        return sum(self.layers) * (self.state_bytes + self.tail_bytes)

    def weight_names(self, hidden: int) -> dict[str, tuple[int, ...]]:
        heads, width = self.value_heads, self.value_heads * self.value_dim
        found: dict[str, tuple[int, ...]] = {
            "in_proj_qkv.weight": (self.mixed_width, hidden), "in_proj_z.weight": (width, hidden),
            "in_proj_b.weight": (heads, hidden), "in_proj_a.weight": (heads, hidden),
            "conv1d.weight": (self.mixed_width, 1, self.kernel), "dt_bias": (heads,), "A_log": (heads,),
            "norm.weight": (self.value_dim,), "out_proj.weight": (hidden, width),
        }  # fmt: skip
        return {f"linear_attn.{name}": shape for name, shape in found.items()}


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
    groups: int = 1  # sigmoid: experts are chosen from the best `top_groups` of this many groups
    top_groups: int = 1
    has_bias: bool = False  # gpt-oss: of the router and of every expert
    shared_inner: int = 0  # width of an expert that every token wakes; 0: there is none
    has_shared_gate: bool = False  # its share is the sigmoid of a product with the token; else one
    dense_layers: tuple[int, ...] = ()  # which have a dense ffn instead
    # gemma 4: the shared expert is the dense MLP; it, the router and the experts read the residual stream
    # through a norm each, and what they add is normed; each expert has a scale
    has_norms: bool = False

    def expected_woken(self, rows: float) -> float:
        """Distinct experts that this many rows wake in a layer if each chooses for itself."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)

    def weight_names(self, hidden: int) -> dict[str, tuple[int, ...]]:
        count, inner, shared = self.count, self.inner, self.shared_inner
        names = _linear("gate", count, hidden, self.has_bias)
        if self.router == "sigmoid":
            names["gate.e_score_correction_bias"] = (count,)
        if self.has_norms:
            names |= {f"{name}_norm.weight": (hidden,) for name in NORMS_OF_EXPERTS}
            names["gate.per_expert_scale"] = (count,)
        for part in ("gate", "up"):
            names |= _linear(f"experts.{part}_proj", count * inner, hidden, self.has_bias)
        names |= _linear("experts.down_proj", count * hidden, inner, self.has_bias)
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
    out_bias: bool = False  # of what follows attention
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False  # OLMo: one norm over all heads of a row, not one for each head
    sandwich_norm: bool = False  # gemma: a second norm after attention and after the MLP
    post_norm: bool = False  # OLMo 2: norms after attention and after the MLP alone
    activation: Activation = "silu"
    embed_scale: float = 1.0
    attention_scale: float = 0.0  # multiplies q·k; 0 means head_dim ** -0.5
    residual_scale: float = 1.0  # multiplies what attention and the ffn add to the residual stream
    logits_scale: float = 1.0  # multiplies logits
    logits_cap: float = 0.0  # gemma 4: logits are cap * tanh(logits / cap); 0: as they are
    value_norm: bool = False  # gemma 4: values are normed, without a weight
    layer_scalars: bool = False  # gemma 4: the residual stream after a layer is multiplied by one number
    # gemma 4: heads of layers without a window; 0: all have the same
    global_head_dim: int = 0
    global_kv_heads: int = 0
    rotary_dim: int = 0  # numbers of a head that turn, its first; 0: the whole head
    rope_layers: tuple[bool, ...] = ()  # which layers turn queries and keys; empty: all
    attention_sinks: bool = False  # gpt-oss: each head has a logit more, which weighs and has no value
    sliding_window: int | None = None
    local_layers: tuple[bool, ...] = ()  # which layers use the sliding window; empty: none
    gated_attention: bool = False  # what is attended is multiplied by a sigmoid, of rows beside each query's
    recurrent: RecurrentConfig | None = None
    experts: ExpertsConfig | None = None
    has_embedding: bool = True  # of a stage (stage.py): the first
    has_head: bool = True  # the last, with the final norm

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    @property
    def rotary_width(self) -> int:
        return self.rotary_dim or self.head_dim

    @property
    def kinds(self) -> tuple[ModelConfig, ...]:
        """This model with the heads of each kind of its layers."""
        if not self.global_head_dim:
            return (self,)
        own = replace(self, global_head_dim=0, global_kv_heads=0)
        return own, replace(own, head_dim=self.global_head_dim, num_kv_heads=self.global_kv_heads)

    def kind_of(self, layer: int) -> int:
        return int(self.global_head_dim > 0 and not self.is_local(layer))

    def is_local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and self.recurrent.layers[layer]

    def rope_of(self, layer: int) -> tuple[RopeConfig, int]:
        """And of how many numbers of a head."""
        width = self.kinds[self.kind_of(layer)].rotary_width
        if self.rope_layers and not self.rope_layers[layer]:
            return NO_ROPE, width
        return (self.rope_local if self.rope_local and self.is_local(layer) else self.rope), width

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None where the ffn is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def weight_names(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the decoder reads, with its shape: loaders check files against it before they read."""
        h, inner = self.hidden_size, self.intermediate_size
        names: dict[str, tuple[int, ...]] = {}
        if self.has_embedding:
            names["embed_tokens.weight"] = (self.vocab_size, h)
        if self.has_head:
            names["norm.weight"] = (h,)
            if not self.tie_embeddings:
                names["lm_head.weight"] = (self.vocab_size, h)
        dense: dict[str, tuple[int, ...]] = {}
        for proj in ("gate", "up"):
            dense |= _linear(f"{proj}_proj", inner, h, self.mlp_bias)
        dense |= _linear("down_proj", h, inner, self.mlp_bias)
        norms: dict[str, tuple[int, ...]] = {f"{n}_layernorm.weight": (h,) for n in self.layer_norms()}
        if self.layer_scalars:
            norms["layer_scalar"] = (1,)
        attention = [kind._attention_names() for kind in self.kinds]
        recurrent = {} if self.recurrent is None else self.recurrent.weight_names(h)
        for i in range(self.num_layers):
            mixer = recurrent if self.is_recurrent(i) else attention[self.kind_of(i)]
            experts = self.experts_of(i)
            ffn = dense if experts is None else experts.weight_names(h)
            own = mixer | {f"mlp.{name}": shape for name, shape in ffn.items()} | norms
            names |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
        return names

    def _attention_names(self) -> dict[str, tuple[int, ...]]:
        h, d, found = self.hidden_size, self.head_dim, dict[str, tuple[int, ...]]()
        queries = self.num_heads * (2 if self.gated_attention else 1)
        for proj, heads in (("q", queries), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
            found |= _linear(f"self_attn.{proj}_proj", heads * d, h, self.qkv_bias)
        found |= _linear("self_attn.o_proj", h, self.num_heads * d, self.out_bias)
        if self.qk_norm:
            own = (self.num_heads, self.num_kv_heads) if self.qk_norm_over_heads else (1, 1)
            found |= {f"self_attn.{n}_norm.weight": (count * d,) for n, count in zip("qk", own, strict=True)}
        if self.attention_sinks:
            found["self_attn.sinks"] = (self.num_heads,)
        return found

    def layer_norms(self) -> tuple[str, ...]:
        """Those over the residual stream, without `_layernorm`."""
        if self.post_norm:
            return ("post_attention", "post_feedforward")
        first = ("input", "post_attention")
        if self.experts is not None and self.experts.has_norms:
            return (*first, "post_feedforward")
        return (*first, "pre_feedforward", "post_feedforward") if self.sandwich_norm else first


def _linear(name: str, out: int, width: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, width)}
    return shapes | {f"{name}.bias": (out,)} if has_bias else shapes
