"""Weights in FP8 (E4M3): each number times a float32 scale of its row and its 128 inputs.

Invariant: numbers that a file has stay the bytes they are; only `to_float8` rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.errors import ModelFileError

GROUP = 128  # inputs that share a scale
LARGEST = 448.0  # of E4M3
_CHUNK = 8192  # rows rounded at a time: bounds the memory beside the weights


class Float8(NamedTuple):
    values: Tensor  # [N, K] uint8: their bits
    scales: Tensor  # [N, K / 128, rounded up] float32


def to_float8(weight: Tensor) -> Float8:
    """weight [N, K] -> the nearest, with the largest of a group as the largest of E4M3."""
    made = [_rounded(some) for some in weight.split(_CHUNK)]
    return Float8(*map(torch.cat, zip(*made, strict=True)))


def _rounded(weight: Tensor) -> Float8:
    width = weight.shape[1]
    grouped = pad(weight.float(), (0, -width % GROUP)).unflatten(1, (-1, GROUP))  # [N, groups, 128]
    scales = grouped.abs().amax(-1) / LARGEST
    if not bool(torch.isfinite(scales).all()):
        raise ModelFileError("weights that are not finite cannot be quantized; use dtype bfloat16")
    steps = torch.where(scales == 0, torch.ones_like(scales), scales)[..., None]
    values = (grouped / steps).to(torch.float8_e4m3fn).view(torch.uint8)
    return Float8(values.flatten(1)[:, :width], scales)
