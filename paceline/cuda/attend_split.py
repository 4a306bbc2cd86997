"""The Triton kernel of cuda/attention.py: sums of a split. Splits are added by cuda/add_splits.py.

A program that has one tile loads all it needs of it before it uses any, and cached keys before it waits for
the kernel that computes queries; a longer split is a pipelined loop. Invariant: tiles of places are folded in
one after another, so either way gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.add_splits import add_if_last
from paceline.cuda.overlap import let_next_start, wait_for_previous
from paceline.cuda.rows import SCALE_BYTES

PLACES = tl.constexpr(64)  # keys of a tile: as many as a word of the masks has bits
BLOCK_SIZE = tl.constexpr(16)  # slots of a block
NEAR = tl.constexpr(16)  # splits of the near size, at most; all after them are of the far size


@triton.jit
def _request_of_tile(
    starts: tl.tensor,
    prefix_lens: tl.tensor,
    tile: tl.tensor,
    num_requests: tl.tensor,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
) -> tl.tensor:
    """-> request, its first row, the row after its last, its prefix: all loaded at once, since each wait for
    memory counts.

    A request's first tile is its first row // ROWS + its index: room for its rows however many the others
    have.
    """
    index = tl.arange(0, REQUESTS)
    is_request = index < num_requests
    start = tl.load(starts + index, mask=is_request, other=0)
    end = tl.load(starts + index + 1, mask=is_request, other=0)
    prefix = tl.load(prefix_lens + index, mask=is_request, other=0)
    request = tl.sum((is_request & (start // ROWS + index <= tile)).to(tl.int32), 0) - 1
    is_it = index == request
    return (
        request,
        tl.sum(tl.where(is_it, start, 0), 0),
        tl.sum(tl.where(is_it, end, 0), 0),
        tl.sum(tl.where(is_it, prefix, 0), 0),
    )


@triton.jit
def _mask_bits(
    masks: tl.tensor, row: tl.tensor, is_row: tl.tensor, num_words: tl.tensor, offset: tl.tensor
) -> tl.tensor:
    """[M] uint64: bit i says whether the row sees the request's row `offset` + i. Before the first row lies
    the prefix, all seen.
    """
    word, shift = offset >> 6, (offset & 63).to(tl.uint64)
    at = masks + row * num_words + word
    before, long_before = tl.where(word < 0, -1, 0).to(tl.int64), tl.where(word < -1, -1, 0).to(tl.int64)
    low = tl.load(at, mask=is_row & (word >= 0) & (word < num_words), other=before).to(
        tl.uint64, bitcast=True
    )
    high = tl.load(at + 1, mask=is_row & (word >= -1) & (word + 1 < num_words), other=long_before).to(
        tl.uint64, bitcast=True
    )
    one = tl.full((), 1, tl.uint64)
    return (low >> shift) | (
        (high << one) << (one * 63 - shift)
    )  # in two steps, since a shift by 64 is undefined


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
    """[M, N] whether a row sees the request's row `offset` + i; places before the first row are the
    prefix.
    """
    bit, bits = tl.arange(0, PLACES), _mask_bits(masks, row, is_row, num_words, offset)  # [N], [M]
    half = tl.where(
        (bit < 32)[None, :], bits.to(tl.uint32)[:, None], (bits >> 32).to(tl.uint32)[:, None]
    )  # shifts of 64 bits are slow
    is_seen = ((half >> (bit % 32).to(tl.uint32)[None, :]) & 1) != 0
    if WINDOW:
        is_seen = is_seen & (position[:, None] - key_position[None, :] < WINDOW)
    return is_seen


@triton.jit
def _or_fresh(
    cached: tl.tensor, fresh: tl.tensor, place: tl.tensor, prefix: tl.tensor, highest: tl.tensor
) -> tl.tensor:
    """[N] `cached` within the prefix, and after it the column `fresh` of the request's rows."""
    return tl.where(
        place < prefix,
        cached,
        tl.load(fresh + place - prefix, mask=(place >= prefix) & (place < highest), other=0),
    )


