"""y = x Wᵀ + b: one name, two ways. `TorchLinear` is plain torch on any device; `ExactLinear` runs our CPU kernel, whose result for
a row of x never depends on the other rows. Both can give back rows of W, so a tied output layer is also the embedding table.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from paceline.errors import ConfigError
from paceline.loaders.quantize import LANES, Quantized, dequantize, pack, pack_integers, quantize, unpack_integer_rows, unpack_rows


class Linear(Protocol):
    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...  # [T, in] -> [T, out]
    def rows(self, ids: torch.Tensor) -> torch.Tensor: ...  # [n] -> [n, in]


class TorchLinear:
    """The reference. Quantized weights are kept dequantized: the same numbers, none of the savings."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int | None = None, group: int = 64) -> None:
        if bits is not None:
            weight = dequantize(quantize(weight, bits, group)).to(weight.dtype)
        self.weight, self.bias = weight, bias

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weight, self.bias) if t is not None)

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
            raise ConfigError(f"the exact kernels need widths that are multiples of {LANES}, not {self.in_features}; use kernels='torch'")
        self.bits = bits or 32
        self._is_padded = self.out_features % LANES != 0
        self.bias = torch.zeros(-(-self.out_features // LANES) * LANES)
        if bias is not None:
            self.bias[: self.out_features] = bias
        self.scales = torch.empty(0)  # [tiles, K / group, 16] when quantized
        if bits is None:
            self.weight = pack(weight.float())  # [tiles, K, 16]
        else:
            values, scales = quantize(weight, bits, group)
            self.weight, self.scales = pack_integers(values, bits), pack(scales)  # [tiles, K or K / 2, 16]
        self.tiles = matmul.tiles_of(self.weight, self.scales, self.bias, self.bits, self.in_features, group if bits else self.in_features)
        self._product = matmul.product

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weight, self.scales, self.bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._product(self.tiles, self.bits, x)
        return y[:, : self.out_features].contiguous() if self._is_padded else y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.bits == 32:
            return unpack_rows(self.weight, ids)
        return dequantize(Quantized(unpack_integer_rows(self.weight, ids, self.bits), unpack_rows(self.scales, ids)))
