"""What a learned head reads: the target's hidden states, where passes left them, and embeddings beside them.

Hidden states are found by their addresses, which the host writes among the inputs of a pass: no copy a
request, and nothing of it outside a CUDA graph. Invariant: an address is of as many numbers, of the dtype of
`out`, as a row of the target's residual stream has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.rows import LAUNCH, added_up, are_dense, let_next_start, normed, wait_for_previous


@triton.jit
def _gather(
    addresses_ptr: tensor, weight_ptr: tensor, out_ptr: tensor, eps: tensor, hidden: constexpr,
    block: constexpr,
) -> None:  # fmt: skip
    let_next_start()
    at, index = tl.arange(0, block), tl.program_id(0).to(tl.int64)
    inside = at < hidden
    wait_for_previous()
    source = tl.load(addresses_ptr + index).to(tl.pointer_type(out_ptr.dtype.element_ty))
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x = normed(x, tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32), eps, hidden)
    tl.store(out_ptr + index * hidden + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def gather(addresses: Tensor, weight: Tensor | None, eps: float, like: Tensor) -> Tensor:
    """-> [T, parts * hidden]: rows like `like` [hidden] that lie at addresses [T, parts] int64, normed if
    there is a weight."""
    (num_rows, parts), hidden = addresses.shape, len(like)
    out, block = like.new_empty((num_rows, parts * hidden)), triton.next_power_of_2(hidden)
    _gather[(num_rows * parts,)](addresses, weight, out, eps, hidden, block, num_warps=4, **LAUNCH)
    return out


@triton.jit
def _join(
    ids_ptr: tensor, table_ptr: tensor, features_ptr: tensor, left_weight_ptr: tensor,
    right_weight_ptr: tensor, out_ptr: tensor, residual_ptr: tensor, scale: tensor, eps: tensor,
    hidden: constexpr, splits: constexpr, keeps_normed: constexpr, block: constexpr,
) -> None:  # fmt: skip
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
            left_weight = tl.load(left_weight_ptr + at, mask=inside, other=0.0)
            x = normed(x.to(dtype).to(tl.float32), left_weight, eps, hidden)
        tl.store(out_ptr + row * 2 * hidden + at, x.to(dtype), mask=inside)
    else:
        step = tl.num_programs(0).to(tl.int64) * hidden
        raw = added_up(features_ptr + row * hidden + at, step, inside, splits, dtype)
        x = raw
        if right_weight_ptr is not None:
            x = normed(raw, tl.load(right_weight_ptr + at, mask=inside, other=0.0), eps, hidden)
        tl.store(out_ptr + row * 2 * hidden + hidden + at, x.to(dtype), mask=inside)
        if residual_ptr is not None:
            kept = x if keeps_normed else raw
            tl.store(residual_ptr + row * hidden + at, kept.to(dtype), mask=inside)


def join(
    ids: Tensor,  # [T]
    embedding: tuple[Tensor, float],  # [vocab, hidden], and what its rows are multiplied by
    features: Tensor,  # [parts, T, hidden]: a product in parts
    weights: tuple[Tensor | None, Tensor | None],  # [hidden] float32: norms of both
    eps: float,
    residual: Tensor | None = None,  # [T, hidden]: gets the features
    keeps_normed: bool = False,  # as they are after the norm
) -> Tensor:
    """-> [T, 2 * hidden]: embeddings, then features."""
    (splits, num_rows, hidden), (table, scale) = features.shape, embedding
    assert are_dense(table, features), "rows follow each other"
    out, sizes = table.new_empty((num_rows, 2 * hidden)), (hidden, splits, keeps_normed)
    _join[(num_rows, 2)](
        ids, table, features, *weights, out, residual, scale, eps, *sizes, triton.next_power_of_2(hidden),
        num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out
