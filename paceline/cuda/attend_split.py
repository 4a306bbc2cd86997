"""The Triton kernel of cuda/attention.py: the sums of one split. Splits are added by cuda/add_splits.py.

How many splits there are is the launch's; where they begin follows from a request's own context, on the
device, so a recording is good for any context. A program with one tile loads all it needs of it before it
uses any, and cached keys before it waits for the kernel that computes queries; a longer split is a pipelined
loop. With paths a row of a tree stands at its position: of a split that has rows of this pass each row has a
program to itself, which finds the row's ancestors in order. Invariant: tiles of places are folded in one
after another, so all of this gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from paceline.cuda.add_splits import Partials, add_if_last
from paceline.cuda.rows import BLOCK_SIZE, SCALE_BYTES, let_next_start, wait_for_previous

PLACES = tl.constexpr(64)  # keys of a tile: as many as a word of the masks has bits
LONGEST_PATH = tl.constexpr(256)  # rows of a tree, at most
NEAR = tl.constexpr(16)  # splits of the near size, at most; all after them are of the far size


class Paged(NamedTuple):
    """Where the keys of a request's places lie."""

    key_cache: tensor
    value_cache: tensor  # (a tuple of Triton has `values` of its own)
    table: tensor  # its blocks,
    table_stride: tensor  # this far from each other
    fresh_slots: tensor  # of its rows in this pass, or of a row's ancestors
    fresh_positions: tensor
    prefix: tensor  # cached places
    highest: tensor  # the place after the last
    kv_head: tensor
    KV_HEADS: constexpr
    DIM: constexpr  # of a head
    PADDED: constexpr  # DIM rounded up to a power of two
    WINDOW: constexpr  # positions that a row sees; 0: all
    HAS_PATHS: constexpr  # places are positions, and what a row sees is all up to its own


class TileSight(NamedTuple):
    """What the rows of a tile see."""

    masks: tensor
    num_words: tensor  # of a row's mask
    row: tensor  # [M]
    is_row: tensor  # [M]
    position: tensor  # [M]


@triton.jit
def _is_seen(sight: TileSight, offset: tensor, key_position: tensor, WINDOW: constexpr) -> tensor:
    """[M, N] whether a row sees the request's row `offset` + i. Before the first is the prefix."""
    num_words = sight.num_words
    bit = tl.arange(0, PLACES)
    word, shift = offset >> 6, (offset & 63).to(tl.uint64)
    at = sight.masks + sight.row * num_words + word
    before, long_before = tl.where(word < 0, -1, 0).to(tl.int64), tl.where(word < -1, -1, 0).to(tl.int64)
    is_low = sight.is_row & (word >= 0) & (word < num_words)
    low = tl.load(at, mask=is_low, other=before).to(tl.uint64, bitcast=True)
    is_high = sight.is_row & (word >= -1) & (word + 1 < num_words)
    high = tl.load(at + 1, mask=is_high, other=long_before).to(tl.uint64, bitcast=True)
    one = tl.full((), 1, tl.uint64)
    # [M]: bit i is of row `offset` + i. In two steps, since a shift by 64 is undefined.
    bits = (low >> shift) | ((high << one) << (one * 63 - shift))
    first, last = bits.to(tl.uint32)[:, None], (bits >> 32).to(tl.uint32)[:, None]
    half = tl.where((bit < 32)[None, :], first, last)  # shifts of 64 bits are slow
    is_seen = ((half >> (bit % 32).to(tl.uint32)[None, :]) & 1) != 0
    if WINDOW:
        is_seen = is_seen & (sight.position[:, None] - key_position[None, :] < WINDOW)
    return is_seen


@triton.jit
def _or_fresh(cached: tensor, fresh: tensor, place: tensor, paged: Paged) -> tensor:
    """[N] `cached` within the prefix, and after it the column `fresh` of the request's rows."""
    is_fresh = (place >= paged.prefix) & (place < paged.highest)
    after = tl.load(fresh + place - paged.prefix, mask=is_fresh, other=0)
    return tl.where(place < paged.prefix, cached, after)


@triton.jit
def _scales(pointers: tensor, mask: tensor) -> tensor:
    return tl.load(pointers.to(tl.pointer_type(tl.float32), bitcast=True), mask=mask, other=0.0)


