"""Paged attention of a whole pass under tree masks, flash-style: scores are never stored.

A request's keys stand at places: its cached prefix at 0 .. prefix - 1, then the rows of this pass in order, so a chain's row stands at its
position. Places are cut into splits of a fixed size, each summed by a program of its own and added in order by a second kernel.
Invariant: splits and tiles are aligned to places and never to what else is in the launch, and what a row does not see adds an exact zero.
So a row's bits depend on its own context, on where its ancestors stand, and on the constants that rows and max_rows choose (`launch_for`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from paceline.cuda.batch import DeviceBatch

PLACES = tl.constexpr(64)  # keys of a tile: as many as a word of the masks has bits
BLOCK_SIZE = tl.constexpr(16)  # slots of a block
SPLITS = tl.constexpr(16)  # splits added at a time
LOG2_E = 1.4426950408889634
QUERY_BYTES = 32 * 1024  # of a tile of queries, at most
SPLIT_SIZES = ((8, 128), (32, 256), (128, 512), (256, 1024))  # up to so many rows; more of them fill a device without splits


class Launch(NamedTuple):
    """Constants of a launch. None but `num_splits` depends on the context, so that a row's bits do not."""

    block_m: int  # rows of a tile times the query heads of a KV head
    num_warps: int
    num_stages: int
    split_size: int
    num_splits: int


