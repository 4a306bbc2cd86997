"""Rotary position embedding: frequencies for every scaling, and the tables of cosines and sines.

Layout is rotate-half: dimension i turns with dimension i + width / 2, where `width` is that of the head or of
its part that turns. Angles are float32 products like the models were trained with; a table row depends on its
position alone.
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

    cos: Tensor  # [..., width / 2]
    sin: Tensor

    def to(self, device: torch.device) -> Angles:
        return Angles(self.cos.to(device), self.sin.to(device))

    def at(self, positions: Tensor) -> Angles:
        return Angles(self.cos[positions], self.sin[positions])


def frequencies(rope: RopeConfig, width: int, num_positions: int = 0) -> tuple[Tensor, float]:
    """[width / 2] float32, and a factor of cosines and sines.

    LongRoPE has two sets of divisors. Which applies is settled once, by the longest text that is served
    (`num_positions`): the long ones if it is beyond the original context, the short ones otherwise. So a
    cached key never has other angles than a later query. transformers chooses anew in each pass, by its last
    position: it agrees on texts beyond the original context, and where no longer one is served.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    is_long = rope.long_divisors is not None and num_positions > rope.original_context
    divisors = rope.long_divisors if is_long else rope.divisors
    if divisors is not None:
        if (count := len(divisors)) != width // 2:
            raise ConfigError(f"{count} rotary divisors for a head of {width}; the file should hold half")
        return plain / torch.tensor(divisors), rope.attention_factor or 1.0
    if rope.kind == "proportional":
        turned = int(rope.factor * width // 2)
        return torch.where(torch.arange(width // 2) < turned, plain, 0.0), 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":  # long waves are slowed, short ones stay, those between are blended
        turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * plain / rope.factor + blend * plain, 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, width)
    return plain, 1.0


def _yarn(plain: Tensor, rope: RopeConfig, width: int) -> tuple[Tensor, float]:
    """As llama3, blended linearly in the dimension's index between those of beta_fast and beta_slow turns."""

    def dimension_of(turns: float) -> float:
        return width * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, width - 1)
    slowed = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return plain / rope.factor * slowed + plain * (1 - slowed), factor


def rotary_tables(rope: RopeConfig, width: int, num_positions: int) -> Angles:
    inverse, factor = frequencies(rope, width, num_positions)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), inverse.numpy()).astype(np.float64)
    # numpy in float64, not torch: torch's vector and scalar cosines differ, and which one a position gets
    # depends on the length
    cos, sin = (torch.from_numpy((wave(angles) * factor).astype(np.float32)) for wave in (np.cos, np.sin))
    return Angles(cos, sin)


def query_scales(rope: RopeConfig, num_positions: int) -> Tensor | None:
    """[num_positions] float32, what queries are multiplied by; None: all by one."""
    if not rope.query_beta or num_positions <= rope.original_context:
        return None
    spans = np.arange(num_positions) // rope.original_context
    return torch.from_numpy((1 + rope.query_beta * np.log1p(spans)).astype(np.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, head_dim], cos and sin [..., width / 2]; dimensions before may be missing. What lies
    beyond the width stays."""
    half = cos.shape[-1]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)
