"""What Gemma 4 does to rows beside the usual norms: several norms of one row, norms of what is added, and
logits that never leave a range.

Everything is computed in float32 and rounded where it is written. Invariant: as in cuda/rows.py, a row's
result depends on that row alone, and every program waits before its first load of a computed number.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.rows import (
    LAUNCH,
    MAX_HIDDEN,
    TILE,
    added_up,
    are_dense,
    let_next_start,
    normed,
    wait_for_previous,
)


@triton.jit
def _norm_each(
    x_ptr: tensor, weights_ptr: tensor, out_ptr: tensor, eps: tensor, hidden: constexpr, block: constexpr
) -> None:
    """A program a row and norm."""
    let_next_start()
    row, which, at = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, block)
    inside, step = at < hidden, tl.num_programs(0).to(tl.int64) * hidden
    weight = tl.load(weights_ptr + which * hidden + at, mask=inside, other=0.0)
    wait_for_previous()
    x = tl.load(x_ptr + row * hidden + at, mask=inside, other=0.0).to(tl.float32)
    out = normed(x, weight, eps, hidden)
    tl.store(out_ptr + which * step + row * hidden + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def norm_each(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """x [T, hidden] -> [norms, T, hidden]: rms_norm(x) times each of the weights [norms, hidden] float32."""
    num_rows, hidden = x.shape
    out = x.new_empty((len(weights), num_rows, hidden))
    grid = (num_rows, len(weights))
    _norm_each[grid](x, weights, out, eps, *_sizes(hidden, x, weights), **_options(hidden))
    return out


@triton.jit
def _add_normed(
    left_ptr: tensor, right_ptr: tensor, weights_ptr: tensor, out_ptr: tensor, eps: tensor,
    left_splits: constexpr, right_splits: constexpr, hidden: constexpr, block: constexpr,
) -> None:  # fmt: skip
    let_next_start()
    start, at = tl.program_id(0).to(tl.int64) * hidden, tl.arange(0, block)
    inside, step = at < hidden, tl.num_programs(0).to(tl.int64) * hidden
    dtype = out_ptr.dtype.element_ty
    left_weight = tl.load(weights_ptr + at, mask=inside, other=0.0)
    right_weight = tl.load(weights_ptr + hidden + at, mask=inside, other=0.0)
    wait_for_previous()
    left = added_up(left_ptr + start + at, step, inside, left_splits, dtype)
    right = added_up(right_ptr + start + at, step, inside, right_splits, dtype)
    out = normed(left, left_weight, eps, hidden) + normed(right, right_weight, eps, hidden)
    tl.store(out_ptr + start + at, out.to(dtype), mask=inside)


def add_normed(left: Tensor, right: Tensor, weights: Tensor, eps: float, out: Tensor) -> None:
    """out [T, hidden] = rms_norm(left) * weights[0] + rms_norm(right) * weights[1]. left and right are
    products in parts, [parts, T, hidden]; weights [2, hidden] float32."""
    num_rows, hidden = out.shape
    assert left.shape[1:] == right.shape[1:] == out.shape, "all are of the same rows"
    sizes = (len(left), len(right), *_sizes(hidden, left, right, weights, out))
    _add_normed[(num_rows,)](left, right, weights, out, eps, *sizes, **_options(hidden))


def _sizes(hidden: int, *tensors: Tensor) -> tuple[int, int]:
    assert hidden <= MAX_HIDDEN, "a row is one tile"
    assert are_dense(*tensors), "rows follow each other"
    return hidden, triton.next_power_of_2(hidden)


def _options(hidden: int) -> dict[str, int]:
    return {"num_warps": min(max(triton.next_power_of_2(hidden) // 512, 1), 16), **LAUNCH}


@triton.jit
def _cap(logits_ptr: tensor, cap: tensor, vocab: constexpr, tile: constexpr) -> None:
    """tanh(z) is 1 - 2 / (e^2z + 1), also where e^2z is zero or infinite."""
    let_next_start()
    wait_for_previous()
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    line = logits_ptr + tl.program_id(0).to(tl.int64) * vocab + at
    logits = tl.load(line, mask=at < vocab, other=0.0).to(tl.float32)
    capped = cap * (1.0 - 2.0 / (tl.exp(2.0 * (logits / cap)) + 1.0))
    tl.store(line, capped.to(logits_ptr.dtype.element_ty), mask=at < vocab)


def cap_logits(logits: Tensor, cap: float) -> None:
    """logits [L, vocab] = cap * tanh(logits / cap), in place."""
    assert are_dense(logits), "rows follow each other"
    num_rows, vocab = logits.shape
    _cap[(num_rows, triton.cdiv(vocab, TILE))](logits, cap, vocab, TILE, num_warps=4, **LAUNCH)
