"""Rotary position embedding: frequencies for every scaling, and the tables of cosines and sines.

Layout is rotate-half: dimension i turns with dimension i + head_dim / 2. Angles are float32 products like the
models were trained with; a table row depends on its position alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.models.config import RopeConfig


class Angles(NamedTuple):
    """Of all positions, or of those of a pass's rows."""

    cos: Tensor  # [..., head_dim / 2]
    sin: Tensor

    def to(self, device: torch.device) -> Angles:
        return Angles(self.cos.to(device), self.sin.to(device))

    def at(self, positions: Tensor) -> Angles:
        return Angles(self.cos[positions], self.sin[positions])


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """[head_dim / 2] float32, and a factor of cosines and sines."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.divisors is not None:
        if (count := len(rope.divisors)) != head_dim // 2:
            raise ConfigError(f"{count} rotary divisors for a head of {head_dim}; the file should hold half")
        return plain / torch.tensor(rope.divisors), 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":  # long waves are slowed, short ones stay, those between are blended
        turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * plain / rope.factor + blend * plain, 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain, 1.0


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """As llama3, blended linearly in the dimension's index between those of beta_fast and beta_slow turns."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), head_dim - 1)
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return plain / rope.factor * slowed + plain * (1 - slowed), factor


def rotary_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> Angles:
    inverse, factor = frequencies(rope, head_dim)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), inverse.numpy()).astype(np.float64)
    # numpy in float64, not torch: torch's vector and scalar cosines differ, and which one a position gets
    # depends on the length
    cos, sin = (torch.from_numpy((wave(angles) * factor).astype(np.float32)) for wave in (np.cos, np.sin))
    return Angles(cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, head_dim], cos and sin [..., half of what turns]; dimensions before may be missing, and
    the last of a head may stay as they are."""
    half = cos.shape[-1]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)
