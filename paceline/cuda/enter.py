"""What enters a learned head: the target's hidden states, from wherever passes left them, and embeddings
beside them, one launch each.

Hidden states are found by their addresses, which the host writes among the inputs of a pass: no copy a
request, and nothing of it outside a CUDA graph. Invariant: an address is of as many numbers, of the dtype of
`out`, as a row of the target's residual stream has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.cuda.overlap import LAUNCH, let_next_start, wait_for_previous
from paceline.cuda.rows import MAX_HIDDEN, added_up


@triton.jit
def _gather(
    addresses_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    hidden: tl.constexpr,
    block: tl.constexpr,
) -> None:
    let_next_start()
    at, index = tl.arange(0, block), tl.program_id(0).to(tl.int64)
    inside = at < hidden
    wait_for_previous()
    source = tl.load(addresses_ptr + index).to(tl.pointer_type(out_ptr.dtype.element_ty))
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x = (
            x
            * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
            * tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        )
    tl.store(out_ptr + index * hidden + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def gather(
    addresses: torch.Tensor, weight: torch.Tensor | None, eps: float, hidden: int, out: torch.Tensor
) -> None:
    """out [T, parts * hidden] = what lies at addresses [T, parts] int64, each part normed with weight
    [hidden] if there is one.
    """
    num_rows, parts = addresses.shape
    assert out.shape == (num_rows, parts * hidden), "a part an address"
    assert hidden <= MAX_HIDDEN, "a row is one tile"
    assert all(x.is_contiguous() for x in (addresses, out)), "rows follow each other"
    block = triton.next_power_of_2(hidden)
    _gather[(num_rows * parts,)](addresses, weight, out, eps, hidden, block, num_warps=4, **LAUNCH)


@triton.jit
def _join(
    ids_ptr: tl.tensor,
    table_ptr: tl.tensor,
    features_ptr: tl.tensor,
    left_weight_ptr: tl.tensor,
    right_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    hidden: tl.constexpr,
    splits: tl.constexpr,
    keeps_normed: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Programs (row, 0) write embeddings, programs (row, 1) features."""
    let_next_start()
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = at < hidden
    dtype = out_ptr.dtype.element_ty
    wait_for_previous()
    if tl.program_id(1) == 0:
        token = tl.load(ids_ptr + row).to(tl.int64)
        x = tl.load(table_ptr + token * hidden + at, mask=inside, other=0.0).to(tl.float32) * scale
        if left_weight_ptr is not None:
            x = x.to(dtype).to(tl.float32)
            x = (
                x
                * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
                * tl.load(left_weight_ptr + at, mask=inside, other=0.0)
            )
        tl.store(out_ptr + row * 2 * hidden + at, x.to(dtype), mask=inside)
    else:
        raw = added_up(
            features_ptr + row * hidden + at, tl.num_programs(0).to(tl.int64) * hidden, inside, splits, dtype
        )
        x = raw
        if right_weight_ptr is not None:
            x = (
                raw
                * tl.rsqrt(tl.sum(raw * raw, 0) / hidden + eps)
                * tl.load(right_weight_ptr + at, mask=inside, other=0.0)
            )
        tl.store(out_ptr + row * 2 * hidden + hidden + at, x.to(dtype), mask=inside)
        if residual_ptr is not None:
            kept = x if keeps_normed else raw
            tl.store(residual_ptr + row * hidden + at, kept.to(dtype), mask=inside)


def join(
    ids: torch.Tensor,  # [T]
    table: torch.Tensor,  # [vocab, hidden]
    scale: float,  # of embeddings
    features: torch.Tensor,  # [parts, T, hidden]: a product in parts
    weights: tuple[
        torch.Tensor | None, torch.Tensor | None
    ],  # [hidden] float32: norms of embeddings and of features
    eps: float,
    out: torch.Tensor,  # [T, 2 * hidden]: embeddings, then features
    residual: torch.Tensor | None = None,  # [T, hidden]: gets the features
    keeps_normed: bool = False,  # as they are after the norm
) -> None:
    splits, num_rows, hidden = features.shape
    assert out.shape == (num_rows, 2 * hidden), "two halves"
    assert hidden <= MAX_HIDDEN, "a row is one tile"
    assert (len(ids), table.shape[1]) == (num_rows, hidden), "one row a token"
    assert residual is None or residual.shape == (num_rows, hidden), "a residual is as wide as a feature"
    assert all(x.is_contiguous() for x in (table, features, out)), "rows follow each other"
    block = triton.next_power_of_2(hidden)
    _join[(num_rows, 2)](
        ids, table, features, *weights, out, residual, scale, eps, hidden, splits, keeps_normed, block, num_warps=4, **LAUNCH
    )  # fmt: skip
