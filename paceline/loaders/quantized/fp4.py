"""Numbers of four bits (E2M1), two in a byte, the low half first; each group of inputs has a scale.

MXFP4: `weight_scale` uint8 [outputs, groups] are exponents + 127. NVFP4: it is FP8, and one more number
scales the whole tensor: compressed-tensors divides by `weight_global_scale`, ModelOpt multiplies with
`weight_scale_2`; that product of scales is rounded once, too.
MXFP4 can be read as it is stored, for devices that keep it so.
gpt-oss's MXFP4: experts are stacked, `experts.gate_up_proj_blocks` uint8 [experts, rows, groups, 16], its
rows gate and up in turn, `experts.down_proj_blocks`; `_scales` uint8 [experts, rows, groups].
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.loaders.quantized.parts import Grid, Module, Part, Reader, Shape, dequantize
from paceline.models.kept import FLOAT4_GROUP as GROUP
from paceline.models.kept import Float4

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
DIVISOR, FACTOR = ".weight_global_scale", ".weight_scale_2"
MOST_EXPERTS = 4_096
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d{1,6})\.(?P<part>gate|up|down)_proj")
STACKED = {"gate": ("gate_up_proj", 0, 2), "up": ("gate_up_proj", 1, 2), "down": ("down_proj", 0, 1)}


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
    sizes = rows, module.num_groups(".weight_scale", 1)
    scales = module.take(".weight_scale", ("U8", "F8_E8M0", "F8_E4M3"), sizes)
    name = next((name for name in (DIVISOR, FACTOR) if module.type_of(name)), None)
    whole = module.take(name, ("F32",), (), (1,)) if name is not None else None
    return Fp4Reader(values, scales, width, whole)


@dataclass(frozen=True, slots=True)
class Fp4Reader:
    """Of one weight."""

    values: Part  # [rows, bytes], or of a stack [experts, rows, groups, bytes]
    scales: Part  # [rows, groups], or [experts, rows, groups]
    width: int
    whole: Part | None = None  # the scale of the tensor
    expert: int | None = None  # of a stack
    first: int = 0  # the rows that are the weight's: this one, and then each `step`-th
    step: int = 1

    def __call__(self, rows: slice) -> Tensor:
        raw, each = self._stored(rows)
        each = powers_of_two(each) if each.dtype == torch.uint8 else each.to(torch.float32)
        if self.whole is not None:
            factor = self.whole.read().reshape(())
            each = each / factor if self.whole.name.endswith(DIVISOR) else each * factor
        sizes = len(raw), self.width
        return dequantize(lambda some: fp4_values(raw[some])[:, : self.width], Grid(each), sizes)

    def kept(self, rows: slice) -> Float4 | None:
        """None where scales are no powers of two, or not for 32 inputs each."""
        is_power = self.scales.dtype in ("U8", "F8_E8M0") and self.whole is None
        if not is_power or GROUP * self.scales.shape[-1] != self.width:
            return None
        raw, each = self._stored(rows)
        return Float4(raw, each.view(torch.uint8))

    def _stored(self, rows: slice) -> tuple[Tensor, Tensor]:
        """-> [rows, bytes] and [rows, groups]."""
        span = slice(rows.start * self.step, rows.stop * self.step)
        index = (span,) if self.expert is None else (self.expert, span)
        raw, each = (part.read(*index)[self.first :: self.step] for part in (self.values, self.scales))
        return raw.flatten(1), each


def expert_names(name: str, shape: Shape) -> list[str]:
    """The weights that a stacked tensor of blocks stands for."""
    stem, _, part = name.removesuffix("_blocks").rpartition(".")
    count = min(shape[0], MOST_EXPERTS) if shape and name.endswith("_blocks") else 0
    kinds = [kind for kind, (stacked, _, _) in STACKED.items() if stacked == part]
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
    return Fp4Reader(blocks, scales, width, None, int(name["index"]), first, step)