@triton.jit
def _scales(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(pointers.to(tl.pointer_type(tl.float32), bitcast=True), mask=mask, other=0.0)


@triton.jit
def _line_of(
    place: tl.tensor, table: tl.tensor, fresh: tl.tensor, prefix: tl.tensor, highest: tl.tensor, kv_head: tl.tensor,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, IS_MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[N] int64: where the keys of a request's places begin. Where nothing is masked all are cached."""
    block = tl.load(table + place // BLOCK_SIZE, mask=place < prefix, other=0)
    slot = block * BLOCK_SIZE + place % BLOCK_SIZE
    if IS_MASKED:
        slot = _or_fresh(slot, fresh, place, prefix, highest)
    return (slot.to(tl.int64) * KV_HEADS + kv_head) * WIDTH


@triton.jit
def _load_tile(
    first: tl.tensor, table: tl.tensor, fresh_slots: tl.tensor, fresh_positions: tl.tensor, keys: tl.tensor, values: tl.tensor,
    masks: tl.tensor, row: tl.tensor, is_row: tl.tensor, position: tl.tensor, num_words: tl.tensor, prefix: tl.tensor, highest: tl.tensor,
    kv_head: tl.tensor, DTYPE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """-> keys and values [N, D] from a place on, [N] where they begin, [M, N] whether rows see them: before a
    product waits for keys.
    """
    WIDTH: tl.constexpr = DIM + SCALE_BYTES if keys.dtype.element_ty == tl.int8 else DIM
    place, d = first + tl.arange(0, PLACES), tl.arange(0, PADDED)
    line = _line_of(place, table, fresh_slots, prefix, highest, kv_head, KV_HEADS, WIDTH, IS_MASKED)
    at, is_there = line[:, None] + d[None, :], (place < highest)[:, None] & (d < DIM)[None, :]
    key = tl.load(keys + at, mask=is_there, other=0.0).to(DTYPE)
    value = tl.load(values + at, mask=is_there, other=0.0).to(DTYPE)
    key_position = place
    if WINDOW:
        key_position = _or_fresh(place, fresh_positions, place, prefix, highest)
    return (
        key,
        value,
        line,
        _is_seen(masks, row, is_row, num_words, first - prefix, position, key_position, WINDOW),
    )


@triton.jit
def _add_tile(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, line: tl.tensor, is_seen: tl.tensor, is_place: tl.tensor, keys: tl.tensor,
    values: tl.tensor, peak: tl.tensor, total: tl.tensor, acc: tl.tensor, scale: tl.tensor, DIM: tl.constexpr, IS_MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add keys and values [N, D] to a running softmax of queries [M, D]."""
    HAS_SCALES: tl.constexpr = keys.dtype.element_ty == tl.int8
    score = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, N]
    if HAS_SCALES:
        score *= _scales(keys + line + DIM, is_place)[None, :]
    if IS_MASKED:
        score = tl.where(is_seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1) * scale)
    level = tl.where(
        higher == float("-inf"), 0.0, higher
    )  # nothing seen yet: infinity less infinity is no number
    # Fused by name, since with a mask between product and difference the compiler would round twice.
    weight = tl.exp2(tl.fma(score, scale, -level[:, None]))
    fade = tl.exp2(peak - level)
    total = total * fade + tl.sum(weight, 1)
    if HAS_SCALES:  # integers have few digits: they are scaled by way of their weights
        weight *= _scales(values + line + DIM, is_place)[None, :]
    return higher, total, tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")


@triton.jit
def _at_once(
    of_query: tl.tensor, is_query: tl.tensor, lowest: tl.tensor, highest: tl.tensor, scale: tl.tensor,
    peak: tl.tensor, total: tl.tensor, acc: tl.tensor,
    table: tl.tensor, fresh_slots: tl.tensor, fresh_positions: tl.tensor, keys: tl.tensor, values: tl.tensor, masks: tl.tensor,
    row: tl.tensor, is_row: tl.tensor, position: tl.tensor, num_words: tl.tensor, prefix: tl.tensor, kv_head: tl.tensor,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, IS_EARLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One tile of places, all loaded before any is used; queries last, which the kernel before may still
    compute.
    """
    DTYPE: tl.constexpr = of_query.dtype.element_ty
    n = tl.arange(0, PLACES)
    key, value, line, is_seen = _load_tile(
        lowest, table, fresh_slots, fresh_positions, keys, values, masks, row, is_row, position, num_words, prefix, highest, kv_head,
        DTYPE, KV_HEADS, DIM, PADDED, WINDOW, True,
    )  # fmt: skip
    if IS_EARLY:
        wait_for_previous()
    query = tl.load(of_query, mask=is_query, other=0.0)  # [M, D]
    # A mask again changes nothing, but no load's numbers are asked for before all loads are under way.
    is_place = lowest + n < highest
    query, key, value = (
        tl.where(is_query, query, 0.0),
        tl.where(is_place[:, None], key, 0.0),
        tl.where(is_place[:, None], value, 0.0),
    )
    return _add_tile(
        query, key, value, line, is_seen, is_place, keys, values, peak, total, acc, scale, DIM, True
    )


@triton.jit
def _in_turn(
    of_query: tl.tensor, is_query: tl.tensor, lowest: tl.tensor, highest: tl.tensor, scale: tl.tensor,
    peak: tl.tensor, total: tl.tensor, acc: tl.tensor,
    table: tl.tensor, fresh_slots: tl.tensor, fresh_positions: tl.tensor, keys: tl.tensor, values: tl.tensor, masks: tl.tensor,
    row: tl.tensor, is_row: tl.tensor, position: tl.tensor, num_words: tl.tensor, prefix: tl.tensor, kv_head: tl.tensor,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, NUM_LOOPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """First the tiles that every row sees in full, then those that need a mask: the same sums, fewer
    instructions.
    """
    n, query = tl.arange(0, PLACES), tl.load(of_query, mask=is_query, other=0.0)  # [M, D]
    masked = (
        lowest
        if WINDOW or NUM_LOOPS < 2
        else tl.maximum(lowest, tl.minimum(highest, prefix) // PLACES * PLACES)
    )
    for IS_MASKED in tl.static_range(0 if NUM_LOOPS == 2 else 1, 2):
        from_place = masked if IS_MASKED else lowest
        num_tiles = tl.cdiv((highest if IS_MASKED else masked) - from_place, PLACES)
        for index in tl.range(0, num_tiles):
            first = from_place + index * PLACES
            key, value, line, is_seen = _load_tile(
                first, table, fresh_slots, fresh_positions, keys, values, masks, row, is_row, position, num_words, prefix, highest, kv_head,
                query.dtype, KV_HEADS, DIM, PADDED, WINDOW, IS_MASKED,
            )  # fmt: skip
            is_place = first + n < highest
            peak, total, acc = _add_tile(
                query,
                key,
                value,
                line,
                is_seen,
                is_place,
                keys,
                values,
                peak,
                total,
                acc,
                scale,
                DIM,
                IS_MASKED,
            )
    return peak, total, acc


@triton.jit
def _split_of(place: tl.tensor, near_size: tl.tensor, far_size: tl.tensor) -> tl.tensor:
    beyond = place - NEAR * near_size
    return tl.where(beyond < 0, place // near_size, NEAR + beyond // far_size)


@triton.jit(
    do_not_specialize=["num_requests", "table_width", "num_words", "num_splits", "near_size", "far_size"]
)
def attend_split(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor,
    starts: tl.tensor, prefix_lens: tl.tensor, slots: tl.tensor, positions: tl.tensor, tables: tl.tensor, masks: tl.tensor,
    counters: tl.tensor, scale: tl.tensor, num_requests: tl.tensor, table_width: tl.tensor, num_words: tl.tensor,
    num_splits: tl.tensor, near_size: tl.tensor, far_size: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    REQUESTS: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr,
    IS_WHOLE: tl.constexpr, NUM_LOOPS: tl.constexpr, IS_SHORT: tl.constexpr, IS_EARLY: tl.constexpr,
    COUNT: tl.constexpr, CHUNK: tl.constexpr, IS_ONE_CHUNK: tl.constexpr, IS_LATE: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of rows, one KV head, one split. `scale` has log2(e) in it: exponentials are powers of two.

    `counters`, if any: one a tile and KV head, by which the last program knows that it is to add the splits.
    """
    if not IS_LATE:
        let_next_start()
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = BLOCK_M // GROUP
    request, start, end, prefix = _request_of_tile(starts, prefix_lens, tile, num_requests, ROWS, REQUESTS)
    first_row = start + (tile - start // ROWS - request) * ROWS
    if not IS_EARLY or first_row >= end:
        wait_for_previous()  # all that was read before is the batch's own
    if first_row >= end:
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, PADDED)
    row, is_row = first_row + m // GROUP, (m < ROWS * GROUP) & (first_row + m // GROUP < end)  # [M]
    flat = row * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP  # [M]: row and head
    at_split = flat.to(tl.int64) * num_splits + split
    # Ancestors come before their descendants, so no place after the tile's last row is seen.
    lowest = tl.minimum(split, NEAR) * near_size + tl.maximum(split - NEAR, 0) * far_size
    top = prefix + tl.minimum(first_row + ROWS, end) - start
    highest = tl.minimum(lowest + tl.where(split < NEAR, near_size, far_size), top)
    position, bottom = row, 0
    if WINDOW:
        position = tl.load(positions + row, mask=is_row, other=1 << 30)
        bottom = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // PLACES * PLACES
        lowest = tl.maximum(lowest, bottom)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if IS_EARLY and (lowest >= highest or highest > prefix):
        # for keys of this pass; those of passes before are there, and come while queries are still computed
        wait_for_previous()
    if lowest >= highest:
        if counters is None:
            tl.store(peaks + at_split, peak, mask=is_row)
        return
    is_query, of_query = is_row[:, None] & (d < DIM)[None, :], q + flat[:, None] * DIM + d[None, :]
    total, acc = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, PADDED), tl.float32)
    table = tables + request * table_width
    if IS_SHORT:
        peak, total, acc = _at_once(
            of_query, is_query, lowest, highest, scale, peak, total, acc,
            table, slots + start, positions + start, keys, values, masks, row, is_row, position, num_words, prefix, kv_head,
            KV_HEADS, DIM, PADDED, WINDOW, IS_EARLY,
        )  # fmt: skip
    else:
        peak, total, acc = _in_turn(
            of_query, is_query, lowest, highest, scale, peak, total, acc,
            table, slots + start, positions + start, keys, values, masks, row, is_row, position, num_words, prefix, kv_head,
            KV_HEADS, DIM, PADDED, WINDOW, NUM_LOOPS,
        )  # fmt: skip
    if IS_LATE:
        let_next_start()
    if IS_WHOLE:
        acc /= tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + flat[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=is_query)
    else:
        tl.store(peaks + at_split, peak, mask=is_row)
        tl.store(totals + at_split, total, mask=is_row)
        tl.store(sums + at_split[:, None] * DIM + d[None, :], acc, mask=is_query)
        if counters is not None:  # who has no places has returned, and is not waited for
            add_if_last(
                counters + tile * KV_HEADS + kv_head, peaks, totals, sums, out, first_row * (KV_HEADS * GROUP) + kv_head * GROUP,
                tl.minimum(ROWS, end - first_row), num_splits,
                _split_of(bottom, near_size, far_size), _split_of(top - 1, near_size, far_size) + 1,
                KV_HEADS * GROUP, GROUP, COUNT, DIM, PADDED, CHUNK, IS_ONE_CHUNK,
            )  # fmt: skip
