"""MXFP4 (gpt-oss): 32 values of four bits share one power of two.

Experts are stacked: `experts.gate_up_proj_blocks` uint8 [experts, rows, groups, 16], its rows gate and up in
turn, `experts.down_proj_blocks`; `_scales` uint8 [experts, rows, groups] are exponents + 127.
"""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

from paceline.loaders.quantized.fp4 import fp4_values, powers_of_two
from paceline.loaders.quantized.parts import Grid, Module, Part, Reader, Shape, dequantize

GROUP = 32
MOST_EXPERTS = 4_096
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d{1,6})\.(?P<part>gate|up|down)_proj")
STACKED = {"gate": ("gate_up_proj", 0, 2), "up": ("gate_up_proj", 1, 2), "down": ("down_proj", 0, 1)}


def mxfp4_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., groups, 16], scales uint8 [..., groups] -> float32 [..., groups * 32]."""
    shape = (scales.shape[:-1].numel(), GROUP * scales.shape[-1])
    flat, grid = blocks.reshape(shape[0], -1), Grid(powers_of_two(scales).reshape(shape[0], -1))
    return dequantize(lambda some: fp4_values(flat[some]), grid, shape).view(*scales.shape[:-1], -1)


def expert_names(name: str, shape: Shape) -> list[str]:
    """The weights that a stacked tensor of blocks stands for."""
    stem, _, part = name.removesuffix("_blocks").rpartition(".")
    kinds = [
        kind for kind, (stacked, _, _) in STACKED.items() if stacked == part and name.endswith("_blocks")
    ]
    count = min(shape[0], MOST_EXPERTS) if shape else 0
    return [f"{stem}.{i}.{kind}_proj.weight" for kind in kinds for i in range(count)]


def open_mxfp4(module: Module) -> Reader | None:
    """A weight of one expert, out of the stacked tensors; None for all others."""
    name = EXPERT.fullmatch(module.stem)
    if name is None:
        return None
    part, first, step = STACKED[name["part"]]
    stacked = Module(module.where, module.found, f"{name['experts']}.{part}", module.shape, module.used)
    if stacked.type_of("_blocks") is None:
        return None
    (rows, width), experts = module.shape, (*stacked.shape_of("_blocks"), 0)[0]
    if int(name["index"]) >= experts or width % GROUP:
        problem = f"has {experts} experts with groups of {GROUP}, where {module.stem} of {list(module.shape)}"
        raise stacked.refuse("_blocks", f"{problem} is asked for; fetch the model again")
    sizes = (experts, step * rows, width // GROUP)
    blocks = stacked.take("_blocks", ("U8",), (*sizes, GROUP // 2))
    scales = stacked.take("_scales", ("U8",), sizes)
    return partial(_read, blocks, scales, int(name["index"]), slice(first, None, step))


def _read(blocks: Part, scales: Part, expert: int, every: slice, rows: slice) -> Tensor:
    stored = slice(rows.start * every.step, rows.stop * every.step)
    return mxfp4_rows(blocks.read(expert, stored)[every], scales.read(expert, stored)[every])
