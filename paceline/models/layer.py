"""The llama layer in plain torch: the reference decoder, the heads, their training and the teacher run it.

Two seams: how keys and values are kept and read (a layer is given `attend`), and what follows attention
(`mlp`, from [..., hidden] to [..., hidden]). Invariant: modules have Hugging Face's names, as files do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.config import Activation, ModelConfig
from paceline.models.quantize import dequantize, quantize, round_activations
from paceline.models.rope import Angles, rotate

# queries [..., heads, dim], keys and values [..., kv_heads, dim] of the rows -> [..., heads, dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# the same of a stack of layers; the number of the layer comes first
AttendIn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
CLAMP, SLOPE = 7.0, 1.702  # of a clamped activation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside."""
    if x.dtype == weight.dtype:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def gate(gates: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """[..., inner] each."""
    if activation == "silu":
        return functional.silu(gates) * up
    if activation == "clamped":
        gates = gates.clamp(max=CLAMP)
        return gates * (gates * SLOPE).sigmoid() * (up.clamp(-CLAMP, CLAMP) + 1)
    return functional.gelu(gates, approximate="tanh") * up


class Linear(nn.Module):
    """y = x Wᵀ + b; a tied output layer is also the embedding table. With fewer than 32 bits weights and
    activations are rounded as the CPU kernels do, then multiplied in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, bits: int = 32) -> None:
        super().__init__()
        self.bits = bits
        self.weight = nn.Parameter(self.rounded(weight), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def empty(cls, width: int, out: int, *, has_bias: bool = False, bits: int = 32) -> Linear:
        """[out, width] without numbers yet."""
        linear = cls(torch.empty(out, width), torch.empty(out) if has_bias else None)
        linear.bits = bits
        return linear

    def rounded(self, weight: Tensor) -> Tensor:
        """The weight as this layer multiplies with it."""
        if self.bits == 32:
            return weight
        return dequantize(quantize(weight, self.bits), weight.shape[1]).to(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        x = x if self.bits == 32 else round_activations(x, self.bits)
        return functional.linear(x, self.weight, self.bias)

    def part(self, x: Tensor, rows: slice) -> Tensor:
        """The product with some rows of the weight alone."""
        x = x if self.bits == 32 else round_activations(x, self.bits)
        return functional.linear(x, self.weight[rows], None if self.bias is None else self.bias[rows])

    def rows(self, ids: Tensor) -> Tensor:  # [n] -> [n, in]
        return functional.embedding(ids, self.weight)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width), requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Queries, keys and values of rows that are `width` wide, and what is made of the attended values."""

    def __init__(self, config: ModelConfig, width: int, bits: int) -> None:
        super().__init__()
        heads, kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.is_gated = config.gated_attention
        self.value_eps = config.rms_eps if config.value_norm else None
        linear = partial(Linear.empty, width, has_bias=config.qkv_bias, bits=bits)
        self.q_proj = linear(heads * self.dim * (2 if self.is_gated else 1))
        self.k_proj, self.v_proj = (linear(kv_heads * self.dim) for _ in range(2))
        self.o_proj = Linear.empty(heads * self.dim, config.hidden_size, has_bias=config.out_bias, bits=bits)
        normed = (heads, kv_heads) if config.qk_norm_over_heads else (1, 1)
        norms = [Norm(count * self.dim, config.rms_eps) if config.qk_norm else None for count in normed]
        self.q_norm, self.k_norm = norms
        self.sinks = nn.Parameter(torch.empty(heads), False) if config.attention_sinks else None

    def queries(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor | None]:
        """[..., width] -> [..., heads, dim], normed and rotated; and gates, as many, if there are any."""
        q, gates = self.q_proj(x), None
        if self.is_gated:
            q, gates = (part.flatten(-2) for part in q.unflatten(-1, (-1, 2 * self.dim)).chunk(2, -1))
        return self._turned(q, self.q_norm, angles), gates

    def output(self, attended: Tensor, gates: Tensor | None) -> Tensor:
        """[..., heads, dim] -> [..., hidden]."""
        attended = attended.flatten(-2)
        return self.o_proj(attended if gates is None else attended * gates.sigmoid())

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[..., width] -> two of [..., kv_heads, dim], keys normed and rotated."""
        keys = self._turned(self.k_proj(x), self.k_norm, angles)
        values = self.v_proj(x).unflatten(-1, (-1, self.dim))
        if self.value_eps is not None:
            values = functional.rms_norm(values, values.shape[-1:], eps=self.value_eps)
        return keys, values

    def _turned(self, x: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        """[..., n * dim] -> [..., n, dim]; a norm is over one head or over all, as wide as its weight is."""
        if norm is not None:
            x = norm(x.unflatten(-1, (-1, len(norm.weight)))).flatten(-2)
        return rotate(x.unflatten(-1, (-1, self.dim)), *angles)


class DenseFfn(nn.Module):
    def __init__(self, config: ModelConfig, inner: int, bits: int) -> None:
        super().__init__()
        self.activation, hidden = config.activation, config.hidden_size
        linear = partial(Linear.empty, has_bias=config.mlp_bias, bits=bits)
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gate(self.gate_proj(x), self.up_proj(x), self.activation))


class Layer(nn.Module):
    """Attention that reads `width` numbers a row (by default the hidden size), then the ffn."""

    def __init__(
        self, config: ModelConfig, bits: int = 32, *, width: int = 0, ffn: nn.Module | None = None,
        recurrent: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """bits: below 32, products round as the CPU kernels do; recurrent: what there is instead of
        attention."""
        super().__init__()
        if recurrent is None:
            self.self_attn = Attention(config, width or config.hidden_size, bits)
        else:
            self.linear_attn = recurrent
        self.mlp = DenseFfn(config, config.intermediate_size, bits) if ffn is None else ffn
        norm = partial(Norm, config.hidden_size, config.rms_eps)
        self.input_layernorm: nn.Module = nn.Identity() if config.post_norm else norm()
        self.post_attention_layernorm = norm()
        self.norms_added, self.scale = config.sandwich_norm or config.post_norm, config.residual_scale
        if self.norms_added:
            has_norm = "pre_feedforward" in config.layer_norms()
            self.pre_feedforward_layernorm: nn.Module = norm() if has_norm else nn.Identity()
            self.post_feedforward_layernorm = norm()
        self.layer_scalar = nn.Parameter(torch.ones(1), False) if config.layer_scalars else None

    def forward(self, x: Tensor, angles: Angles, attend: Attend, inputs: Tensor | None = None) -> Tensor:
        """x [..., hidden] is the residual stream, in and out; inputs: what attention reads instead of it,
        normed."""
        inputs = self.input_layernorm(x) if inputs is None else inputs
        q, gates = self.self_attn.queries(inputs, angles)
        attended = attend(q, *self.self_attn.keys_values(inputs, angles))
        return self.leave(x, self.self_attn.output(attended, gates))

    def leave(self, x: Tensor, added: Tensor) -> Tensor:
        """The stream after the layer, given what attention, or what is there instead, adds to it."""
        if not self.norms_added:
            x = self._add(x, added)
            return self._add(x, self.mlp(self.post_attention_layernorm(x)))
        x = self._add(x, self.post_attention_layernorm(added))
        x = self._add(x, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))
        return x if self.layer_scalar is None else x * self.layer_scalar

    def _add(self, x: Tensor, added: Tensor) -> Tensor:
        return x + (added if self.scale == 1.0 else added * self.scale)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
    """Attention within whole sequences: q [B, S, heads, dim], k and v of kv_heads -> like q. A row sees
    `window` positions, itself included."""
    length, mask = q.shape[1], None
    if window is not None and window < length:
        back = torch.arange(length, device=q.device)
        back = back[:, None] - back
        mask = (back >= 0) & (back < window)
    return masked(q, k, v, mask, scale, is_causal=mask is None)


def masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None, is_causal: bool = False
) -> Tensor:
    """q [..., n, heads, dim], k and v [..., m, kv_heads, dim], mask bool, [n, m] at its end -> like q."""
    group, q = q.shape[-2] // k.shape[-2], q.transpose(-3, -2)
    k, v = (x.repeat_interleave(group, -2).transpose(-3, -2) for x in (k, v))
    attend = functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, scale=scale, is_causal=is_causal).transpose(-3, -2)
