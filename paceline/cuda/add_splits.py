"""The sums of attention's splits, added one after another: by a kernel of their own, or by the last program
that has one.

Invariant: the order of splits is fixed and so is every operation on them, so the bits are the same whoever
adds them, whichever program is last, and however many splits beyond a row's context there are, which add
zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.overlap import let_next_start, wait_for_previous


@triton.jit
def _load_chunk(
    peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor, at: tl.tensor, is_there: tl.tensor, first: tl.tensor, end: tl.tensor,
    DIM: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """-> CHUNK peaks and totals [H], CHUNK sums [H, D]. All loads are under way before the first is used:
    said in this order, since the compiler would have five on their way and then wait. What an empty split
    never wrote is loaded too, and dropped."""
    d = tl.arange(0, PADDED)
    its_peaks: tl.tuple = ()
    its_totals: tl.tuple = ()
    its_sums: tl.tuple = ()
    for step in tl.static_range(CHUNK):
        is_split = is_there & (first + step < end)  # [H]
        part_at = (at + first + step)[:, None] * DIM + d[None, :]
        its_peaks += (tl.load(peaks + at + first + step, mask=is_split, other=float("-inf")),)
        its_totals += (tl.load(totals + at + first + step, mask=is_split, other=0.0),)
        its_sums += (tl.load(sums + part_at, mask=is_split[:, None] & (d < DIM)[None, :], other=0.0),)
    return its_peaks, its_totals, its_sums


@triton.jit
def _add_chunk(
    its_peaks: tl.tuple, its_totals: tl.tuple, its_sums: tl.tuple, level: tl.tensor, total: tl.tensor, result: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add CHUNK splits in order."""
    for step in tl.static_range(CHUNK):
        is_seen = its_peaks[step] > float("-inf")
        factor = tl.where(is_seen, tl.exp2(its_peaks[step] - level), 0.0)
        total = tl.fma(factor, tl.where(is_seen, its_totals[step], 0.0), total)
        result = tl.fma(factor[:, None], tl.where(is_seen[:, None], its_sums[step], 0.0), result)
    return total, result


@triton.jit
def _highest_peak(
    peaks: tl.tensor,
    at: tl.tensor,
    is_there: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    s, highest = tl.arange(0, CHUNK), tl.full((COUNT, CHUNK), float("-inf"), tl.float32)
    for chunk in tl.range(0, tl.cdiv(end - first, CHUNK)):
        split = first + chunk * CHUNK + s
        is_split = is_there[:, None] & (split < end)[None, :]
        highest = tl.maximum(
            highest, tl.load(peaks + (at[:, None] + split[None, :]), mask=is_split, other=float("-inf"))
        )
    return tl.max(highest, 1)


@triton.jit
def added_splits(
    peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor, at: tl.tensor, is_there: tl.tensor, first: tl.tensor, end: tl.tensor,
    COUNT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, IS_ONE_CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """-> [COUNT, D]: splits `first` to `end` of rows and heads whose first split lies at `at` [COUNT]."""
    total, result = tl.zeros((COUNT,), tl.float32), tl.zeros((COUNT, PADDED), tl.float32)
    if IS_ONE_CHUNK:
        its_peaks, its_totals, its_sums = _load_chunk(
            peaks, totals, sums, at, is_there, first, end, DIM, PADDED, CHUNK
        )
        highest = its_peaks[0]
        for step in tl.static_range(1, CHUNK):
            highest = tl.maximum(highest, its_peaks[step])
        level = tl.where(
            is_there, highest, 0.0
        )  # a row sees itself, so only one that is not there has no peak
        total, result = _add_chunk(its_peaks, its_totals, its_sums, level, total, result, CHUNK)
    else:
        level = tl.where(is_there, _highest_peak(peaks, at, is_there, first, end, COUNT, CHUNK), 0.0)
        for chunk in tl.range(0, tl.cdiv(end - first, CHUNK)):
            its_peaks, its_totals, its_sums = _load_chunk(
                peaks, totals, sums, at, is_there, first + chunk * CHUNK, end, DIM, PADDED, CHUNK
            )  # fmt: skip
            total, result = _add_chunk(its_peaks, its_totals, its_sums, level, total, result, CHUNK)
    return result / tl.where(is_there, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_sums", "num_splits"])
def add_splits(
    peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor, out: tl.tensor, num_sums: tl.tensor, num_splits: tl.tensor,
    DIM: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr, IS_ONE_CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """A few rows and heads."""
    let_next_start()
    wait_for_previous()
    flat, d = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, PADDED)
    is_there, at = flat < num_sums, flat.to(tl.int64) * num_splits  # [H]
    result = added_splits(
        peaks, totals, sums, at, is_there, 0, num_splits, AT_ONCE, DIM, PADDED, CHUNK, IS_ONE_CHUNK
    )
    tl.store(
        out + flat[:, None] * DIM + d[None, :],
        result.to(out.dtype.element_ty),
        mask=is_there[:, None] & (d < DIM)[None, :],
    )


@triton.jit
def add_if_last(
    counter: tl.tensor, peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor, out: tl.tensor, first_flat: tl.tensor, num_rows: tl.tensor,
    num_splits: tl.tensor, first: tl.tensor, end: tl.tensor, HEADS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, IS_ONE_CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """The last of the programs that have the splits `first` to `end` of a tile adds them, COUNT rows and
    heads at a time; `first_flat` is its first row and head, `num_rows` are its rows.

    The barrier puts the stores of all threads before the one thread's atomic, which releases them; the last
    one's acquires what the others released. `counter` is zero again afterwards. It is touched after
    `wait_for_previous` alone, when the launch before has ended: so all launches of a stream may use one,
    however early they start.
    """
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == end - first - 1:
        d = tl.arange(0, PADDED)
        for part in tl.range(0, tl.cdiv(num_rows * GROUP, COUNT)):
            m = part * COUNT + tl.arange(0, COUNT)
            is_there, flat = m < num_rows * GROUP, first_flat + m // GROUP * HEADS + m % GROUP  # [COUNT]
            at = flat.to(tl.int64) * num_splits
            result = added_splits(
                peaks, totals, sums, at, is_there, first, end, COUNT, DIM, PADDED, CHUNK, IS_ONE_CHUNK
            )
            is_inside = is_there[:, None] & (d < DIM)[None, :]
            tl.store(out + flat[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=is_inside)
        tl.store(counter, 0)
