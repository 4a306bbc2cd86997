"""Compiles kernels for a GPU that need not be there: run as a script, since Triton's interpreter must be off.

The interpreter takes Python that the compiler refuses; this is where a machine without a GPU sees it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.cuda import add_splits, attend_split, burst, features, multiply, pick, route, rows
from paceline.cuda.batch import DeviceBatch

HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP32, FP64, I8, I16, I32, I64 = "*bf16", "*fp32", "*fp64", "*i8", "*i16", "*i32", "*i64"
TYPES = (BF16, FP32, FP64, I8, I16, I32, I64, "fp32", "i32")  # any other argument is a constant
JOIN = ("fp32", "fp32", 576, 2)
BATCH = DeviceBatch(I32, I32, I32, I32, I32, I32, I64)
OF_HEAD = [I64, I64, *[I32] * 4, "i32"]
ADVANCE = [BATCH, I64, I64, I32, "i32", BATCH, *OF_HEAD, *[I32] * 3, 5, 8, 2, 2, 4, 4]


def attending(cache: str, counters: str | None, *how: int) -> list[Any]:
    pointers = (BF16, cache, cache, BF16, FP32, FP32, FP32, *[I32] * 6, I64, FP32, counters)
    return [*pointers, "fp32", *["i32"] * 4, 8, 4, 128, 128, 16, 16, *how]


def multiplying(packed: str, bits: int, activation: str | None, is_grouped: bool = False) -> list[Any]:
    out = FP32 if activation is None else BF16
    group = 64 if bits >= 16 else 128
    grouped = (I32, I32, FP32 if activation is None else None) if is_grouped else (None, None, None)
    sizes = (bits, group, 16, 64, 4, True, True, True, activation, 1, 2 if bits == 16 else 0, 128, False)
    return [BF16, packed, I32, None, out, *grouped, *["i32"] * 9, *sizes]


def choosing(correction: str | None, *how: int | bool) -> list[Any]:
    return [FP32, correction, *[I32] * 3, FP32, "i32", "i32", "fp32", *how]


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
    (attend_split.attend_split, attending(BF16, I32, 0, 0, 0, False, 1, True, True, 4, 16, True)),
    (attend_split.attend_split, attending(I8, None, 512, 128, 1024, False, 2, False, False, 0, 0, False)),
    (add_splits.add_splits, [FP32, FP32, FP32, I32, BF16, "i32", 96, 128, 16]),
    (multiply.multiply, multiplying(BF16, 16, "silu")),
    (multiply.multiply, multiplying(I16, 4, None)),
    (multiply.multiply, multiplying(BF16, 16, "silu", is_grouped=True)),
    (multiply.multiply, multiplying(I16, 8, None, is_grouped=True)),
    (route.choose, choosing(None, 128, 8, 1, 1, 0, 0, True, 16, 16, 128, True)),
    (route.choose, choosing(FP32, 12, 3, 4, 2, 2, 1, False, 2, 64, 16, False)),
]


def compiled(kernel: Any, arguments: list[Any]) -> str:
    """arguments: the type of each, or the value of a constant. -> PTX"""
    named = dict(zip(kernel.arg_names, arguments, strict=True))
    is_typed = [isinstance(value, DeviceBatch) or value in TYPES for value in arguments]
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
    assert "griddepcontrol" not in compiled(burst._advance, ADVANCE), "it starts when all before has ended"
    print(len(CASES) + 1, "compiled")
