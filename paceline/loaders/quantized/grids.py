"""Weights in a small type of their own (FP8, int8), times a grid of scales: one a tensor, one a row, one for
each group of inputs, or one for each block of both.

Used by fp8 (DeepSeek, Qwen, fbgemm, ModelOpt) and by compressed-tensors' float- and int-quantized. FP8 can be
read as it is stored, for devices that keep it so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.loaders.quantized import parts
from paceline.loaders.quantized.parts import FLOAT8, INT8, SCALES, Grid, Module, Part, Reader, Shape
from paceline.models.float8 import GROUP, Float8

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
    return GridReader(weight, scales, zeros, sizes[scales.shape])


def _grids(shape: Shape, found: Shape, blocks: tuple[Shape, ...]) -> dict[Shape, Shape]:
    """Shapes of scales that are possible, and the rows and inputs that each of them is for."""
    rows, width = shape
    sizes: dict[Shape, Shape] = {(-(-rows // high), -(-width // wide)): (high, wide) for high, wide in blocks}
    sizes |= {(): shape, (1,): shape, (1, 1): shape, (rows,): (1, width), (rows, 1): (1, width)}
    if len(found) == 2 and found[0] == rows and found[1] and width % found[1] == 0:
        sizes |= {found: (1, width // found[1])}
    return sizes


@dataclass(frozen=True, slots=True)
class GridReader:
    """Of one weight."""

    weight: Part
    scales: Part
    zeros: Part | None
    block: Shape  # rows and inputs of a scale

    def __call__(self, rows: slice) -> Tensor:
        raw, (height, width), total = self.weight.read(rows), self.block, self.weight.shape[1]
        groups = torch.arange(total) // width if total % width else None
        first = 0 if height == 1 else rows.start
        zeros = None if self.zeros is None else self._values(self.zeros, rows)
        grid = Grid(self._values(self.scales, rows), zeros, height, first, groups)
        return parts.dequantize(lambda some: raw[some], grid, (len(raw), total))

    def kept(self, rows: slice) -> Float8 | None:
        """None where it is not FP8, or where 128 inputs may have several scales."""
        (height, width), total = self.block, self.weight.shape[1]
        has_narrow = width < total and width % GROUP > 0
        if self.weight.dtype != FLOAT8 or self.zeros is not None or has_narrow:
            return None
        scales = self._values(self.scales, rows)
        if height > 1:
            scales = scales[torch.arange(rows.start, rows.stop) // height]
        each = scales.repeat_interleave(-(-width // GROUP), 1)[:, : -(-total // GROUP)]
        return Float8(self.weight.read(rows).view(torch.uint8), each)

    def _values(self, part: Part, rows: slice) -> Tensor:
        """-> float32 [blocks of rows, groups]: all, or one a row of these."""
        read = (part.read(rows) if self.block[0] == 1 else part.read()).to(torch.float32)
        return read if read.ndim == 2 else read.reshape(-1, 1)
