"""The sums of attention's splits, added in order: by a kernel, or by the last program that computes one.

Invariant: the order of splits is fixed and so is every operation on them, so the bits are the same whichever
program adds them, and however many splits there might be beyond a row's own.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from paceline.cuda.rows import let_next_start, wait_for_previous


class Partials(NamedTuple):
    """Of each row, head and split, float32."""

    peaks: tensor  # the highest score; -inf where nothing is seen
    totals: tensor  # of the weights
    sums: tensor  # [D] each: of weighted values


@triton.jit
def _load_chunk(
    partials: Partials, at: tensor, is_there: tensor, first: tensor, end: tensor, DIM: constexpr,
    PADDED: constexpr, CHUNK: constexpr,
) -> tl.tuple:  # fmt: skip
    """-> CHUNK peaks and totals [H], CHUNK sums [H, D]. In this order all loads are under way before one is
    used; the compiler's would start five and wait. What an empty split never wrote is dropped."""
    d = tl.arange(0, PADDED)
    peaks: tl.tuple = ()
    totals: tl.tuple = ()
    sums: tl.tuple = ()
    for step in tl.static_range(CHUNK):
        is_split = is_there & (first + step < end)  # [H]
        part_at = (at + first + step)[:, None] * DIM + d[None, :]
        peaks += (tl.load(partials.peaks + at + first + step, mask=is_split, other=float("-inf")),)
        totals += (tl.load(partials.totals + at + first + step, mask=is_split, other=0.0),)
        sums += (tl.load(partials.sums + part_at, mask=is_split[:, None] & (d < DIM)[None, :], other=0.0),)
    return peaks, totals, sums


@triton.jit
def _add_chunk(chunk: tl.tuple, level: tensor, total: tensor, result: tensor, CHUNK: constexpr) -> tensor:
    """Add CHUNK splits in order."""
    peaks, totals, sums = chunk
    for step in tl.static_range(CHUNK):
        is_seen = peaks[step] > float("-inf")
        factor = tl.where(is_seen, tl.exp2(peaks[step] - level), 0.0)
        total = tl.fma(factor, tl.where(is_seen, totals[step], 0.0), total)
        result = tl.fma(factor[:, None], tl.where(is_seen[:, None], sums[step], 0.0), result)
    return total, result


@triton.jit
def _add(
    partials: Partials, out: tensor, flat: tensor, is_there: tensor, num_splits: tensor, first: tensor,
    end: tensor, COUNT: constexpr, DIM: constexpr, PADDED: constexpr, CHUNK: constexpr,
) -> None:  # fmt: skip
    """out [COUNT, D]: splits `first` to `end` of the rows and heads `flat` [COUNT], in one chunk or more. A
    row sees itself, so only one that is not there has no peak."""
    at, d = flat.to(tl.int64) * num_splits, tl.arange(0, PADDED)
    total, result = tl.zeros((COUNT,), tl.float32), tl.zeros((COUNT, PADDED), tl.float32)
    if end - first <= CHUNK:
        parts = _load_chunk(partials, at, is_there, first, end, DIM, PADDED, CHUNK)
        peaks = parts[0]
        highest = peaks[0]
        for step in tl.static_range(1, CHUNK):
            highest = tl.maximum(highest, peaks[step])
        level = tl.where(is_there, highest, 0.0)
        total, result = _add_chunk(parts, level, total, result, CHUNK)
    else:
        s, tops = tl.arange(0, CHUNK), tl.full((COUNT, CHUNK), float("-inf"), tl.float32)
        for chunk in tl.range(0, tl.cdiv(end - first, CHUNK)):
            split = first + chunk * CHUNK + s
            is_split = is_there[:, None] & (split < end)[None, :]
            peak_at = partials.peaks + (at[:, None] + split[None, :])
            tops = tl.maximum(tops, tl.load(peak_at, mask=is_split, other=float("-inf")))
        level = tl.where(is_there, tl.max(tops, 1), 0.0)
        for chunk in tl.range(0, tl.cdiv(end - first, CHUNK)):
            parts = _load_chunk(partials, at, is_there, first + chunk * CHUNK, end, DIM, PADDED, CHUNK)
            total, result = _add_chunk(parts, level, total, result, CHUNK)
    result /= tl.where(is_there, total, 1.0)[:, None]
    is_inside = is_there[:, None] & (d < DIM)[None, :]
    tl.store(out + flat[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_splits"])
def add_splits(
    peaks: tensor, totals: tensor, sums: tensor, ends: tensor, out: tensor, num_splits: tensor,
    DIM: constexpr, PADDED: constexpr, CHUNK: constexpr,
) -> None:  # fmt: skip
    """One row and head: its first splits, of which `ends` says how many."""
    let_next_start()
    wait_for_previous()
    index, partials = tl.program_id(0), Partials(peaks, totals, sums)
    end, flat = tl.load(ends + index), index + tl.arange(0, 1)
    _add(partials, out, flat, flat >= 0, num_splits, 0, end, 1, DIM, PADDED, CHUNK)


@triton.jit
def add_if_last(
    counter: tensor, partials: Partials, out: tensor, first_flat: tensor, num_rows: tensor,
    num_splits: tensor, first: tensor, end: tensor, HEADS: constexpr, GROUP: constexpr, COUNT: constexpr,
    DIM: constexpr, PADDED: constexpr, CHUNK: constexpr,
) -> None:  # fmt: skip
    """The last of the programs that have the splits `first` to `end` of a tile adds them, COUNT rows and
    heads at a time; `first_flat` is its first row and head, `num_rows` are its rows. The barrier puts the
    stores of all threads before the one thread's atomic, which releases them; the last program's acquires
    what the others released. `counter` is zero again afterwards. It is touched only after
    `wait_for_previous`, when the launch before has ended: all launches of a stream may share it."""
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == end - first - 1:
        for part in tl.range(0, tl.cdiv(num_rows * GROUP, COUNT)):
            m = part * COUNT + tl.arange(0, COUNT)
            is_there, flat = m < num_rows * GROUP, first_flat + m // GROUP * HEADS + m % GROUP  # [COUNT]
            _add(partials, out, flat, is_there, num_splits, first, end, COUNT, DIM, PADDED, CHUNK)
        tl.store(counter, 0)
