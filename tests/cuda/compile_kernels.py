"""Compiles the kernels of learned heads for a GPU that need not be there: run as a script, since Triton's
interpreter must be off.

The interpreter takes Python that the compiler refuses; this is where a machine without a GPU sees it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.cuda import advance, features, overlap, pick

HOPPER = GPUTarget("cuda", 90, 32)
GATHER = {
    "addresses_ptr": "*i64",
    "weight_ptr": "*fp32",
    "out_ptr": "*bf16",
    "eps": "fp32",
    "hidden": 576,
    "block": 1024,
}
JOIN = {
    "ids_ptr": "*i32", "table_ptr": "*bf16", "features_ptr": "*fp32", "left_weight_ptr": "*fp32", "right_weight_ptr": "*fp32",
    "out_ptr": "*bf16", "residual_ptr": "*bf16", "scale": "fp32", "eps": "fp32", "hidden": 576, "splits": 2, "keeps_normed": False,
    "block": 1024,
}  # fmt: skip
BLOCKS = {
    "logits_ptr": "*bf16", "added_ptr": "*bf16", "ids_ptr": "*i32", "temperatures_ptr": "*fp64", "seeds_ptr": "*i64",
    "places_ptr": "*i64", "scores_ptr": "*fp32", "sums_ptr": "*fp32", "words_ptr": "*i32", "step": "i32", "num_requests": "i32",
    "vocab": 8192, "block": 1024,
}  # fmt: skip
ROWS = {
    "scores_ptr": "*fp32", "sums_ptr": "*fp32", "words_ptr": "*i32", "ids_ptr": "*i32", "tokens_ptr": "*i32", "chances_ptr": "*fp32",
    "drafted_ptr": "*i32", "num_blocks": 8, "width": 8,
}  # fmt: skip
WIDE = ("picked_ptr", "places_ptr", "speaking_ptr", "head_places_ptr")
SIZES = {"STEPS": 5, "ROWS": 8, "TABLE": 65, "HEAD_TABLE": 64, "RESULTS": 4, "NEXT": 4}
ADVANCE = {name: SIZES.get(name, "*i64" if name in WIDE else "*i32") for name in advance._advance.arg_names}
BARE = {
    "left_weight_ptr": None,
    "right_weight_ptr": None,
    "residual_ptr": None,
    "features_ptr": "*bf16",
    "splits": 1,
}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (features._gather, GATHER), (features._gather, {**GATHER, "weight_ptr": None}), (features._join, JOIN), (features._join, {**JOIN, **BARE}),
    (features._join, {**JOIN, "keeps_normed": True}), (pick._guess_blocks, BLOCKS),
    (pick._guess_blocks, {**BLOCKS, "added_ptr": None, "ids_ptr": None}), (pick._guess_rows, ROWS),
    (pick._guess_rows, {**ROWS, "ids_ptr": None}),
]  # fmt: skip


def compiled(kernel: Any, arguments: dict[str, Any]) -> str:
    """arguments: the type of each, or the value of a constant. -> PTX"""
    signature = {
        name: arguments[name] if isinstance(arguments[name], str) else "constexpr"
        for name in kernel.arg_names
    }
    constants = {
        (i,): arguments[name]
        for i, name in enumerate(kernel.arg_names)
        if not isinstance(arguments[name], str)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return str(triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": True}).asm["ptx"])


if __name__ == "__main__":
    overlap.OVERLAPS = tl.constexpr(True)  # as on a Hopper
    for kernel, arguments in CASES:
        assert "griddepcontrol.wait" in compiled(kernel, arguments), (
            f"{kernel} does not wait for the one before"
        )
    assert "griddepcontrol" not in compiled(advance._advance, ADVANCE), (
        "it is launched when all before it has ended"
    )
    print(len(CASES) + 1, "compiled")