@triton.jit
def _load_tile(
    first: tensor, paged: Paged, sight: TileSight, DTYPE: constexpr, IS_MASKED: constexpr
) -> tensor:
    """-> keys and values [N, D] from a place on, [N] where they begin, [M, N] whether rows see them: before a
    product waits for keys. Where nothing is masked all are cached."""
    HAS_SCALES: tl.constexpr = paged.key_cache.dtype.element_ty == tl.int8
    WIDTH: tl.constexpr = paged.DIM + SCALE_BYTES if HAS_SCALES else paged.DIM
    place, d = first + tl.arange(0, PLACES), tl.arange(0, paged.PADDED)
    block_at = paged.table + place // BLOCK_SIZE * paged.table_stride
    block = tl.load(block_at, mask=place < paged.prefix, other=0)
    slot = block * BLOCK_SIZE + place % BLOCK_SIZE
    if IS_MASKED:
        slot = _or_fresh(slot, paged.fresh_slots, place, paged)
    line = (slot.to(tl.int64) * paged.KV_HEADS + paged.kv_head) * WIDTH
    at, is_there = line[:, None] + d[None, :], (place < paged.highest)[:, None] & (d < paged.DIM)[None, :]
    key = tl.load(paged.key_cache + at, mask=is_there, other=0.0).to(DTYPE)
    value = tl.load(paged.value_cache + at, mask=is_there, other=0.0).to(DTYPE)
    key_position = place
    if paged.HAS_PATHS:
        distance = sight.position[:, None] - place[None, :]
        is_seen = distance >= 0
        if paged.WINDOW:
            is_seen = is_seen & (distance < paged.WINDOW)
    else:
        if paged.WINDOW:
            key_position = _or_fresh(place, paged.fresh_positions, place, paged)
        is_seen = _is_seen(sight, first - paged.prefix, key_position, paged.WINDOW)
    return key, value, line, is_seen


@triton.jit
def _add_tile(
    query: tensor, tile: tl.tuple, is_place: tensor, paged: Paged, state: tl.tuple, scale: tensor,
    IS_MASKED: constexpr,
) -> tensor:  # fmt: skip
    """Add a tile's keys and values [N, D] to a running softmax (peak, total, sum) of queries [M, D]."""
    key, value, line, is_seen = tile
    peak, total, acc = state
    HAS_SCALES: tl.constexpr = paged.key_cache.dtype.element_ty == tl.int8
    score = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, N]
    if HAS_SCALES:
        score *= _scales(paged.key_cache + line + paged.DIM, is_place)[None, :]
    if IS_MASKED:
        score = tl.where(is_seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1) * scale)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: inf - inf is no number
    # Fused by name, since with a mask between product and difference the compiler would round twice.
    weight = tl.exp2(tl.fma(score, scale, -level[:, None]))
    fade = tl.exp2(peak - level)
    total = total * fade + tl.sum(weight, 1)
    if HAS_SCALES:  # integers have few digits: they are scaled by way of their weights
        weight *= _scales(paged.value_cache + line + paged.DIM, is_place)[None, :]
    return higher, total, tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")


@triton.jit
def _add_one_tile(
    of_query: tensor, is_query: tensor, lowest: tensor, scale: tensor, state: tl.tuple, paged: Paged,
    sight: TileSight, IS_EARLY: constexpr,
) -> tensor:  # fmt: skip
    """All is loaded before any is used, last queries, which may still be computed."""
    key, value, line, is_seen = _load_tile(lowest, paged, sight, of_query.dtype.element_ty, True)
    if IS_EARLY:
        wait_for_previous()
    query = tl.load(of_query, mask=is_query, other=0.0)  # [M, D]
    # A mask again changes nothing, but no load's numbers are asked for before all loads are under way.
    is_place = lowest + tl.arange(0, PLACES) < paged.highest
    query = tl.where(is_query, query, 0.0)
    key, value = tl.where(is_place[:, None], key, 0.0), tl.where(is_place[:, None], value, 0.0)
    return _add_tile(query, (key, value, line, is_seen), is_place, paged, state, scale, True)


