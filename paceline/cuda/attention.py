"""Paged attention of a whole pass under tree masks, flash-style: scores are never stored.

A request's keys stand at places: its cached prefix at 0 .. prefix - 1, then the rows of this pass in order, so a chain's row stands at its
position. Places are cut into splits, short ones near the start (few keys: as many programs as possible) and long ones after (many keys: few
sums to add). A program sums each, and a second kernel adds them one after another in order.
Invariant: splits and tiles are aligned to places and never to what else is in the launch, and what a row does not see adds an exact zero.
So a row's bits depend on its own context, on where its ancestors stand, and on constants that the sizes of a launch choose (`launch_for`);
in exact mode these are fixed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from paceline.cuda.overlap import LAUNCH, let_next_start, wait_for_previous
from paceline.cuda.rows import SCALE_BYTES

PLACES = tl.constexpr(64)  # keys of a tile: as many as a word of the masks has bits
BLOCK_SIZE = tl.constexpr(16)  # slots of a block
NEAR = tl.constexpr(16)  # splits of the near size, at most; all after them are of the far size
LOG2_E = 1.4426950408889634
FEW, MANY = 16, 512  # requests a program looks through to find its own: few sizes, since each is compiled for
QUERY_BYTES = 32 * 1024  # of a tile of queries, at most


class Sights(Protocol):
    """What the rows of a pass see; cuda/batch.py says how."""

    @property
    def positions(self) -> torch.Tensor: ...  # [T]
    @property
    def slots(self) -> torch.Tensor: ...  # [T]: where a row's keys are
    @property
    def starts(self) -> torch.Tensor: ...  # [R + 1]
    @property
    def prefix_lens(self) -> torch.Tensor: ...  # [R]
    @property
    def block_tables(self) -> torch.Tensor: ...  # [R, B]
    @property
    def masks(self) -> torch.Tensor: ...  # [T, W]


class Plan(NamedTuple):
    """What a number of rows chooses, for 16-bit numbers and heads up to 128 wide; larger ones take smaller tiles."""

    near_size: int  # keys of a split: a multiple of PLACES, as is the far size
    far_size: int
    block_m: int  # at most
    num_warps: int
    num_stages: int
    num_loops: int  # 2: first tiles that all rows see in full, then those under a mask; 1: all under a mask, without a pause between
    together: int  # splits whose sums are loaded together, at most; this and the next change no bits
    at_once: int  # rows and heads of a program that adds splits


PLANS = (
    (8, 512, Plan(64, 64, 16, 4, 2, 1, 16, 1)),
    (8, 2048, Plan(128, 128, 16, 4, 2, 1, 16, 1)),
    (8, 16384, Plan(192, 192, 16, 4, 2, 1, 16, 1)),
    (8, None, Plan(512, 1024, 16, 4, 2, 1, 16, 1)),
    (32, 2048, Plan(128, 128, 64, 8, 2, 2, 16, 1)),
    (32, 16384, Plan(384, 384, 64, 4, 3, 2, 8, 1)),
    (32, None, Plan(512, 2048, 64, 4, 3, 2, 8, 1)),
    (128, 2048, Plan(128, 128, 128, 4, 3, 2, 8, 1)),
    (128, None, Plan(1024, 1024, 64, 4, 3, 2, 16, 1)),
    (256, None, Plan(1024, 1024, 128, 8, 5, 2, 8, 4)),
)  # up to so many rows, up to so long a context (measured on an H200: scripts/gpu_attention.py); more rows fill a device without splits
UNSPLIT = Plan(0, 0, 128, 8, 5, 2, 1, 1)
EXACT = Plan(128, 1024, 64, 4, 3, 1, 8, 4)  # whatever the rows


class Launch(NamedTuple):
    """Constants of a launch. Those that depend on the context change no bits: `num_splits`, and no loop where every split is a tile."""

    block_m: int  # rows of a tile times the query heads of a KV head
    num_warps: int
    num_stages: int
    num_loops: int
    near_size: int
    far_size: int
    num_splits: int
    together: int
    at_once: int


def _plan_for(num_rows: int, max_context: int) -> Plan:
    fitting = (plan for rows, context, plan in PLANS if num_rows <= rows and (context is None or max_context <= context))
    return next(fitting, UNSPLIT)


def launch_for(q: torch.Tensor, keys: torch.Tensor, max_context: int, max_rows: int, is_exact: bool = False) -> Launch:
    num_rows, heads, dim = q.shape
    kv_heads, padded = keys.shape[1], triton.next_power_of_2(dim)
    group, places = heads // kv_heads, max_context + max_rows
    plan = EXACT if is_exact else _plan_for(num_rows, max_context)
    # float32 products run without tensor cores, and larger tiles of them do not fit into registers.
    most = 16 if q.element_size() > 2 else min(plan.block_m, QUERY_BYTES // (padded * q.element_size()))
    block_m = max(16, most, triton.next_power_of_2(group))
    num_warps = 8 if block_m * padded > 64 * 128 else plan.num_warps if block_m == plan.block_m else min(4, plan.num_warps)
    # Slots are loaded before keys: five stages keep two tiles in flight, three keep one and leave room for a second program.
    tile_bytes = 2 * PLACES.value * padded * keys.element_size()
    num_stages = 1 if tile_bytes > 64 * 1024 else min(3, plan.num_stages) if tile_bytes > 32 * 1024 else plan.num_stages
    near = plan.near_size or triton.cdiv(places, PLACES.value) * PLACES.value
    beyond = max(0, places - NEAR.value * near)
    num_splits = NEAR.value + triton.cdiv(beyond, plan.far_size) if beyond else triton.cdiv(places, near)
    num_loops = 0 if near == PLACES.value and not beyond and not is_exact else plan.num_loops
    together = min(plan.together, triton.next_power_of_2(num_splits))
    return Launch(block_m, num_warps, num_stages, num_loops, near, plan.far_size, num_splits, together, plan.at_once)


def attend(
    q: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [num_slots, kv_heads, dim], int8 with scales (cuda/rows.py); the rows of this pass are already there
    values: torch.Tensor,  # as the keys
    batch: Sights,
    *,
    scale: float,
    window: int | None,
    max_context: int,  # cached tokens of one request, at most
    max_rows: int,  # of one request
    out: torch.Tensor,  # [T, heads, dim]
    is_prefix_old: bool = True,  # its keys were there before the last product began; else they may be of the kernel before this one
    is_exact: bool = False,  # a row's bits depend on its own context alone, whatever the launch; trees are not such, chains are
) -> None:
    num_rows, heads, dim = q.shape
    kv_heads, num_requests = keys.shape[1], len(batch.prefix_lens)
    assert out.shape == q.shape, "as many results as queries"
    width = dim + SCALE_BYTES.value * (keys.dtype == torch.int8)
    assert keys.shape == values.shape == (len(keys), kv_heads, width), "keys and values of the queries' width"
    assert heads % kv_heads == 0, "each KV head has the same number of query heads"
    assert len(batch.slots) == len(batch.positions) == len(batch.masks) == num_rows, "one of each a row"
    assert len(batch.starts) == num_requests + 1 == len(batch.block_tables) + 1, "one start and one table a request"
    assert all(x.is_contiguous() for x in (q, keys, values, out, batch.block_tables, batch.masks)), "addresses follow from shapes"
    assert scale > 0, "a maximum of scores is a maximum of scaled scores"
    assert window is None or window > 0, "a row sees itself"
    launch = launch_for(q, keys, max_context, max_rows, is_exact)
    count = 0 if launch.num_splits == 1 else num_rows * heads * launch.num_splits
    partials = torch.empty(count * (dim + 2), dtype=torch.float32, device=q.device)
    sums, peaks, totals = partials.split([count * dim, count, count])  # the first is aligned
    padded, group = triton.next_power_of_2(dim), heads // kv_heads
    looked_through = FEW if num_requests <= FEW else max(MANY, triton.next_power_of_2(num_requests))
    num_tiles = num_rows // (launch.block_m // group) + num_requests
    _attend_split[(num_tiles, kv_heads, launch.num_splits)](
        q, keys, values, out, peaks, totals, sums,
        batch.starts, batch.prefix_lens, batch.slots, batch.positions, batch.block_tables, batch.masks,
        scale * LOG2_E, num_requests, batch.block_tables.shape[1], batch.masks.shape[1],
        launch.num_splits, launch.near_size, launch.far_size,
        kv_heads, group, dim, padded, looked_through, launch.block_m, window or 0,
        launch.num_splits == 1, launch.num_loops, launch.num_loops == 0 and is_prefix_old,
        num_warps=launch.num_warps, num_stages=launch.num_stages, **LAUNCH,
    )  # fmt: skip
    if launch.num_splits > 1:
        num_sums, at_once = num_rows * heads, launch.at_once
        _add_splits[(triton.cdiv(num_sums, at_once),)](
            peaks, totals, sums, out, num_sums, launch.num_splits,
            dim, padded, at_once, launch.together, launch.num_splits <= launch.together, num_warps=at_once, **LAUNCH,
        )  # fmt: skip


@triton.jit
def _request_of_tile(
    starts: tl.tensor, prefix_lens: tl.tensor, tile: tl.tensor, num_requests: tl.tensor, ROWS: tl.constexpr, REQUESTS: tl.constexpr
) -> tl.tensor:
    """-> request, its first row, the row after its last, its prefix: all loaded at once, since each wait for memory counts.

    A request's first tile is its first row // ROWS + its index: room for its rows however many the others have.
    """
    index = tl.arange(0, REQUESTS)
    is_request = index < num_requests
    start = tl.load(starts + index, mask=is_request, other=0)
    end = tl.load(starts + index + 1, mask=is_request, other=0)
    prefix = tl.load(prefix_lens + index, mask=is_request, other=0)
    request = tl.sum((is_request & (start // ROWS + index <= tile)).to(tl.int32), 0) - 1
    is_it = index == request
    return request, tl.sum(tl.where(is_it, start, 0), 0), tl.sum(tl.where(is_it, end, 0), 0), tl.sum(tl.where(is_it, prefix, 0), 0)


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
    bit, bits = tl.arange(0, PLACES), _mask_bits(masks, row, is_row, num_words, offset)  # [N], [M]
    half = tl.where((bit < 32)[None, :], bits.to(tl.uint32)[:, None], (bits >> 32).to(tl.uint32)[:, None])  # shifts of 64 bits are slow
    is_seen = ((half >> (bit % 32).to(tl.uint32)[None, :]) & 1) != 0
    if WINDOW:
        is_seen = is_seen & (position[:, None] - key_position[None, :] < WINDOW)
    return is_seen


@triton.jit
def _or_fresh(cached: tl.tensor, fresh: tl.tensor, place: tl.tensor, prefix: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """[N] `cached` within the prefix, and after it the column `fresh` of the request's rows."""
    return tl.where(place < prefix, cached, tl.load(fresh + place - prefix, mask=(place >= prefix) & (place < highest), other=0))


