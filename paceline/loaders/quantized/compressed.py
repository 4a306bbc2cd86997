"""compressed-tensors (llm-compressor): FP8 and int8 as they are, small integers packed into int32 words, FP4
(fp4.py).

pack-quantized: `weight_packed` int32 [outputs, words], the lowest bits first, each q + 2^(bits - 1);
`weight_scale` [outputs, groups]; `weight_zero_point` int8 of that shape, or packed along the outputs.
How many bits and groups there are is read from the shapes, so layers may differ.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.loaders.fields import Fields
from paceline.loaders.quantized.fp4 import open_fp4
from paceline.loaders.quantized.grids import FLOAT8, INT8, open_grid
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

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
BITS = (2, 4, 8)  # numbers of bits that fill a word


class Packed(NamedTuple):
    words: Part
    scales: Part
    zeros: Part | None
    order: Part | None  # the group of each input
    bits: int


def read_settings(config: Fields) -> tuple[Shape, ...]:
    """The blocks that scales may be for; what would change the computation is refused by name."""
    groups = [config.section("config_groups").section(key) for key in config.section("config_groups").values]
    for keys in (config, *groups):
        if keys.get("format") is not None and keys.text("format") not in FORMATS:
            raise keys.refuse("format", f"is not read; use a model with one of {', '.join(FORMATS)}")
    sparsity = config.section("sparsity_config")
    if sparsity.text("format", "dense") != "dense":
        raise sparsity.refuse("format", "is not read; use a model without sparsity")
    if config.section("transform_config").section("config_groups").values:
        raise config.refuse("transform_config", "rotates activations, which is not done; use another model")
    found = [keys.section("weights").get("block_structure") for keys in groups]
    return tuple(_block(config, each) for each in found if each is not None)


def _block(config: Fields, value: Any) -> Shape:
    parts = value.split("x") if isinstance(value, str) else value
    if isinstance(parts, list) and len(parts) == 2 and all(str(each).isdecimal() for each in parts):
        rows, width = (int(each) for each in parts)
        if min(rows, width) > 0:
            return rows, width
    raise config.refuse("config_groups", f"has the block structure {value!r:.40}; use two numbers")


def open_compressed(blocks: tuple[Shape, ...], module: Module) -> Reader | None:
    if module.type_of(".weight_packed") is None:
        return open_grid(module, (FLOAT8, INT8), blocks)
    if module.type_of(".weight_packed") == "U8":
        return open_fp4(module, ".weight_packed")
    rows, width = module.shape
    sizes: dict[Shape, int] = {(rows, -(-width * bits // 32)): bits for bits in BITS}
    words = module.take(".weight_packed", ("I32",), *sizes)
    bits = sizes[words.shape]
    num_groups = (module.shape_of(".weight_scale") or (0,))[-1]
    possible = [(rows, num_groups)] if num_groups and width % num_groups == 0 else []
    scales = module.take(".weight_scale", SCALES, *possible, (rows, 1))
    zeros = order = None
    if (kind := module.type_of(".weight_zero_point")) is not None:
        size = scales.shape if kind == INT8 else (-(-rows * bits // 32), scales.shape[1])
        zeros = module.take(".weight_zero_point", (INT8, "I32"), size)
    if module.type_of(".weight_g_idx") is not None:
        order = module.take(".weight_g_idx", ("I32", "I64"), (width,))
    if module.type_of(".weight_shape") is not None:
        module.take(".weight_shape", ("I64", "I32"), (2,))
    return partial(_read, Packed(words, scales, zeros, order, bits), width)


def _read(packed: Packed, width: int, rows: slice) -> Tensor:
    words, scales = packed.words.read(rows), packed.scales.read(rows).to(torch.float32)
    groups = None if packed.order is None else _order(packed.order, scales.shape[1])
    zeros = torch.zeros_like(scales) if packed.zeros is None else _zeros(packed.zeros, packed.bits, rows)
    grid = Grid(scales, zeros + 2.0 ** (packed.bits - 1), groups=groups)
    return dequantize(lambda some: unpack(words[some], packed.bits)[:, :width], grid, (len(words), width))


def _order(part: Part, num_groups: int) -> Tensor | None:
    """None where the tensor was never filled in: then groups follow each other."""
    return None if bool((part.read() == -1).any()) else group_index(part, num_groups)


def _zeros(part: Part, bits: int, rows: slice) -> Tensor:
    """-> float32 [rows, groups]; signed."""
    if part.dtype == INT8:
        return part.read(rows).to(torch.float32)
    per_word = 32 // bits
    first, last = rows.start // per_word, -(-rows.stop // per_word)
    unpacked = unpack(part.read(slice(first, last)).t(), bits).t()  # [rows of whole words, groups]
    start = rows.start - first * per_word
    return unpacked[start : start + rows.stop - rows.start].to(torch.float32) - 2.0 ** (bits - 1)
