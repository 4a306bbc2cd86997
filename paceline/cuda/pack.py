"""Weights in the order the GPU kernels read them (cuda/linear.py): small integers or floats, or as they are.

int8 is w = q * s with q in [-127, 127]; int4 is w = (16 + q) * s - c with q in [0, 15]: in bfloat16 the bits
0x4180 | q << 3 are 16 + q, so one multiply-add makes the weight. s and c are bfloat16, one pair for each
group of consecutive inputs of a row. An int16 word holds the integers of four (int4) or two (int8) equal
parts of its group: word j has inputs j, j + words, j + 2 * words ... from its lowest bits up. FP8 (E4M3) lies
as int8 does; its scales are float32 and multiply sums of a group, so that nothing is rounded. MXFP4 (E2M1)
lies as int4 does; each of the four parts of a group has a power of two, all of them in one uint32 word: its
bytes are exponents of bfloat16, of twice the part's scale. Weights of 16 and 32 bits stay [N, K], not copied,
so an embedding can be the output layer too; their groups are but steps of the kernel.
Invariant: packing loses nothing: integers and small floats can be read back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.errors import ModelFileError
from paceline.models.float8 import GROUP as FLOAT8_GROUP
from paceline.models.float8 import Float8
from paceline.models.kept import FLOAT4_GROUP, Float4, Kept
from paceline.models.quantize import padded

GROUP = 128  # inputs that share a scale
GROUPS = (64, 128)
STEP = 64  # inputs of 16-bit weights loaded at a time: a multiprocessor holds three programs of four stages
ROWS = 128  # rows are filled up to a multiple: no kernel masks a load of weights
LARGEST_POWER = 252  # of MXFP4, 127 more than it: six times a larger one is no bfloat16
_CHUNK = 8192  # rows quantized at a time: bounds the memory beside the weights


class PackedWeight(NamedTuple):
    packed: Tensor  # [groups, rows, words of a group] int16; whole: [N, K] bfloat16, float16 or float32
    # [groups, rows] int32: s in the low half, -c in the high; FP8: float32; MXFP4: uint32; whole: empty
    scales: Tensor
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
    made = _empty((num_rows, width), bits, group, torch.int32, device)
    for first in range(0, num_rows, _CHUNK):
        integers = quantize(weight[first : first + _CHUNK], bits, group)
        rows = slice(first, first + len(integers.values))
        made.packed[:, rows] = pack_values(integers.values, bits, group)
        pairs = torch.stack([integers.scales, -integers.offsets], -1)
        made.scales[:, rows] = pairs.view(torch.int32).squeeze(-1).T
    return made


def pack_kept(weight: Kept) -> PackedWeight:
    return pack_float8(weight) if isinstance(weight, Float8) else pack_float4(weight)


def pack_float8(weight: Float8) -> PackedWeight:
    (num_rows, width), device = weight.values.shape, weight.values.device
    made = _empty((num_rows, width), 8, FLOAT8_GROUP, torch.float32, device)
    for first in range(0, num_rows, _CHUNK):
        rows = slice(first, min(first + _CHUNK, num_rows))
        values = pad(weight.values[rows], (0, -width % FLOAT8_GROUP)).view(torch.int8)
        if bool((values & 0x7F == 0x7F).any()):  # kernels take it for 480
            raise ModelFileError("an FP8 weight is not a number; the file is damaged, fetch it again")
        made.packed[:, rows] = pack_values(values, 8, FLOAT8_GROUP)
        made.scales[:, rows] = weight.scales[rows].T
    return made


def pack_float4(weight: Float4) -> PackedWeight:
    (num_rows, size), device = weight.values.shape, weight.values.device
    made, parts = _empty((num_rows, 2 * size), 4, GROUP, torch.int32, device), GROUP // FLOAT4_GROUP
    for first in range(0, num_rows, _CHUNK):
        rows = slice(first, min(first + _CHUNK, num_rows))
        values, powers = pad(weight.values[rows], (0, -size % (GROUP // 2))), weight.scales[rows]
        if bool((powers > LARGEST_POWER).any()):
            raise ModelFileError("an MXFP4 scale is no number or too large; fetch the model again")
        halves = torch.stack([values & 15, values >> 4], -1).flatten(1)  # [rows, groups * group]
        made.packed[:, rows] = pack_values(halves.view(torch.int8), 4, GROUP)
        exponents = pad(powers + 1, (0, -powers.shape[1] % parts))  # of twice the scale
        made.scales[:, rows] = exponents.contiguous().view(torch.int32).T
    return made._replace(scales=made.scales.view(torch.uint32))


def _empty(
    shape: tuple[int, int], bits: int, group: int, scales: torch.dtype, device: torch.device
) -> PackedWeight:
    """To be filled; rows beyond N stay zero."""
    assert group in GROUPS, f"no kernel for groups of {group}"
    groups, rows = padded(shape[1], group) // group, padded(shape[0], ROWS)
    packed = torch.zeros((groups, rows, group * bits // 16), dtype=torch.int16, device=device)
    assert packed.numel() < 2**31, "kernels index with 32 bits"
    zeros = torch.zeros((groups, rows), dtype=scales, device=device)
    return PackedWeight(packed, zeros, bits, group, shape)


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
