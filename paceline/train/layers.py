"""Building blocks of heads with the weight names of a llama layer, so that a state_dict is a head's file."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from paceline.heads.config import LayeredConfig
from paceline.models.rope import RotaryTables, rotary_tables, rotate


class Norm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


def linear(width: int, out: int, deviation: float | None = None) -> nn.Linear:
    layer = nn.Linear(width, out, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5 if deviation is None else deviation)
    return layer


class Attention(nn.Module):
    """Projections of one attention; the attending itself is the head's."""

    def __init__(self, config: LayeredConfig, width: int, has_norms: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.q_proj = linear(width, config.num_heads * config.head_dim)
        self.k_proj = linear(width, config.num_kv_heads * config.head_dim)
        self.v_proj = linear(width, config.num_kv_heads * config.head_dim)
        self.o_proj = linear(config.num_heads * config.head_dim, config.hidden_size, 0.01)
        self.q_norm = Norm(config.head_dim, config.rms_eps) if has_norms else None
        self.k_norm = Norm(config.head_dim, config.rms_eps) if has_norms else None

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., heads, dim]."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        return q if self.q_norm is None else self.q_norm(q).to(q.dtype)

    def keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., width] -> two of [..., kv_heads, dim]."""
        k, v = (
            proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)) for proj in (self.k_proj, self.v_proj)
        )
        return (k if self.k_norm is None else self.k_norm(k).to(v.dtype)), v

    def for_all_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values [..., kv_heads, dim] -> [..., heads, dim]."""
        return x.repeat_interleave(self.num_heads // self.num_kv_heads, -2)


class Mlp(nn.Module):
    def __init__(self, config: LayeredConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Layer(nn.Module):
    """A llama layer whose attention reads `width` numbers."""

    def __init__(self, config: LayeredConfig, width: int, has_norms: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(config, width, has_norms)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_eps)

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """residual [..., hidden], attended [..., heads, dim] -> the layer's output."""
        x = residual + self.self_attn.o_proj(attended.flatten(-2))
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Rotary(nn.Module):
    """Turns queries and keys at given positions. Tables are not weights."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: LayeredConfig, num_positions: int) -> None:
        super().__init__()
        tables: RotaryTables = rotary_tables(config.rope, config.head_dim, num_positions)
        self.register_buffer("cos", tables.cos, persistent=False)
        self.register_buffer("sin", tables.sin, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., heads, dim], positions [...]."""
        flat = positions.flatten()
        turned = rotate(x.flatten(0, -3), self.cos[flat].to(x.dtype), self.sin[flat].to(x.dtype))
        return turned.view_as(x)
