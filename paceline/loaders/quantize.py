"""Weights as small integers, and the tiles the CPU kernels read.

Symmetric: s = max|w| / (2**(bits-1) - 1) over each group of consecutive inputs of a row, q = round(w / s), w ≈ q * s.
Tiles hold 16 output rows side by side, [ceil(N / 16), K, 16]; rows past the last are zero. Packing and unpacking are inverses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.errors import ConfigError

LANES = 16  # rows of a tile


class Quantized(NamedTuple):
    values: torch.Tensor  # [N, K] int8
    scales: torch.Tensor  # [N, K / group] float32


def quantize(weight: torch.Tensor, bits: int, group: int) -> Quantized:
    """weight [N, K] -> integers in [-(2**(bits-1) - 1), 2**(bits-1) - 1] and one scale a group."""
    if bits not in (4, 8):
        raise ConfigError(f"cannot quantize to {bits} bits; choose 8 or 4")
    num_rows, width = weight.shape
    if group <= 0 or width % group or group % 4:
        raise ConfigError(f"a quantization group of {group} does not divide rows of {width} weights; choose 32 or 64")
    grouped = weight.float().view(num_rows, width // group, group)
    limit = 2 ** (bits - 1) - 1
    scales = grouped.abs().amax(-1) / limit  # [N, K / group]
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = (grouped / safe[..., None]).round().clamp(-limit, limit).to(torch.int8)
    return Quantized(values.view(num_rows, width), scales)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """-> [N, K] float32."""
    values, scales = quantized
    grouped = values.view(*scales.shape, -1).float() * scales[..., None]
    return grouped.view(values.shape)


def pack(rows: torch.Tensor) -> torch.Tensor:
    """[N, K] of any type -> tiles [ceil(N / 16), K, 16]."""
    num_rows, width = rows.shape
    tiles = -(-num_rows // LANES)
    if num_rows % LANES:
        rows = torch.cat([rows, rows.new_zeros(tiles * LANES - num_rows, width)])
    return rows.view(tiles, LANES, width).transpose(1, 2).contiguous()


def unpack_rows(tiles: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` [n] of packed tiles -> [n, K]."""
    return tiles[ids // LANES, :, ids % LANES]


def pack_integers(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [N, K] -> uint8 tiles of values + 2**(bits-1), [n, K, 16] or, two to a byte, [n, K / 2, 16]: even k low, odd k high."""
    tiles = pack((values.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8))
    return tiles if bits == 8 else tiles[:, 0::2] | (tiles[:, 1::2] << 4)


def unpack_integer_rows(tiles: torch.Tensor, ids: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows `ids` [n] of `pack_integers` tiles -> int8 [n, K]."""
    rows = unpack_rows(tiles, ids)
    if bits == 4:
        rows = torch.stack([rows & 15, rows >> 4], -1).flatten(1)
    return (rows.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