@triton.jit
def _scales(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(pointers.to(tl.pointer_type(tl.float32), bitcast=True), mask=mask, other=0.0)


@triton.jit
def _fold(
    score: tl.tensor, value: tl.tensor, value_scale: tl.tensor, peak: tl.tensor, total: tl.tensor, acc: tl.tensor, scale: tl.tensor,
    HAS_SCALES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add a tile of scores [M, N] and values [N, D] to a running softmax."""
    higher = tl.maximum(peak, tl.max(score, 1) * scale)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: infinity less infinity is no number
    # Fused by name, since with a mask between product and difference the compiler would round twice.
    weight = tl.exp2(tl.fma(score, scale, -level[:, None]))
    fade = tl.exp2(peak - level)
    total = total * fade + tl.sum(weight, 1)
    if HAS_SCALES:  # integers have few digits: they are scaled by way of their weights
        weight *= value_scale[None, :]
    return higher, total, tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["num_requests", "table_width", "num_words", "num_splits", "near_size", "far_size"])
def _attend_split(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor,
    starts: tl.tensor, prefix_lens: tl.tensor, slots: tl.tensor, positions: tl.tensor, tables: tl.tensor, masks: tl.tensor,
    scale: tl.tensor, num_requests: tl.tensor, table_width: tl.tensor, num_words: tl.tensor,
    num_splits: tl.tensor, near_size: tl.tensor, far_size: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    REQUESTS: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr,
    IS_WHOLE: tl.constexpr, NUM_LOOPS: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of rows, one KV head, one split. `scale` has log2(e) in it: exponentials are powers of two."""
    let_next_start()
    HAS_SCALES: tl.constexpr = keys.dtype.element_ty == tl.int8
    WIDTH: tl.constexpr = DIM + SCALE_BYTES if HAS_SCALES else DIM
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = BLOCK_M // GROUP
    request, start, end, prefix = _request_of_tile(starts, prefix_lens, tile, num_requests, ROWS, REQUESTS)
    first_row = start + (tile - start // ROWS - request) * ROWS
    if not IS_EARLY or first_row >= end:
        wait_for_previous()  # all that was read before is the batch's own
    if first_row >= end:
        return
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, PLACES), tl.arange(0, PADDED)
    row, is_row = first_row + m // GROUP, (m < ROWS * GROUP) & (first_row + m // GROUP < end)  # [M]
    flat = row * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP  # [M]: row and head
    at_split = flat.to(tl.int64) * num_splits + split
    # Ancestors come before their descendants, so no place after the tile's last row is seen.
    lowest = tl.minimum(split, NEAR) * near_size + tl.maximum(split - NEAR, 0) * far_size
    highest = tl.minimum(lowest + tl.where(split < NEAR, near_size, far_size), prefix + tl.minimum(first_row + ROWS, end) - start)
    position = row
    if WINDOW:
        position = tl.load(positions + row, mask=is_row, other=1 << 30)
        lowest = tl.maximum(lowest, tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // PLACES * PLACES)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if IS_EARLY and (lowest >= highest or highest > prefix):
        wait_for_previous()  # for keys of this pass; those of passes before are there, and come while queries are still computed
    if lowest >= highest:
        tl.store(peaks + at_split, peak, mask=is_row)
        return
    is_query = is_row[:, None] & (d < DIM)[None, :]
    if NUM_LOOPS > 0:
        query = tl.load(q + flat[:, None] * DIM + d[None, :], mask=is_query, other=0.0)  # [M, D]
    total, acc = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, PADDED), tl.float32)
    masked = lowest if WINDOW or NUM_LOOPS < 2 else tl.maximum(lowest, tl.minimum(highest, prefix) // PLACES * PLACES)
    # First the tiles that every row sees in full, then those that need a mask: the same sums, fewer instructions.
    for IS_MASKED in tl.static_range(0 if NUM_LOOPS == 2 else 1, 2):
        from_place = masked if IS_MASKED else lowest
        num_tiles = 1 if NUM_LOOPS == 0 else tl.cdiv((highest if IS_MASKED else masked) - from_place, PLACES)
        for index in tl.range(0, num_tiles):  # a loop of one known turn is none for the compiler
            first = from_place + index * PLACES
            place = first + n  # [N]
            block = tl.load(tables + request * table_width + place // BLOCK_SIZE, mask=place < prefix, other=0)
            slot, key_position = block * BLOCK_SIZE + place % BLOCK_SIZE, place
            if IS_MASKED:
                slot = _or_fresh(slot, slots + start, place, prefix, highest)
                if WINDOW:
                    key_position = _or_fresh(place, positions + start, place, prefix, highest)
            line = (slot.to(tl.int64) * KV_HEADS + kv_head) * WIDTH  # [N]
            at = line[:, None] + d[None, :]
            is_there = (place < highest)[:, None] & (d < DIM)[None, :]
            key = tl.load(keys + at, mask=is_there, other=0.0).to(q.dtype.element_ty)  # [N, D]
            value = tl.load(values + at, mask=is_there, other=0.0).to(q.dtype.element_ty)  # [N, D]
            if IS_MASKED:  # before the product, which waits for the keys
                is_seen = _is_seen(masks, row, is_row, num_words, first - prefix, position, key_position, WINDOW)
            if NUM_LOOPS == 0:
                if IS_EARLY:
                    wait_for_previous()
                query = tl.load(q + flat[:, None] * DIM + d[None, :], mask=is_query, other=0.0)  # [M, D]
                # Changes nothing, but no load's numbers are asked for before all loads are under way.
                query, key, value = tl.where(is_query, query, 0.0), tl.where(is_there, key, 0.0), tl.where(is_there, value, 0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, N]
            value_scale = place
            if HAS_SCALES:
                score *= _scales(keys + line + DIM, place < highest)[None, :]
                value_scale = _scales(values + line + DIM, place < highest)
            if IS_MASKED:
                score = tl.where(is_seen, score, float("-inf"))
            peak, total, acc = _fold(score, value, value_scale, peak, total, acc, scale, HAS_SCALES)
    if IS_WHOLE:
        acc /= tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + flat[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=is_query)
    else:
        tl.store(peaks + at_split, peak, mask=is_row)
        tl.store(totals + at_split, total, mask=is_row)
        tl.store(sums + at_split[:, None] * DIM + d[None, :], acc, mask=is_query)


@triton.jit
def _add_chunk(
    peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor, at: tl.tensor, is_there: tl.tensor, first: tl.tensor, num_splits: tl.tensor,
    level: tl.tensor, total: tl.tensor, result: tl.tensor, DIM: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add CHUNK splits in order. No load waits for another: what an empty split never wrote is loaded too, and dropped."""
    d = tl.arange(0, PADDED)
    for step in tl.static_range(CHUNK):
        is_split = is_there & (first + step < num_splits)  # [H]
        part_at = (at + first + step)[:, None] * DIM + d[None, :]
        peak = tl.load(peaks + at + first + step, mask=is_split, other=float("-inf"))
        part_total = tl.load(totals + at + first + step, mask=is_split, other=0.0)
        part = tl.load(sums + part_at, mask=is_split[:, None] & (d < DIM)[None, :], other=0.0)  # [H, D]
        is_seen = peak > float("-inf")
        factor = tl.where(is_seen, tl.exp2(peak - level), 0.0)
        total = tl.fma(factor, tl.where(is_seen, part_total, 0.0), total)
        result = tl.fma(factor[:, None], tl.where(is_seen[:, None], part, 0.0), result)
    return total, result


@triton.jit(do_not_specialize=["num_sums", "num_splits"])
def _add_splits(
    peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor, out: tl.tensor, num_sums: tl.tensor, num_splits: tl.tensor,
    DIM: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr, IS_ONE_CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """A few rows and heads. Splits are added one after another: those beyond a row's context add zeros, however many they are."""
    let_next_start()
    wait_for_previous()
    flat, d = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, PADDED)
    is_there = flat < num_sums
    at = flat.to(tl.int64) * num_splits  # [H]
    s = tl.arange(0, CHUNK)
    num_chunks = 1 if IS_ONE_CHUNK else tl.cdiv(num_splits, CHUNK)
    highest = tl.full((AT_ONCE, CHUNK), float("-inf"), tl.float32)
    for chunk in tl.range(0, num_chunks):
        is_split = is_there[:, None] & (chunk * CHUNK + s < num_splits)[None, :]
        highest = tl.maximum(highest, tl.load(peaks + (at[:, None] + chunk * CHUNK + s[None, :]), mask=is_split, other=float("-inf")))
    level = tl.where(is_there, tl.max(highest, 1), 0.0)  # a row sees itself, so only one that is not there has no peak
    total, result = tl.zeros((AT_ONCE,), tl.float32), tl.zeros((AT_ONCE, PADDED), tl.float32)
    for chunk in tl.range(0, num_chunks):
        total, result = _add_chunk(
            peaks, totals, sums, at, is_there, chunk * CHUNK, num_splits, level, total, result, DIM, PADDED, CHUNK
        )  # fmt: skip
    result /= tl.where(is_there, total, 1.0)[:, None]
    tl.store(out + flat[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=is_there[:, None] & (d < DIM)[None, :])
