"""GPTQ: `qweight` int32 [inputs * bits / 32, outputs], `qzeros` int32 [groups, outputs * bits / 32], `scales`
[groups, outputs], `g_idx` [inputs]: the group of each input. The lowest bits of a word come first.

Format gptq stores zeros minus one, as a subtraction from whole words; gptq_v2 stores them as they are.
How many bits and groups there are is read from the shapes, so layers may differ.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.loaders.fields import Fields
from paceline.loaders.quantized.parts import (
    SCALES,
    Grid,
    Module,
    Part,
    Reader,
    Shape,
    dequantize,
    group_index,
    unpack,
)

BITS = (2, 4, 8)
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a one in each place of a word
MINUS_ONE = {"gptq": True, "gptq_v2": False}


class Packed(NamedTuple):
    qweight: Part
    scales: Part
    zeros: Part
    order: Part | None
    bits: int
    is_minus_one: bool  # the zeros


def is_minus_one(config: Fields) -> bool:
    """Whether zeros are stored minus one."""
    key = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    if config.get("is_marlin_format") or config.text(key, "gptq").lower() not in MINUS_ONE:
        raise config.refuse(key, f"is not read; use a GPTQ model of format {' or '.join(MINUS_ONE)}")
    if config.count("bits", 4) not in BITS:
        raise config.refuse("bits", f"is not read; use a GPTQ model of {', '.join(map(str, BITS))} bits")
    return MINUS_ONE[config.text(key, "gptq").lower()]


def open_gptq(has_minus_one: bool, module: Module) -> Reader | None:
    if module.type_of(".qweight") is None:
        return None
    rows, width = module.shape
    fitting = [bits for bits in BITS if rows * bits % 32 == 0 and width * bits % 32 == 0]
    sizes: dict[Shape, int] = {(width * bits // 32, rows): bits for bits in fitting}
    qweight = module.take(".qweight", ("I32",), *sizes)
    bits, num_groups = sizes[qweight.shape], (module.shape_of(".scales") or (0,))[0]
    has_order = module.type_of(".g_idx") is not None
    if num_groups < 1 or (width % num_groups and not has_order):
        problem = f"has {num_groups} groups, which a weight of {list(module.shape)} cannot have"
        raise module.refuse(".scales", f"{problem}; fetch the model again")
    scales = module.take(".scales", SCALES, (num_groups, rows))
    zeros = module.take(".qzeros", ("I32",), (num_groups, rows * bits // 32))
    order = module.take(".g_idx", ("I32", "I64"), (width,)) if has_order else None
    return partial(_read, Packed(qweight, scales, zeros, order, bits, has_minus_one))


def _read(packed: Packed, rows: slice) -> Tensor:
    bits, per_word = packed.bits, 32 // packed.bits
    words = packed.qweight.read(slice(None), rows)  # [inputs / per_word, rows]
    first, last = rows.start // per_word, -(-rows.stop // per_word)
    stored = packed.zeros.read(slice(None), slice(first, last))
    zeros = unpack(stored + ONES[bits] if packed.is_minus_one else stored, bits)  # [groups, outputs of words]
    start, count = rows.start - first * per_word, rows.stop - rows.start
    scales = packed.scales.read(slice(None), rows).to(torch.float32).t()
    groups = None if packed.order is None else group_index(packed.order, scales.shape[1])
    grid = Grid(scales, zeros[:, start : start + count].t().to(torch.float32), groups=groups)
    return dequantize(lambda some: unpack(words[:, some].t(), bits), grid, (count, words.shape[0] * per_word))
