"""Numbers of four bits (E2M1), two in a byte, the low half first; each group of inputs has a scale.

MXFP4: `weight_scale` uint8 [outputs, groups] are exponents + 127. NVFP4: it is FP8, and one more number
scales the whole tensor: compressed-tensors divides by `weight_global_scale`, ModelOpt multiplies with
`weight_scale_2`; that product of scales is rounded once, too.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.loaders.quantized.parts import Grid, Module, Part, Reader, dequantize

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
DIVISOR, FACTOR = ".weight_global_scale", ".weight_scale_2"


class Stored(NamedTuple):
    values: Part
    scales: Part
    whole: Part | None  # the scale of the tensor


def fp4_values(bytes_: Tensor) -> Tensor:
    """uint8 [..., n] -> float32 [..., 2 n]."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    halves = torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2)
    return table.index_select(0, halves.flatten().to(torch.int32)).view(halves.shape)


def powers_of_two(exponents: Tensor) -> Tensor:
    """uint8, each 127 more than the power -> float32."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.float32)


def open_fp4(module: Module, part: str) -> Reader | None:
    """part: what the tensor of values is called; None if it is not one of bytes."""
    if module.type_of(part) != "U8":
        return None
    rows, width = module.shape
    values = module.take(part, ("U8",), (rows, -(-width // 2)))
    num_groups = (*module.shape_of(".weight_scale")[1:], 0)[0]
    if num_groups < 1 or width % num_groups:
        problem = f"has {num_groups} groups, which a weight of {list(module.shape)} cannot have"
        raise module.refuse(".weight_scale", f"{problem}; fetch the model again")
    scales = module.take(".weight_scale", ("U8", "F8_E8M0", "F8_E4M3"), (rows, num_groups))
    name = next((name for name in (DIVISOR, FACTOR) if module.type_of(name)), None)
    whole = module.take(name, ("F32",), (), (1,)) if name is not None else None
    return partial(_read, Stored(values, scales, whole), width)


def _read(stored: Stored, width: int, rows: slice) -> Tensor:
    values, scales = stored.values.read(rows), stored.scales.read(rows)
    scales = powers_of_two(scales) if scales.dtype == torch.uint8 else scales.to(torch.float32)
    if stored.whole is not None:
        factor = stored.whole.read().reshape(())
        scales = scales / factor if stored.whole.name.endswith(DIVISOR) else scales * factor
    return dequantize(lambda some: fp4_values(values[some])[:, :width], Grid(scales), (len(values), width))
