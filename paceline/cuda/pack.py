"""Weights in the order the GPU kernels read them (cuda/linear.py): as small integers, or as they are.

int8 is w = q * s with q in [-127, 127]; int4 is w = (16 + q) * s - c with q in [0, 15]: in bfloat16 the bits
0x4180 | q << 3 are 16 + q, so one multiply-add makes the weight. s and c are bfloat16, one pair for each
group of consecutive inputs of a row. An int16 word holds the integers of four (int4) or two (int8) equal
parts of its group: word j has inputs j, j + words, j + 2 * words ... from its lowest bits up. Weights of 16
and 32 bits stay [N, K], not copied, so an embedding can be the output layer too; their groups are but steps
of the kernel. Invariant: packing loses nothing: the integers can be read back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import ModelFileError
from paceline.models.quantize import padded

GROUP = 128  # inputs that share a scale
GROUPS = (64, 128)
STEP = 64  # inputs of 16-bit weights loaded at a time: a multiprocessor holds three programs of four stages
ROWS = 128  # rows are filled up to a multiple: no kernel masks a load of weights
_CHUNK = 8192  # rows quantized at a time: bounds the memory beside the weights


class PackedWeight(NamedTuple):
    packed: Tensor  # [groups, rows, words of a group] int16; whole: [N, K] bfloat16, float16 or float32
    scales: Tensor  # [groups, rows] int32: s in the low half, -c in the high, bfloat16; whole: empty
    bits: int
    group: int
    shape: tuple[int, int]  # N, K before filling up

    @property
    def is_whole(self) -> bool:
        """Not small integers but numbers."""
        return self.bits >= 16


class Integers(NamedTuple):
    values: Tensor  # [N, groups * group] int8
    scales: Tensor  # [N, groups] bfloat16
    offsets: Tensor  # [N, groups] bfloat16; zeros for int8


def pack(weight: Tensor, bits: int, group: int = GROUP) -> PackedWeight:
    """weight [N, K] of any float dtype; of 16 and 32 bits it keeps its own."""
    (num_rows, width), device = weight.shape, weight.device
    if bits >= 16:
        assert weight.is_floating_point(), f"weights of {weight.dtype} are no numbers"
        scales = torch.empty((0, 0), dtype=torch.int32, device=device)
        return PackedWeight(weight.contiguous(), scales, 8 * weight.element_size(), STEP, (num_rows, width))
    assert bits in (4, 8), f"no kernel for {bits} bits"
    assert group in GROUPS, f"no kernel for groups of {group}"
    groups, rows = padded(width, group) // group, padded(num_rows, ROWS)
    packed = torch.zeros((groups, rows, group * bits // 16), dtype=torch.int16, device=device)
    scales = torch.zeros((groups, rows), dtype=torch.int32, device=device)
    assert packed.numel() < 2**31, "kernels index with 32 bits"
    for first in range(0, num_rows, _CHUNK):
        integers = quantize(weight[first : first + _CHUNK], bits, group)
        last = first + len(integers.values)
        packed[:, first:last] = pack_values(integers.values, bits, group)
        pairs = torch.stack([integers.scales, -integers.offsets], -1)
        scales[:, first:last] = pairs.view(torch.int32).squeeze(-1).T
    return PackedWeight(packed, scales, bits, group, (num_rows, width))


def quantize(weight: Tensor, bits: int, group: int) -> Integers:
    """weight [N, K] -> the nearest that scales of bfloat16 allow."""
    extra = padded(weight.shape[1], group) - weight.shape[1]
    if extra:  # the last value again: it does not widen its group, and is multiplied with zeros
        weight = torch.cat([weight, weight[:, -1:].expand(-1, extra)], 1)
    grouped = weight.float().unflatten(1, (-1, group))  # [N, groups, group]
    low, high = grouped.aminmax(dim=-1)
    if bits == 8:
        scales, lowest, highest = torch.maximum(-low, high) / 127, -127, 127
    else:
        scales, lowest, highest = (high - low) / 15, 0, 15
    scales = scales.bfloat16()
    offsets = (16 * scales.float() - low).bfloat16() if bits == 4 else torch.zeros_like(scales)
    if not bool(torch.isfinite(scales).all() & torch.isfinite(offsets).all()):
        most = f"{weight.abs().max():.3g}"
        raise ModelFileError(f"weights as large as {most} cannot be quantized; use dtype bfloat16")
    steps = torch.where(scales == 0, torch.ones_like(scales), scales).float()[..., None]
    exact = (grouped + offsets.float()[..., None]) / steps - (16 if bits == 4 else 0)
    return Integers(exact.round().clamp(lowest, highest).to(torch.int8).flatten(1), scales, offsets)


def pack_values(values: Tensor, bits: int, group: int) -> Tensor:
    """[N, groups * group] int8 -> [groups, N, words] int16."""
    parts = values.int().view(len(values), -1, 16 // bits, group * bits // 16)  # [N, groups, parts, words]
    words = torch.zeros_like(parts[:, :, 0])
    for i in range(16 // bits):
        words |= (parts[:, :, i] & (2**bits - 1)) << (i * bits)
    return words.to(torch.int16).transpose(0, 1)
