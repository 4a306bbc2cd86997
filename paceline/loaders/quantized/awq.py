"""AWQ, version gemm: `qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8], `scales`
[groups, outputs]. The eight outputs of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from paceline.loaders.fields import Fields
from paceline.loaders.quantized.parts import SCALES, Grid, Module, Part, Reader, dequantize

BITS, PER_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output lies in each place of a word


def check_settings(config: Fields) -> None:
    key = "version" if config.get("version") is not None else "format"
    if config.text(key, "gemm").lower() != "gemm":
        raise config.refuse(key, "is not read; use an AWQ model of version gemm")
    key = "bits" if config.get("bits") is not None else "w_bit"
    if config.count(key, BITS) != BITS:
        raise config.refuse(key, "is not read; use an AWQ model of 4 bits")


def open_awq(module: Module) -> Reader | None:
    if module.type_of(".qweight") is None:
        return None
    rows, width = module.shape
    num_groups = (module.shape_of(".scales") or (0,))[0]
    if rows % PER_WORD or num_groups < 1 or width % num_groups:
        problem = f"has {num_groups} groups, which a weight of {list(module.shape)} cannot have"
        raise module.refuse(".scales", f"{problem}; fetch the model again")
    qweight = module.take(".qweight", ("I32",), (width, rows // PER_WORD))
    scales = module.take(".scales", SCALES, (num_groups, rows))
    zeros = module.take(".qzeros", ("I32",), (num_groups, rows // PER_WORD))
    return partial(_read, qweight, scales, zeros)


def _read(qweight: Part, scales: Part, zeros: Part, rows: slice) -> Tensor:
    first, last = rows.start // PER_WORD, -(-rows.stop // PER_WORD)
    words = qweight.read(slice(None), slice(first, last))
    start = rows.start - first * PER_WORD
    wanted = slice(start, start + rows.stop - rows.start)
    offsets = _outputs(zeros.read(slice(None), slice(first, last)))[wanted]
    grid = Grid(scales.read(slice(None), rows).to(torch.float32).t(), offsets.to(torch.float32))

    def codes(some: slice) -> Tensor:
        begin, end = start + some.start, start + some.stop
        whole = slice(begin // PER_WORD, -(-end // PER_WORD))
        skipped = whole.start * PER_WORD
        return _outputs(words[:, whole])[begin - skipped : end - skipped]

    return dequantize(codes, grid, (rows.stop - rows.start, qweight.shape[0]))


def _outputs(words: Tensor) -> Tensor:
    """int32 [n, words] -> uint8 [outputs, n]."""
    turned = words.t().contiguous()
    outputs = torch.empty(len(turned), PER_WORD, turned.shape[1], dtype=torch.uint8)
    for place, output in enumerate(ORDER):
        outputs[:, output] = (turned >> BITS * place) & 15
    return outputs.flatten(0, 1)
