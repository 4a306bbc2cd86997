"""Integers of a few bits in int32 words, the lowest bits first: GPTQ, AWQ, and pack-quantized of
compressed-tensors.

GPTQ: `qweight` int32 [inputs * bits / 32, outputs], `qzeros` int32 [groups, outputs * bits / 32], `scales`
[groups, outputs], `g_idx` [inputs]: the group of each input. Format gptq stores zeros minus one, as a
subtraction from whole words; gptq_v2 stores them as they are. AWQ, version gemm: 4 bits, `qweight` int32
[inputs, outputs / 8], the eight outputs of a word in the order 0, 2, 4, 6, 1, 3, 5, 7; else as GPTQ.
pack-quantized: `weight_packed` int32 [outputs, words], each q + 2^(bits - 1); `weight_scale` [outputs,
groups]; `weight_zero_point` int8 of that shape, or packed along the outputs.
How many bits and groups there are is read from the shapes, so layers may differ.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import ALL
from paceline.loaders.quantized.parts import INT8, SCALES, Grid, Module, Part, Reader, Shape, dequantize

BITS = (2, 4, 8)  # numbers of bits that fill a word
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a one in each place of a word
AWQ_BITS, AWQ_PLACES = 4, (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight outputs lies in its word
INDEX = ("I32", "I64")


class Packed(NamedTuple):
    words: Part
    scales: Part
    zeros: Part | None
    order: Part | None  # the group of each input
    bits: int
    width: int  # inputs


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]."""
    copied = words.clone(memory_format=torch.contiguous_format)
    wide = copied.view(torch.uint8)  # [n, m * 4]: of a word the lowest byte first
    if bits == 8:
        return wide
    return torch.stack([(wide >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1).flatten(1)


def group_index(part: Part, num_groups: int) -> Tensor | None:
    """Which group each input is in; None if they are of equal size and follow each other."""
    index = part.read().to(torch.int64)
    is_even = len(index) % num_groups == 0
    if is_even and torch.equal(index, torch.arange(len(index)) // (len(index) // num_groups)):
        return None
    if bool((index < 0).any() or (index >= num_groups).any()):
        problem = f"names groups beyond the {num_groups} that have scales"
        raise ModelFileError(f"{part.file}: tensor {part.name} {problem}; fetch the model again")
    return index


def _words(rows: slice, bits: int) -> tuple[slice, slice]:
    """The words that hold these integers, and where the integers are in them."""
    first, last = rows.start * bits // 32, -(-rows.stop * bits // 32)
    start = rows.start - first * 32 // bits
    return slice(first, last), slice(start, start + rows.stop - rows.start)


def open_gptq(is_minus_one: bool, module: Module) -> Reader | None:
    """is_minus_one: how zeros are stored."""
    if module.type_of(".qweight") is None:
        return None
    rows, width = module.shape
    fitting = [bits for bits in BITS if rows * bits % 32 == 0 and width * bits % 32 == 0]
    sizes: dict[Shape, int] = {(width * bits // 32, rows): bits for bits in fitting}
    qweight = module.take(".qweight", ("I32",), *sizes)
    bits, order = sizes[qweight.shape], module.take_any(".g_idx", INDEX, (width,))
    num_groups = module.num_groups(".scales", 0, is_even=order is None)
    scales = module.take(".scales", SCALES, (num_groups, rows))
    zeros = module.take(".qzeros", ("I32",), (num_groups, rows * bits // 32))
    return partial(_read_gptq, Packed(qweight, scales, zeros, order, bits, width), is_minus_one)


def _read_gptq(packed: Packed, is_minus_one: bool, rows: slice) -> Tensor:
    bits, (some_words, wanted) = packed.bits, _words(rows, packed.bits)
    words = packed.words.read(ALL, rows)  # [inputs of words, rows]
    assert packed.zeros is not None
    zeros = packed.zeros.read(ALL, some_words) + (ONES[bits] if is_minus_one else 0)
    offsets = unpack(zeros, bits)[:, wanted].t().to(torch.float32)
    scales = packed.scales.read(ALL, rows).to(torch.float32).t()
    groups = None if packed.order is None else group_index(packed.order, scales.shape[1])
    grid = Grid(scales, offsets, groups=groups)
    return dequantize(lambda some: unpack(words[:, some].t(), bits), grid, (words.shape[1], packed.width))


def open_awq(module: Module) -> Reader | None:
    if module.type_of(".qweight") is None:
        return None
    (rows, width), num_groups = module.shape, module.num_groups(".scales", 0)
    num_words = -(-rows * AWQ_BITS // 32)
    qweight = module.take(".qweight", ("I32",), (width, num_words))
    scales = module.take(".scales", SCALES, (num_groups, rows))
    zeros = module.take(".qzeros", ("I32",), (num_groups, num_words))
    return partial(_read_awq, qweight, scales, zeros)


def _read_awq(qweight: Part, scales: Part, zeros: Part, rows: slice) -> Tensor:
    some_words, wanted = _words(rows, AWQ_BITS)
    words = qweight.read(ALL, some_words)  # [inputs, words]
    offsets = _awq_rows(zeros.read(ALL, some_words), wanted).to(torch.float32)
    grid = Grid(scales.read(ALL, rows).to(torch.float32).t(), offsets)

    def codes(some: slice) -> Tensor:
        return _awq_rows(words, slice(wanted.start + some.start, wanted.start + some.stop))

    return dequantize(codes, grid, (rows.stop - rows.start, qweight.shape[0]))


def _awq_rows(words: Tensor, rows: slice) -> Tensor:
    """int32 [n, words] -> uint8 [rows, n]."""
    some_words, wanted = _words(rows, AWQ_BITS)
    turned = words[:, some_words].t().contiguous()
    outputs = [((turned >> AWQ_BITS * place) & 15).to(torch.uint8) for place in AWQ_PLACES]
    return torch.stack(outputs, 1).flatten(0, 1)[wanted]


def open_packed(module: Module) -> Reader:
    rows, width = module.shape
    sizes: dict[Shape, int] = {(rows, -(-width * bits // 32)): bits for bits in BITS}
    words = module.take(".weight_packed", ("I32",), *sizes)
    bits = sizes[words.shape]
    num_groups = (module.shape_of(".weight_scale") or (0,))[-1]
    possible = [(rows, num_groups)] if num_groups and width % num_groups == 0 else []
    scales = module.take(".weight_scale", SCALES, *possible, (rows, 1))
    is_plain = module.type_of(".weight_zero_point") == INT8
    size = scales.shape if is_plain else (-(-rows * bits // 32), scales.shape[1])
    zeros = module.take_any(".weight_zero_point", (INT8, "I32"), size)
    order = module.take_any(".weight_g_idx", INDEX, (width,))
    module.take_any(".weight_shape", INDEX, (2,))
    return partial(_read_packed, Packed(words, scales, zeros, order, bits, width))


def _read_packed(packed: Packed, rows: slice) -> Tensor:
    bits, width = packed.bits, packed.width
    words, scales = packed.words.read(rows), packed.scales.read(rows).to(torch.float32)
    zeros = torch.zeros_like(scales) if packed.zeros is None else _zeros(packed.zeros, bits, rows)
    order = packed.order
    if order is not None and bool((order.read() == -1).any()):  # never filled in: groups follow each other
        order = None
    groups = None if order is None else group_index(order, scales.shape[1])
    grid = Grid(scales, zeros + 2.0 ** (bits - 1), groups=groups)
    return dequantize(lambda some: unpack(words[some], bits)[:, :width], grid, (len(words), width))


def _zeros(part: Part, bits: int, rows: slice) -> Tensor:
    """-> float32 [rows, groups]; signed."""
    if part.dtype == INT8:
        return part.read(rows).to(torch.float32)
    some_words, wanted = _words(rows, bits)
    unpacked = unpack(part.read(some_words).t(), bits).t()  # [rows of whole words, groups]
    return unpacked[wanted].to(torch.float32) - 2.0 ** (bits - 1)
