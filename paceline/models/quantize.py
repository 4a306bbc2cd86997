"""Weights as small integers, and the tiles the CPU kernels read (their layout: cpu/matmul.py).

int8 is w ≈ q * s with q in [-127, 127]; int4 is w ≈ q * s - m with q in [0, 15], as GGUF's Q4_1, so such a
file loses nothing. s (and m): one for each group of consecutive inputs of a row, in half precision times
2**8. Invariant: `dequantize(quantize(w))` is what the kernels multiply with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, ModelFileError

BITS = {"float32": 32, "int8": 8, "int4": 4}
GROUP = {8: 64, 4: 32}
FLOAT_ROWS, DOT_ROWS = 16, 8  # output rows of a tile
BLOCK = {8: DOT_ROWS * GROUP[8] + 2 * DOT_ROWS, 4: DOT_ROWS * GROUP[4] // 2 + 4 * DOT_ROWS}  # bytes
STORED = 2.0**8  # what scales and minima are stored times: keeps small ones out of the subnormal numbers


def bits_of(dtype: str) -> int:
    if dtype not in BITS:
        raise ConfigError(f"dtype is {dtype!r}; choose auto, {', '.join(BITS)}")
    return BITS[dtype]


class Quantized(NamedTuple):
    values: Tensor  # [N, K] int8; K filled up to whole groups
    scales: Tensor  # [N, K / group] float32, exactly representable as stored
    minima: Tensor | None  # the same, for int4


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _stored(values: Tensor) -> Tensor:
    """As close as half precision comes; without a sign, which kernels would take for a part of the number."""
    halves = (values * STORED).half().abs()
    if not bool(torch.isfinite(halves).all()):
        largest = values.max() * 127
        raise ModelFileError(f"weights as large as {largest:.3g} cannot be quantized; use dtype float32")
    return halves.float() / STORED


def quantize(weight: Tensor, bits: int) -> Quantized:
    """weight [N, K] -> integers and one scale a group."""
    (num_rows, width), group = weight.shape, GROUP[bits]
    extra = padded(width, group) - width
    if extra:  # the last value again: it does not widen its group, and is multiplied with zeros
        weight = torch.cat([weight, weight[:, -1:].expand(num_rows, extra)], 1)
    grouped, minima = weight.float().view(num_rows, -1, group), None
    if bits == 8:
        scales, low, high = _stored(grouped.abs().amax(-1) / 127), -127, 127
    else:
        minima, low, high = _stored(grouped.amin(-1).neg().clamp(min=0)), 0, 15
        scales = _stored((grouped.amax(-1) + minima).clamp(min=0) / 15)
        grouped = grouped + minima[..., None]
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)[..., None]
    values = (grouped / divisors).round().clamp(low, high).to(torch.int8)
    return Quantized(values.view(num_rows, -1), scales, minima)


def dequantize(quantized: Quantized, width: int) -> Tensor:
    """-> [N, width] float32."""
    values, scales, minima = quantized
    grouped = values.view(*scales.shape, -1).float() * scales[..., None]
    if minima is not None:
        grouped = grouped - minima[..., None]
    return grouped.view(values.shape)[:, :width]


def round_activations(x: Tensor, bits: int) -> Tensor:
    """x [T, K] as a product with weights of that many bits sees it: int8 times a scale for each group."""
    width, group = x.shape[-1], GROUP[bits]
    grouped = torch.nn.functional.pad(x, (0, padded(width, group) - width)).unflatten(-1, (-1, group))
    top = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(top == 0, torch.zeros_like(top), 127.0 / top)
    return ((grouped * inverse).round() * (top / 127.0)).flatten(-2)[..., :width]


def _fill_rows(rows: Tensor, multiple: int) -> Tensor:
    missing = padded(len(rows), multiple) - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _half_bytes(values: Tensor) -> Tensor:
    """[N, groups] -> uint8 [tiles, groups, 2 * 8]."""
    tiles = _fill_rows(values, DOT_ROWS).view(-1, DOT_ROWS, values.shape[1])
    return (tiles.transpose(1, 2) * STORED).half().contiguous().view(torch.uint8)


def pack_quantized(quantized: Quantized, bits: int) -> Tensor:
    """-> uint8 [tiles, groups, bytes of a block]."""
    values, scales, minima = quantized
    tiles = _fill_rows(values, DOT_ROWS).view(-1, DOT_ROWS, scales.shape[1], GROUP[bits] // 4, 4)
    quads = tiles.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8)  # [tiles, groups, quads, 8, 4]
    if bits == 4:
        quads = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
    parts = [quads.flatten(2), _half_bytes(scales)] + ([_half_bytes(minima)] if minima is not None else [])
    return torch.cat(parts, 2)


def pack_linear(weight: Tensor, bias: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """weight [N, K], bias [N] -> what the kernels read: float32 [tiles, K, 16] or uint8 [tiles, groups, bytes
    of a block], and float32 [rows of the tiles]."""
    rows, bias = FLOAT_ROWS if bits == 32 else DOT_ROWS, torch.zeros(len(weight)) if bias is None else bias
    if bits == 32:
        tiles = _fill_rows(weight.float(), rows).view(-1, rows, weight.shape[1]).transpose(1, 2).contiguous()
    else:
        tiles = pack_quantized(quantize(weight, bits), bits)
    return tiles, _fill_rows(bias.float(), rows)


def head_bits(bits: int) -> int:
    """Embedding and head stay in int8 when the layers are int4, which costs them most."""
    return 8 if bits == 4 else bits
