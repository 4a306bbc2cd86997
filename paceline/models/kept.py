"""Matrices that stay in the small floating-point type that files have them in: FP8 (float8.py) and MXFP4.

Invariant: nothing here rounds. A checkpoint's `kept(name, rows)` is one of these, or None where the files
have it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.models.float8 import Float8

FLOAT4_GROUP = 32  # inputs that share a scale


class Float4(NamedTuple):
    """MXFP4: E2M1 numbers, each times the power of two of its row and its 32 inputs."""

    values: Tensor  # [N, K / 2] uint8: two numbers each, the first in the low half
    scales: Tensor  # [N, K / 32] uint8: 127 more than the power


Kept = Float8 | Float4
DTYPES: dict[type[Kept], str] = {Float4: "mxfp4", Float8: "fp8"}


def stacked(weights: Sequence[Kept]) -> Kept:
    """One below the other, all of one kind."""
    return weights[0] if len(weights) == 1 else type(weights[0])(*map(torch.cat, zip(*weights, strict=True)))


def dtypes_kept(source: Any) -> list[str]:
    """Those that the files of a checkpoint have some matrices in."""
    kinds = {type(source.kept(name, slice(1))) for name in source.config.weight_names()}
    return [dtype for kind, dtype in DTYPES.items() if kind in kinds]
