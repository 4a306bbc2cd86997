"""y = x Wᵀ + b in plain torch, on any device. It can give back rows of W, so a tied output layer is also the
embedding table.

With fewer than 32 bits it is the oracle of the CPU kernels: weights and activations are rounded as theirs
are, then multiplied in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.quantize import dequantize, quantize, round_activations


class Linear(nn.Module):
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

    def rows(self, ids: Tensor) -> Tensor:  # [n] -> [n, in]
        return functional.embedding(ids, self.weight)
