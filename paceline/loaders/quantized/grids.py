"""Weights in a small type of their own (FP8, int8), times a grid of scales: one a tensor, one a row, one for
each group of inputs, or one for each block of both.

Used by fp8 (DeepSeek, Qwen, fbgemm, ModelOpt) and by compressed-tensors' float- and int-quantized.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.loaders.quantized.parts import SCALES, Grid, Module, Part, Reader, Shape, dequantize

FLOAT8, INT8 = "F8_E4M3", "I8"
NAMES = (".weight_scale_inv", ".weight_scale", ".scale")  # all of them multiply, whatever the first is called
ZEROS = ".weight_zero_point"


class Stored(NamedTuple):
    weight: Part
    scales: Part
    zeros: Part | None
    block: Shape  # rows and inputs of a scale


def open_grid(module: Module, types: tuple[str, ...], blocks: tuple[Shape, ...] = ()) -> Reader | None:
    """A reader, or None if the weight is stored plainly. blocks: those that the config speaks of."""
    if module.type_of(".weight") not in types:
        return None
    weight = module.take(".weight", types, module.shape)
    name = next((name for name in NAMES if module.type_of(name)), NAMES[1])
    sizes = _grids(module.shape, module.shape_of(name), blocks)
    scales = module.take(name, SCALES, *sizes)
    zeros = module.take(ZEROS, (INT8,), scales.shape) if module.type_of(ZEROS) else None
    return partial(_read, Stored(weight, scales, zeros, sizes[scales.shape]), module.shape)


def _grids(shape: Shape, found: Shape, blocks: tuple[Shape, ...]) -> dict[Shape, Shape]:
    """Shapes of scales that are possible, and the rows and inputs that each of them is for."""
    rows, width = shape
    sizes: dict[Shape, Shape] = {(-(-rows // high), -(-width // wide)): (high, wide) for high, wide in blocks}
    sizes |= {(): shape, (1,): shape, (1, 1): shape, (rows,): (1, width), (rows, 1): (1, width)}
    if len(found) == 2 and found[0] == rows and found[1] and width % found[1] == 0:
        sizes |= {found: (1, width // found[1])}
    return sizes


def _read(stored: Stored, shape: Shape, rows: slice) -> Tensor:
    weight, scales, zeros, (block, width) = stored
    raw = weight.read(rows)
    is_by_row = block == 1
    grids = [_grid(each, rows, is_by_row) for each in (scales, zeros) if each is not None]
    is_ragged = shape[1] % width != 0
    groups = torch.arange(shape[1]) // width if is_ragged else None
    first = 0 if is_by_row else rows.start
    grid = Grid(grids[0], grids[1] if zeros else None, block, first, groups)
    return dequantize(lambda some: raw[some], grid, (len(raw), shape[1]))


def _grid(part: Part, rows: slice, is_by_row: bool) -> Tensor:
    """-> float32 [blocks of rows, groups]."""
    values = (part.read(rows) if is_by_row else part.read()).to(torch.float32)
    return values if values.ndim == 2 else values.reshape(-1, 1)
