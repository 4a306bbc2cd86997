"""Gates of a row: what was attended, or read of a state, times a function of a product with the row.

Attention's gate is a sigmoid; what a recurrent layer reads is normed head by head, and its gate is a silu.
Invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.rows import LAUNCH, added_up, are_dense, let_next_start, normed, wait_for_previous
from paceline.models.kept import Kept

HALVES = "q_proj", "q_gate"  # of a head's rows in a file's q_proj: queries, then their gates


@triton.jit
def _gate(
    x_ptr: tensor, gates_ptr: tensor, norm_ptr: tensor, out_ptr: tensor, eps: tensor, stride: tensor,
    dim: constexpr, splits: constexpr, block: constexpr,
) -> None:  # fmt: skip
    """One head of a row."""
    let_next_start()
    row, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, block)
    inside, start = at < dim, (row * tl.num_programs(1) + head) * dim
    wait_for_previous()
    source, step = gates_ptr + row * stride + head * dim + at, tl.num_programs(0).to(tl.int64) * stride
    gate = added_up(source, step, inside, splits, out_ptr.dtype.element_ty)
    x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = normed(x, weight, eps, dim) * gate
    x = x / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + start + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def gated(
    x: Tensor,  # [T, heads, dim]
    gates: Tensor,  # [parts, T, heads * dim], columns of a product in parts
    dtype: torch.dtype,  # of activations
    norm: Tensor | None = None,  # [dim] float32: of each head of x; then the gate is a silu
    eps: float = 0.0,
) -> Tensor:
    """-> [T, heads * dim]."""
    (num_rows, heads, dim), (parts, _, width), stride = x.shape, gates.shape, gates.stride(1)
    assert gates.shape[1:] == (num_rows, heads * dim), "a gate for every number"
    assert gates.stride() == (num_rows * stride, stride, 1), "columns of a dense product"
    assert are_dense(x), "rows follow each other"
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    _gate[(num_rows, heads)](x, gates, norm, out, eps, stride, dim, parts, block, num_warps=1, **LAUNCH)
    return out


def with_gates(names: Iterable[str]) -> set[str]:
    """Of a model's weights: gates have a name of their own."""
    return {*names, *(name.replace(*HALVES) for name in names if "q_proj" in name)}


def gates_apart(head_dim: int, read: Callable[..., Any]) -> Callable[..., Any]:
    """Reads queries without their gates by their usual name, and gates by their own."""

    def apart(name: str, *rows: slice) -> Any:
        half = next((i for i, each in enumerate(HALVES) if f"self_attn.{each}." in name), None)
        if half is None:
            return read(name, *rows)

        def own(tensor: Tensor) -> Tensor:
            return tensor.unflatten(0, (-1, 2, head_dim))[:, half].flatten(0, 1)

        found = read(name.replace(HALVES[1], HALVES[0]))
        if found is None:
            return None
        return type(found)(*map(own, found)) if isinstance(found, Kept) else own(found)

    return apart
