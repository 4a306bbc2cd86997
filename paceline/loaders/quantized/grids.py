"""Weights in a small type of their own (FP8, int8), times a grid of scales: one a tensor, one a row, one for
each group of inputs, or one for each block of both.

Used by fp8 (DeepSeek, Qwen, fbgemm, ModelOpt) and by compressed-tensors' float- and int-quantized.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from paceline.loaders.quantized.parts import INT8, SCALES, Grid, Module, Part, Reader, Shape, dequantize

NAMES = (".weight_scale_inv", ".weight_scale", ".scale")  # all of them multiply, whatever the first is called


def open_grid(module: Module, types: tuple[str, ...], blocks: tuple[Shape, ...] = ()) -> Reader | None:
    """A reader, or None if the weight is stored plainly. blocks: those that the config speaks of."""
    if module.type_of(".weight") not in types:
        return None
    weight = module.take(".weight", types, module.shape)
    name = next((name for name in NAMES if module.type_of(name)), NAMES[1])
    sizes = _grids(module.shape, module.shape_of(name), blocks)
    scales = module.take(name, SCALES, *sizes)
    zeros = module.take_any(".weight_zero_point", (INT8,), scales.shape)
    return partial(_read, weight, scales, zeros, sizes[scales.shape])


def _grids(shape: Shape, found: Shape, blocks: tuple[Shape, ...]) -> dict[Shape, Shape]:
    """Shapes of scales that are possible, and the rows and inputs that each of them is for."""
    rows, width = shape
    sizes: dict[Shape, Shape] = {(-(-rows // high), -(-width // wide)): (high, wide) for high, wide in blocks}
    sizes |= {(): shape, (1,): shape, (1, 1): shape, (rows,): (1, width), (rows, 1): (1, width)}
    if len(found) == 2 and found[0] == rows and found[1] and width % found[1] == 0:
        sizes |= {found: (1, width // found[1])}
    return sizes


def _read(weight: Part, scales: Part, zeros: Part | None, block: Shape, rows: slice) -> Tensor:
    """block: rows and inputs of a scale."""
    raw, (height, width), total = weight.read(rows), block, weight.shape[1]

    def values(part: Part) -> Tensor:
        """-> float32 [blocks of rows, groups]."""
        read = (part.read(rows) if height == 1 else part.read()).to(torch.float32)
        return read if read.ndim == 2 else read.reshape(-1, 1)

    groups, first = torch.arange(total) // width if total % width else None, 0 if height == 1 else rows.start
    grid = Grid(values(scales), None if zeros is None else values(zeros), height, first, groups)
    return dequantize(lambda some: raw[some], grid, (len(raw), total))
