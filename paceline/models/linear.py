"""y = x Wᵀ + b: one name, two ways. `TorchLinear` is plain torch on any device; `ExactLinear` runs our CPU kernel, whose result for
a row of x never depends on the other rows. Both can give back rows of W, so a tied output layer is also the embedding table.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from paceline.errors import ConfigError
from paceline.loaders.quantize import LANES, dequantize, pack, pack_nibbles, quantize, unpack_nibbles, unpack_rows


class Linear(Protocol):
    out_features: int
    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...  # [T, in] -> [T, out]
    def rows(self, ids: torch.Tensor) -> torch.Tensor: ...  # [n] -> [n, in]


class TorchLinear:
    """The reference. Quantized weights are kept dequantized: the same numbers, none of the savings."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int | None = None, group: int = 64) -> None:
        if bits is not None:
            weight = dequantize(quantize(weight, bits, group)).to(weight.dtype)
        self.weight, self.bias = weight, bias
        self.out_features = len(weight)
        self.num_bytes = sum(t.numel() * t.element_size() for t in (weight, bias) if t is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


class ExactLinear:
    """float32 in and out; weights float32, int8 or int4 in tiles of 16 rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int | None = None, group: int = 64) -> None:
        from paceline.cpu import matmul

        self.out_features, self.in_features = weight.shape
        if self.in_features % LANES:
            raise ConfigError(f"the exact CPU kernels need layers whose width is a multiple of {LANES}, not {self.in_features}; use kernels='torch'")
        self.bits, self.group = bits or 32, group if bits else self.in_features
        tiles = -(-self.out_features // LANES)
        self.bias = torch.zeros(tiles * LANES)
        if bias is not None:
            self.bias[: self.out_features] = bias
        self.scales = torch.empty(0)  # [tiles, K / group, 16] when quantized
        if bits is None:
            self.weight = pack(weight.float())  # [tiles, K, 16]
        else:
            values, scales = quantize(weight, bits, group)
            self.weight, self.scales = pack(values), pack(scales)
            if bits == 4:
                self.weight = pack_nibbles(self.weight)  # [tiles, K / 2, 16]
        self._product = matmul.bind(self.weight, self.scales, self.bias, self.bits, self.in_features, self.group)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weight, self.scales, self.bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features].contiguous()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        values = unpack_rows(self.weight, ids)  # [n, K], or [n, K / 2] of pairs
        if self.bits == 32:
            return values
        if self.bits == 4:
            values = unpack_nibbles(values)
        scales = unpack_rows(self.scales, ids)  # [n, K / group]
        return (values.view(*scales.shape, -1).float() * scales[..., None]).view(values.shape)
