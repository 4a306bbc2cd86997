"""y = x Wᵀ + b in plain torch, on any device. It can give back rows of W, so a tied output layer is also the
embedding table.

With a quantized dtype it is the oracle of the CPU kernels: weights and activations are rounded as theirs are,
then multiplied in float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from paceline.models.quantize import dequantize, quantize, round_activations


class Linear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int = 32) -> None:
        self.weight = (
            weight if bits == 32 else dequantize(quantize(weight, bits), weight.shape[1]).to(weight.dtype)
        )
        self.bias, self.bits = bias, bits

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weight, self.bias) if t is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, in] -> [T, out]
        return functional.linear(
            x if self.bits == 32 else round_activations(x, self.bits), self.weight, self.bias
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:  # [n] -> [n, in]
        return functional.embedding(ids, self.weight)