def launch_for(q: torch.Tensor, keys: torch.Tensor, max_context: int, max_rows: int) -> Launch:
    num_rows, heads, dim = q.shape
    kv_heads, padded = keys.shape[1], triton.next_power_of_2(dim)
    group, places = heads // kv_heads, max_context + max_rows
    # float32 products run without tensor cores, and larger tiles of them do not fit into registers.
    most = 16 if q.element_size() > 2 else min(128, QUERY_BYTES // (padded * q.element_size()))
    block_m = max(16, min(most, triton.next_power_of_2(max_rows * group)), triton.next_power_of_2(group))
    num_warps = 8 if block_m > 64 or block_m * padded > 64 * 128 else 4
    # Slots are loaded before keys: five stages keep two tiles in flight, three keep one and leave room for a second program.
    tile_bytes = 2 * PLACES.value * padded * keys.element_size()
    num_stages = 1 if tile_bytes > 64 * 1024 else 3 if tile_bytes > 32 * 1024 or block_m == 64 else 5
    all_places = triton.cdiv(places, PLACES.value) * PLACES.value
    split_size = next((size for rows, size in SPLIT_SIZES if num_rows <= rows), all_places)
    return Launch(block_m, num_warps, num_stages, split_size, triton.cdiv(places, split_size))


def partials_size(q: torch.Tensor, keys: torch.Tensor, max_context: int, max_rows: int) -> int:
    """Numbers that `attend` keeps between its two kernels."""
    num_splits = launch_for(q, keys, max_context, max_rows).num_splits
    return 0 if num_splits == 1 else num_splits * q.shape[0] * q.shape[1] * (q.shape[2] + 2)


def attend(
    q: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [num_slots, kv_heads, dim]; the rows of this pass are already there
    values: torch.Tensor,  # [num_slots, kv_heads, dim]
    batch: DeviceBatch,
    *,
    scale: float,
    window: int | None,
    max_context: int,  # cached tokens of one request, at most
    max_rows: int,  # of one request
    out: torch.Tensor,  # [T, heads, dim]
    partials: torch.Tensor | None = None,  # float32, at least `partials_size` of them; made here if not given
) -> None:
    num_rows, heads, dim = q.shape
    kv_heads, num_requests = keys.shape[1], len(batch.prefix_lens)
    assert out.shape == q.shape, "as many results as queries"
    assert keys.shape == values.shape == (len(keys), kv_heads, dim), "keys and values of the queries' width"
    assert heads % kv_heads == 0, "each KV head has the same number of query heads"
    assert len(batch.slots) == len(batch.positions) == len(batch.masks) == num_rows, "one of each a row"
    assert len(batch.starts) == num_requests + 1 == len(batch.block_tables) + 1, "one start and one table a request"
    assert all(x.is_contiguous() for x in (q, keys, values, out, batch.block_tables, batch.masks)), "addresses follow from shapes"
    assert scale > 0, "a maximum of scores is a maximum of scaled scores"
    assert window is None or window > 0, "a row sees itself"
    launch, size = launch_for(q, keys, max_context, max_rows), partials_size(q, keys, max_context, max_rows)
    if partials is None:
        partials = torch.empty(size, dtype=torch.float32, device=q.device)
    assert partials.dtype == torch.float32, "partials are float32"
    assert partials.numel() >= size, "partials are too few"
    count = 0 if launch.num_splits == 1 else num_rows * heads * launch.num_splits
    peaks, totals, sums = partials[:count], partials[count : 2 * count], partials[2 * count :]
    padded, group = triton.next_power_of_2(dim), heads // kv_heads
    num_tiles = num_rows // (launch.block_m // group) + num_requests
    _attend_split[(num_tiles, kv_heads, launch.num_splits)](
        q, keys, values, out, peaks, totals, sums,
        batch.starts, batch.prefix_lens, batch.slots, batch.positions, batch.block_tables, batch.masks,
        scale * LOG2_E, num_requests, batch.block_tables.shape[1], batch.masks.shape[1], launch.num_splits, launch.split_size,
        kv_heads, group, dim, padded, triton.next_power_of_2(num_requests), launch.block_m, window or 0, launch.num_splits == 1,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if launch.num_splits > 1:
        _add_splits[(num_rows, heads)](peaks, totals, sums, out, launch.num_splits, dim, padded, num_warps=4)


@triton.jit
def _request_of_tile(starts: tl.tensor, tile: tl.tensor, num_requests: tl.tensor, ROWS: tl.constexpr, REQUESTS: tl.constexpr) -> tl.tensor:
    """A request's first tile is its first row // ROWS + its index: room for its rows however many the others have."""
    index = tl.arange(0, REQUESTS)
    is_request = index < num_requests
    first_tiles = tl.load(starts + index, mask=is_request, other=0) // ROWS + index
    return tl.sum((is_request & (first_tiles <= tile)).to(tl.int32), 0) - 1


@triton.jit
def _mask_bits(masks: tl.tensor, row: tl.tensor, is_row: tl.tensor, num_words: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """[M] uint64: bit i says whether the row sees the request's row `offset` + i. Before the first row lies the prefix, all seen."""
    word, shift = offset >> 6, (offset & 63).to(tl.uint64)
    at = masks + row * num_words + word
    low = tl.load(at, mask=is_row & (word >= 0), other=-1).to(tl.uint64, bitcast=True)
    beyond = tl.where(word < -1, -1, 0).to(tl.int64)
    high = tl.load(at + 1, mask=is_row & (word >= -1) & (word + 1 < num_words), other=beyond).to(tl.uint64, bitcast=True)
    one = tl.full((), 1, tl.uint64)
    return (low >> shift) | ((high << one) << (one * 63 - shift))  # in two steps, since a shift by 64 is undefined


@triton.jit
def _is_seen(
    masks: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    num_words: tl.tensor,
    offset: tl.tensor,
    position: tl.tensor,
    key_position: tl.tensor,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """[M, N] whether a row sees the request's row `offset` + i; places before the first row are the prefix."""
    bit = tl.arange(0, PLACES).to(tl.uint64)
    is_seen = ((_mask_bits(masks, row, is_row, num_words, offset)[:, None] >> bit[None, :]) & 1) != 0
    if WINDOW:
        is_seen = is_seen & (position[:, None] - key_position[None, :] < WINDOW)
    return is_seen


@triton.jit
def _or_fresh(cached: tl.tensor, fresh: tl.tensor, place: tl.tensor, prefix: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """[N] `cached` within the prefix, and after it the column `fresh` of the request's rows."""
    return tl.where(place < prefix, cached, tl.load(fresh + place - prefix, mask=(place >= prefix) & (place < highest), other=0))


@triton.jit
def _fold(score: tl.tensor, value: tl.tensor, peak: tl.tensor, total: tl.tensor, acc: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Add a tile of scores [M, N] and values [N, D] to a running softmax."""
    higher = tl.maximum(peak, tl.max(score, 1) * scale)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: infinity less infinity is no number
    # Fused by name, since with a mask between product and difference the compiler would round twice.
    weight = tl.exp2(tl.fma(score, scale, -level[:, None]))
    fade = tl.exp2(peak - level)
    total = total * fade + tl.sum(weight, 1)
    return higher, total, tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")


@triton.jit
def _attend_split(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor,
    starts: tl.tensor, prefix_lens: tl.tensor, slots: tl.tensor, positions: tl.tensor, tables: tl.tensor, masks: tl.tensor,
    scale: tl.tensor, num_requests: tl.tensor, table_width: tl.tensor, num_words: tl.tensor, num_splits: tl.tensor, split_size: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    REQUESTS: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, IS_WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of rows, one KV head, one split. `scale` has log2(e) in it: exponentials are powers of two."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = BLOCK_M // GROUP
    request = _request_of_tile(starts, tile, num_requests, ROWS, REQUESTS)
    start, end, prefix = tl.load(starts + request), tl.load(starts + request + 1), tl.load(prefix_lens + request)
    first_row = start + (tile - start // ROWS - request) * ROWS
    if first_row >= end:
        return
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, PLACES), tl.arange(0, PADDED)
    row, is_row = first_row + m // GROUP, (m < ROWS * GROUP) & (first_row + m // GROUP < end)  # [M]
    flat = row * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP  # [M]: row and head
    at_split = flat.to(tl.int64) * num_splits + split
    # Ancestors come before their descendants, so no place after the tile's last row is seen.
    lowest = split * split_size
    highest = tl.minimum(lowest + split_size, prefix + tl.minimum(first_row + ROWS, end) - start)
    position = row
    if WINDOW:
        position = tl.load(positions + row, mask=is_row, other=1 << 30)
        lowest = tl.maximum(lowest, tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // PLACES * PLACES)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if lowest >= highest:
        tl.store(peaks + at_split, peak, mask=is_row)
        return
    is_query = is_row[:, None] & (d < DIM)[None, :]
    query = tl.load(q + flat[:, None] * DIM + d[None, :], mask=is_query, other=0.0)  # [M, D]
    total, acc = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, PADDED), tl.float32)
    masked = lowest if WINDOW else tl.maximum(lowest, tl.minimum(highest, prefix) // PLACES * PLACES)
    # First the tiles that every row sees in full, then those that need a mask: the same sums, fewer instructions.
    for IS_MASKED in tl.static_range(2):
        for first in tl.range(masked if IS_MASKED else lowest, highest if IS_MASKED else masked, PLACES):
            place = first + n  # [N]
            block = tl.load(tables + request * table_width + place // BLOCK_SIZE, mask=place < prefix, other=0)
            slot, key_position = block * BLOCK_SIZE + place % BLOCK_SIZE, place
            if IS_MASKED:
                slot = _or_fresh(slot, slots + start, place, prefix, highest)
                if WINDOW:
                    key_position = _or_fresh(place, positions + start, place, prefix, highest)
            at = (slot.to(tl.int64) * KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
            is_there = (place < highest)[:, None] & (d < DIM)[None, :]
            key = tl.load(keys + at, mask=is_there, other=0.0).to(query.dtype)  # [N, D]
            value = tl.load(values + at, mask=is_there, other=0.0).to(query.dtype)  # [N, D]
            score = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, N]
            if IS_MASKED:
                is_seen = _is_seen(masks, row, is_row, num_words, first - prefix, position, key_position, WINDOW)
                score = tl.where(is_seen, score, float("-inf"))
            peak, total, acc = _fold(score, value, peak, total, acc, scale)
    if IS_WHOLE:
        acc /= tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + flat[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=is_query)
    else:
        tl.store(peaks + at_split, peak, mask=is_row)
        tl.store(totals + at_split, total, mask=is_row)
        tl.store(sums + at_split[:, None] * DIM + d[None, :], acc, mask=is_query)


@triton.jit
def _add_splits(
    peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor, out: tl.tensor, num_splits: tl.tensor, DIM: tl.constexpr, PADDED: tl.constexpr
) -> None:
    """One row and head. Splits are added SPLITS at a time in order: those beyond a row's context add zeros, however many they are."""
    flat = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    at = flat.to(tl.int64) * num_splits + s
    highest = tl.full((SPLITS,), float("-inf"), tl.float32)
    for first in range(0, num_splits, SPLITS):
        highest = tl.maximum(highest, tl.load(peaks + at + first, mask=first + s < num_splits, other=float("-inf")))
    level = tl.max(highest, 0)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((PADDED,), tl.float32)
    for first in range(0, num_splits, SPLITS):
        peak = tl.load(peaks + at + first, mask=first + s < num_splits, other=float("-inf"))
        is_seen = peak > float("-inf")  # a split without a key has written nothing else
        factor = tl.where(is_seen, tl.exp2(peak - level), 0.0)
        total += tl.sum(factor * tl.load(totals + at + first, mask=is_seen, other=0.0), 0)
        part = tl.load(sums + (at + first)[:, None] * DIM + d[None, :], mask=is_seen[:, None] & (d < DIM)[None, :], other=0.0)
        result += tl.sum(factor[:, None] * part, 0)
    tl.store(out + flat * DIM + d, (result / total).to(out.dtype.element_ty), mask=d < DIM)
