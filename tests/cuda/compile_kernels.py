"""Compiles kernels for a GPU that need not be there: run as a script, since Triton's interpreter must be off.

The interpreter takes Python that the compiler refuses; this is where a machine without a GPU sees it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.cuda import (
    add_splits,
    advance,
    attend_split,
    features,
    gates,
    move,
    multiply,
    norms,
    pick,
    recurrent,
    route,
    rows,
    top,
    tree_nodes,
    walk,
)
from paceline.cuda.batch import DeviceBatch

HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP32, FP64, I8, I16, I32, I64 = "*bf16", "*fp32", "*fp64", "*i8", "*i16", "*i32", "*i64"
U32 = "*u32"
TYPES = (BF16, FP32, FP64, I8, I16, I32, I64, U32, "fp32", "i32")  # any other argument is a constant
JOIN = ("fp32", "fp32", 576, 2)
BATCH = DeviceBatch(I32, I32, I32, I32, I32, I32, I64)
RULE = (16, 32, 128, 128)  # key heads, value heads, and numbers of each
OF_HEAD = [I64, I64, *[I32] * 4, "i32"]
NODES = tree_nodes.TreeNodes(I32, I32, FP32, I64, I32, I32, I64, I32)
WALKED = walk.Walked(I32, I64, I32, I32)
WALK = [BATCH, I64, I32, "i32", BATCH, I64, I64, I32, I32, "i32", I32, WALKED, I32, I32]
ADVANCE = [BATCH, I64, I64, I32, "i32", BATCH, *OF_HEAD, *[I32] * 3, 5, 8, 2, 2, 4, 4]


def attending(
    cache: str, counters: str | None, *how: int, dim: int = 128, block_m: int = 16, paths: str | None = None
) -> list[Any]:
    pointers = (BF16, cache, cache, BF16, FP32, FP32, FP32, *[I32] * 6, I64, paths, FP32, counters)
    return [*pointers, "fp32", *["i32"] * 4, 8, 4, dim, dim, 16, block_m, *how]


NO_EXTRAS = (False, False, 0, 0, False)  # of attention
IN_ORDER = ((0, 128, 1024, False, 1), (512, 128, 1024, True, 1))  # with paths
WIDE_HEADS = (16, 2, 512, 2, 256, 1, 0, True)  # of `_place`


def multiplying(
    packed: str, bits: int, activation: str | None, is_grouped: bool = False, scales: str = I32
) -> list[Any]:
    out = FP32 if activation is None else BF16
    group = 64 if bits >= 16 else 128
    grouped = (I32, I32, FP32 if activation is None else None) if is_grouped else (None, None, None)
    sizes = (bits, group, 16, 64, 4, True, True, True, activation, 1, 2 if bits == 16 else 0, 128, False)
    return [BF16, packed, scales, None, out, *grouped, *["i32"] * 9, *sizes]


def choosing(correction: str | None, scales: str | None, *how: int | bool) -> list[Any]:
    return [FP32, correction, scales, *[I32] * 4, FP32, "i32", "i32", "fp32", *how]


CASES: list[tuple[Any, list[Any]]] = [
    (features._gather, [I64, FP32, BF16, "fp32", 576, 1024]),
    (features._gather, [I64, None, BF16, "fp32", 576, 1024]),
    (features._join, [I32, BF16, FP32, FP32, FP32, BF16, BF16, *JOIN, False, 1024]),
    (features._join, [I32, BF16, FP32, FP32, FP32, BF16, BF16, *JOIN, True, 1024]),
    (features._join, [I32, BF16, BF16, None, None, BF16, None, "fp32", "fp32", 576, 1, False, 1024]),
    (pick._guess_blocks, [BF16, BF16, I32, FP64, I64, I64, FP32, FP32, I32, "i32", "i32", 8192, 1024]),
    (pick._guess_blocks, [BF16, None, None, FP64, I64, I64, FP32, FP32, I32, "i32", "i32", 8192, 1024]),
    (pick._guess_rows, [FP32, FP32, I32, I32, I32, FP32, I32, 8, 8]),
    (pick._guess_rows, [FP32, FP32, I32, None, I32, FP32, I32, 8, 8]),
    (top._top_blocks, [BF16, I32, FP64, I64, I64, FP32, FP32, I32, "i32", "i32", 8192, 1024, 8]),
    (top._top_blocks, [BF16, None, FP64, I64, I64, FP32, FP32, I32, "i32", "i32", 8192, 1024, 4]),
    (top._top_rows, [FP32, FP32, I32, I32, I32, FP32, 8, 8, 64]),
    (top._top_rows, [FP32, FP32, I32, None, I32, FP32, 126, 8, 1024]),
    (attend_split.attend_split, attending(BF16, I32, 0, 0, 0, False, 1, True, True, 4, 16, True)),
    (attend_split.attend_split, attending(I8, None, 512, 128, 1024, False, 2, False, False, 0, 0, False)),
    *((attend_split.attend_split, attending(BF16, None, *how, *NO_EXTRAS, paths=I32)) for how in IN_ORDER),
    (attend_split.trace, [I32, I32, I64, I32, "i32", "i32", "i32", 16]),
    # as wide as Gemma 4's heads
    (
        attend_split.attend_split,
        attending(BF16, None, 0, 128, 1024, False, 1, *NO_EXTRAS, dim=512, block_m=32),
    ),
    (attend_split.attend_split, attending(I8, I32, 0, 0, 0, False, 1, False, False, 4, 8, True, dim=512)),
    (add_splits.add_splits, [FP32, FP32, FP32, I32, BF16, "i32", 512, 512, 8]),
    (rows._place, [FP32, I32, I32, FP32, FP32, BF16, BF16, FP32, FP32, BF16, "fp32", *WIDE_HEADS]),
    (rows._add_norm, [BF16, BF16, FP32, FP32, BF16, "fp32", "fp32", "fp32", 2816, 1, 4096]),
    (norms._norm_each, [BF16, FP32, BF16, "fp32", 2816, 4096]),
    (norms._add_normed, [FP32, BF16, FP32, BF16, "fp32", 8, 1, 2816, 4096]),
    (norms._cap, [BF16, "fp32", 262_144, 1024]),
    (add_splits.add_splits, [FP32, FP32, FP32, I32, BF16, "i32", 96, 128, 16]),
    (multiply.multiply, multiplying(BF16, 16, "silu")),
    (multiply.multiply, multiplying(I16, 4, None)),
    (multiply.multiply, multiplying(BF16, 16, "silu", is_grouped=True)),
    (multiply.multiply, multiplying(I16, 8, None, is_grouped=True)),
    (multiply.multiply, multiplying(I16, 8, "silu", scales=FP32)),
    (multiply.multiply, multiplying(I16, 4, "clamped", is_grouped=True, scales=U32)),
    (gates._gate, [BF16, FP32, None, BF16, "fp32", "i32", 256, 2, 256]),
    (gates._gate, [FP32, BF16, FP32, BF16, "fp32", "i32", 128, 1, 128]),
    (recurrent._convolve, [BF16, FP32, *[I32] * 3, *[FP32] * 6, "i32", *RULE, 4, 1, 4, tl.bfloat16, 128]),
    (recurrent._recur, [FP32, FP32, *[I32] * 3, FP32, FP32, *RULE, 128, recurrent.TILE]),
    (route.choose, choosing(None, FP32, 128, 8, 1, 1, 0, 0, True, 16, 16, 128, True)),
    (route.choose, choosing(FP32, None, 12, 3, 4, 2, 2, 1, False, 2, 64, 16, False)),
]

BETWEEN: list[tuple[Any, list[Any]]] = [
    (advance._advance, ADVANCE),
    (tree_nodes._lay_out, [BATCH, I64, I32, NODES, "i32", 8, 48, 64, 2]),
    (tree_nodes._grow, [NODES, I32, FP32, 0, 1, 8, 48, 8]),
    (tree_nodes._grow, [NODES, I32, FP32, 3, 8, 8, 48, 64]),
    (tree_nodes._choose, [NODES, BATCH, I64, I32, FP32, 8, 48, 31, 64]),
    (walk._walk, [*WALK, 31, 6, 32, 8, 2, 2]),
    (walk._walk, [*WALK, 63, 8, 64, 16, 5, 5]),
    (move._move, [I64, I32, I32, I32, I32, 7, 8, 1024]),
]


def compiled(kernel: Any, arguments: list[Any]) -> str:
    """arguments: the type of each, or the value of a constant. -> PTX"""
    named = dict(zip(kernel.arg_names, arguments, strict=True))
    is_typed = [isinstance(value, tuple) or value in TYPES for value in arguments]
    signature = {
        name: value if typed else "constexpr"
        for (name, value), typed in zip(named.items(), is_typed, strict=True)
    }
    constants = {(i,): value for i, value in enumerate(arguments) if not is_typed[i]}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return str(triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": True}).asm["ptx"])


if __name__ == "__main__":
    # as on a Hopper
    rows.OVERLAPS = multiply.OVERLAPS = tl.constexpr(True)  # type: ignore[attr-defined]
    for kernel, arguments in CASES:
        ptx = compiled(kernel, arguments)
        assert "griddepcontrol.wait" in ptx, f"{kernel} does not wait for the one before"
    for bits, scales in ((8, FP32), (4, U32)):  # it is not followed so closely
        compiled(multiply.expand, [I16, scales, BF16, *["i32"] * 3, bits, 128, 64])
    for kernel, arguments in BETWEEN:
        assert "griddepcontrol" not in compiled(kernel, arguments), "it starts when all before has ended"
    print(len(CASES) + len(BETWEEN) + 2, "compiled")