@triton.jit
def _add_tiles(
    of_query: tensor, is_query: tensor, lowest: tensor, scale: tensor, state: tl.tuple, paged: Paged,
    sight: TileSight, NUM_LOOPS: constexpr,
) -> tensor:  # fmt: skip
    """First the tiles that every row sees in full, then those that need a mask: fewer instructions."""
    peak, total, acc = state
    highest, n = paged.highest, tl.arange(0, PLACES)
    query = tl.load(of_query, mask=is_query, other=0.0)  # [M, D]
    if paged.WINDOW or NUM_LOOPS < 2:
        masked = lowest
    else:
        masked = tl.maximum(lowest, tl.minimum(highest, paged.prefix) // PLACES * PLACES)
    for IS_MASKED in tl.static_range(0 if NUM_LOOPS == 2 else 1, 2):
        from_place = masked if IS_MASKED else lowest
        num_tiles = tl.cdiv((highest if IS_MASKED else masked) - from_place, PLACES)
        for index in tl.range(0, num_tiles):
            first = from_place + index * PLACES
            tile = _load_tile(first, paged, sight, query.dtype, IS_MASKED)
            state = (peak, total, acc)
            peak, total, acc = _add_tile(query, tile, first + n < highest, paged, state, scale, IS_MASKED)
    return peak, total, acc


@triton.jit
def _fold_tiles(
    of_query: tensor, is_query: tensor, lowest: tensor, scale: tensor, state: tl.tuple, paged: Paged,
    sight: TileSight, HAS_SHORT: constexpr, IS_EARLY: constexpr, NUM_LOOPS: constexpr,
) -> tensor:  # fmt: skip
    """Add all tiles from the place `lowest` on to a running softmax."""
    peak, total, acc = state
    if HAS_SHORT and paged.highest - lowest <= PLACES:
        peak, total, acc = _add_one_tile(of_query, is_query, lowest, scale, state, paged, sight, IS_EARLY)
    else:
        if IS_EARLY:
            wait_for_previous()
        peak, total, acc = _add_tiles(of_query, is_query, lowest, scale, state, paged, sight, NUM_LOOPS)
    return peak, total, acc


@triton.jit
def _split_of(place: tensor, near_size: tensor, far_size: tensor) -> tensor:
    beyond = place - NEAR * near_size
    return tl.where(beyond < 0, place // near_size, NEAR + beyond // far_size)


@triton.jit(do_not_specialize=["num_requests", "num_words", "most"])
def trace(
    starts: tensor, slots: tensor, masks: tensor, paths: tensor, num_requests: tensor, num_words: tensor,
    most: tensor, REQUESTS: constexpr,
) -> None:  # fmt: skip
    """A program a row: paths [T, LONGEST_PATH], the slots of a row's ancestors in this pass, in order, and
    its own. most: words of a mask that are read."""
    let_next_start()
    wait_for_previous()
    row, index, bit = tl.program_id(0), tl.arange(0, REQUESTS), tl.arange(0, PLACES)
    first_rows = tl.load(starts + index, mask=index < num_requests, other=0)
    start, count = tl.max(tl.where(first_rows <= row, first_rows, 0), 0), 0
    for word in tl.range(0, most):
        mask = tl.load(masks + row * num_words + word).to(tl.uint64, bitcast=True)
        is_seen = ((mask >> bit.to(tl.uint64)) & 1).to(tl.int32)
        place = count + tl.cumsum(is_seen, 0) - 1
        slot = tl.load(slots + start + word * PLACES + bit, mask=is_seen != 0, other=0)
        is_kept = (is_seen != 0) & (place < LONGEST_PATH)
        tl.store(paths + row * LONGEST_PATH + place, slot, mask=is_kept)
        count += tl.sum(is_seen, 0)


@triton.jit(do_not_specialize=["num_requests", "table_stride", "num_words", "num_splits"])
def attend_split(
    q: tensor, keys: tensor, values: tensor, out: tensor, peaks: tensor, totals: tensor, sums: tensor,
    ends: tensor, starts: tensor, prefix_lens: tensor, slots: tensor, positions: tensor, tables: tensor,
    masks: tensor, paths: tensor, sinks: tensor, counters: tensor, scale: tensor, num_requests: tensor,
    table_stride: tensor, num_words: tensor, num_splits: tensor, KV_HEADS: constexpr, GROUP: constexpr,
    DIM: constexpr, PADDED: constexpr, REQUESTS: constexpr, BLOCK_M: constexpr, WINDOW: constexpr,
    NEAR_SIZE: constexpr, FAR_SIZE: constexpr, IS_WHOLE: constexpr, NUM_LOOPS: constexpr,
    HAS_SHORT: constexpr, IS_EARLY: constexpr, COUNT: constexpr, CHUNK: constexpr, IS_LATE: constexpr,
) -> None:  # fmt: skip
    """One tile of rows, one KV head, one split. `scale` has log2(e) in it: exponentials are powers of two. So
    have `sinks`, if any: of each head a score without a value, in the split where a row stands itself.
    `counters`, if any: one a tile and KV head, by which the last program knows that it adds the splits;
    without them `ends` says, of each row and head, how many splits there are to add."""
    if not IS_LATE:
        let_next_start()
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = BLOCK_M // GROUP
    STEP: tl.constexpr = ROWS if paths is None else 1  # rows from a program to the next
    # All is loaded at once. A request's first tile is its first row // STEP + its index: room for its rows
    # however many the others have.
    index = tl.arange(0, REQUESTS)
    is_request = index < num_requests
    first_rows = tl.load(starts + index, mask=is_request, other=0)
    end_rows = tl.load(starts + index + 1, mask=is_request, other=0)
    prefixes = tl.load(prefix_lens + index, mask=is_request, other=0)
    request = tl.sum((is_request & (first_rows // STEP + index <= tile)).to(tl.int32), 0) - 1
    is_it = index == request
    start, end = tl.sum(tl.where(is_it, first_rows, 0), 0), tl.sum(tl.where(is_it, end_rows, 0), 0)
    prefix = tl.sum(tl.where(is_it, prefixes, 0), 0)
    first_row = start + (tile - start // STEP - request) * STEP
    if not IS_EARLY or first_row >= end:
        wait_for_previous()  # all that was read before is the batch's own
    if first_row >= end:
        return
    if NEAR_SIZE:  # splits of fixed sizes
        split_start = tl.minimum(split, NEAR) * NEAR_SIZE + tl.maximum(split - NEAR, 0) * FAR_SIZE
        split_end = split_start + tl.where(split < NEAR, NEAR_SIZE, FAR_SIZE)
    num_rows, fresh, is_chain = ROWS, slots + start, True
    if paths is not None:
        is_chain = tl.load(positions + end - 1) - prefix == end - 1 - start
        is_shared = is_chain | (split_end <= prefix)
        if is_shared & ((first_row - start) % ROWS != 0):
            return  # an earlier row's program has this one's, too
        num_rows = tl.where(is_shared, ROWS, 1)
        fresh = tl.where(is_chain, fresh, paths + first_row * LONGEST_PATH)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, PADDED)
    row, is_row = first_row + m // GROUP, (m < num_rows * GROUP) & (first_row + m // GROUP < end)  # [M]
    flat = row * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP  # [M]: row and head
    at_split = flat.to(tl.int64) * num_splits + split
    # Ancestors come before their descendants, so no place after the tile's last row is seen.
    top = prefix + tl.minimum(first_row + ROWS, end) - start
    position, place, bottom = row, prefix + row - start, 0
    if WINDOW or paths is not None:
        position = tl.load(positions + row, mask=is_row, other=1 << 30)
    if WINDOW:
        bottom = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // PLACES * PLACES
    if paths is not None:
        place, top = position, tl.max(tl.where(is_row, position, 0), 0) + 1
    if NEAR_SIZE:
        first_split = _split_of(bottom, NEAR_SIZE, FAR_SIZE)
        last_split = _split_of(top - 1, NEAR_SIZE, FAR_SIZE)
        lowest, highest = tl.maximum(split_start, bottom), tl.minimum(split_end, top)
    else:  # the same share of the prefix's tiles for each; the last has the rows of this pass, too
        num_tiles = tl.maximum(prefix - bottom, 0) // PLACES + 1
        share = tl.cdiv(num_tiles, num_splits)
        first_split, last_split = 0, (num_tiles - 1) // share
        lowest = bottom + split * share * PLACES
        highest = tl.where(split == last_split, top, lowest + share * PLACES)
        highest = tl.where(split > last_split, lowest, highest)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if IS_EARLY and (lowest >= highest or highest > prefix):
        # for keys of this pass; those of passes before are there, and come while queries are still computed
        wait_for_previous()
    if lowest >= highest:
        if not IS_WHOLE and counters is None:
            tl.store(peaks + at_split, peak, mask=is_row & (split < last_split))
        return
    is_query, of_query = is_row[:, None] & (d < DIM)[None, :], q + flat[:, None] * DIM + d[None, :]
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:
        home = _split_of(place, NEAR_SIZE, FAR_SIZE) if NEAR_SIZE else last_split + 0 * row
        sink = tl.load(sinks + kv_head * GROUP + m % GROUP)
        peak, total = tl.where(home == split, sink, peak), tl.where(home == split, 1.0, total)
    state = (peak, total, tl.zeros((BLOCK_M, PADDED), tl.float32))
    table, places = tables + request, positions + start
    peak, total, acc = _fold_tiles(
        of_query, is_query, lowest, scale, state,
        Paged(
            keys, values, table, table_stride, fresh, places, prefix, highest, kv_head, KV_HEADS, DIM, PADDED,
            WINDOW, paths is not None,
        ),
        TileSight(masks, num_words, row, is_row, position), HAS_SHORT, IS_EARLY, NUM_LOOPS,
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
        if counters is None:
            tl.store(ends + flat, last_split + 1, mask=is_row & (split == last_split))
        else:  # programs without places have returned, and are not waited for
            counter, heads = counters + tile * KV_HEADS + kv_head, KV_HEADS * GROUP
            first_flat = first_row * heads + kv_head * GROUP
            add_if_last(
                counter, Partials(peaks, totals, sums), out, first_flat, tl.minimum(ROWS, end - first_row),
                num_splits, first_split, last_split + 1, heads, GROUP, COUNT, DIM, PADDED, CHUNK,
            )  # fmt: skip
