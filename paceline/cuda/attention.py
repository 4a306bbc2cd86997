"""Paged attention of a whole pass under tree masks, flash-style: scores are never stored.

A request's keys stand at places: its cached prefix at 0 .. prefix - 1, then the rows of this pass in order,
so a chain's row stands at its position. Places are cut into splits, short ones near the start (few keys: as
many programs as possible) and long ones after (many keys: few sums to add). Invariant: splits and tiles are
aligned to places and never to what else is in the launch, and what a row does not see adds an exact zero: its
bits depend on its own context, on where its ancestors stand, and on constants that the sizes of a launch
choose (`launch_for`); in exact mode these are fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from paceline.cuda.add_splits import add_splits
from paceline.cuda.attend_split import NEAR, PLACES, attend_split
from paceline.cuda.batch import DeviceBatch
from paceline.cuda.rows import LAUNCH, SCALE_BYTES, are_dense
from paceline.models.attention import LayerCache

LOG2_E = 1.4426950408889634
FEW, MANY = 16, 512  # requests a program searches for its own: few sizes, since each is compiled for
QUERY_BYTES = 32 * 1024  # of a tile of queries, at most
SHORT_BYTES = 128 * 128 * 2  # of keys that are all loaded before any is used, at most


class Tiling(NamedTuple):
    """For a number of rows, 16-bit numbers and heads up to 128 wide; larger ones take smaller tiles."""

    near_size: int  # keys of a split: a multiple of PLACES, as is the far size
    far_size: int
    block_m: int  # at most
    num_warps: int
    num_stages: int
    num_loops: int  # 2: first tiles that all rows see in full, then those under a mask; 1: all under a mask
    together: int  # splits whose sums are loaded together, at most; this and the next change no bits
    at_once: int  # rows and heads of a program that adds splits
    by_last: int = 0  # rows and heads at a time, if the last program of a tile adds them; 0: another kernel
    is_late: bool = False  # the next kernel may start when sums are there: it takes no room before
    # Of a launch; both depend on the context, and change no bits.
    num_splits: int = 0
    is_short: bool = False  # every split is one tile


TILINGS = (
    (8, 512, Tiling(64, 64, 16, 4, 2, 1, 16, 1, by_last=4, is_late=True)),
    (8, 2048, Tiling(128, 128, 16, 4, 2, 1, 16, 1)),
    (8, 16384, Tiling(192, 192, 16, 4, 2, 1, 16, 1)),
    (8, None, Tiling(512, 1024, 16, 4, 2, 1, 16, 1)),
    (16, 512, Tiling(64, 64, 16, 4, 2, 1, 16, 1)),
    (32, 2048, Tiling(128, 128, 64, 8, 2, 2, 16, 1)),
    (32, 16384, Tiling(384, 384, 64, 4, 3, 2, 8, 1)),
    (32, None, Tiling(512, 2048, 64, 4, 3, 2, 8, 1)),
    (128, 2048, Tiling(128, 128, 128, 8, 3, 2, 8, 1)),
    (128, None, Tiling(1024, 1024, 64, 4, 3, 2, 16, 1)),
    (256, None, Tiling(1024, 1024, 128, 8, 5, 2, 8, 4)),
)  # rows and context, each at most (measured on an H200); more rows fill a device without splits
UNSPLIT = Tiling(0, 0, 128, 8, 5, 2, 1, 1)
EXACT = Tiling(128, 1024, 64, 4, 3, 1, 8, 1)  # for any number of rows


class Attending(NamedTuple):
    """How a pass attends."""

    scale: float  # of scores
    max_context: int  # cached tokens of one request, at most
    max_rows: int  # of one request
    window: int | None = None
    is_prefix_old: bool = True  # its keys were there before a product that let nothing start early
    is_exact: bool = False  # the bits of a chain's row depend on its own context alone; not so a tree's
    counters: Tensor | None = None  # [any] int32, zero before and after; shared by passes of one stream


def launch_for(q: Tensor, keys: Tensor, how: Attending) -> Tiling:
    """A tiling fitted to the model's sizes and the context."""
    num_rows, heads, dim = q.shape
    padded = triton.next_power_of_2(dim)
    group, places = heads // keys.shape[1], how.max_context + how.max_rows
    fits = (t for rows, most, t in TILINGS if num_rows <= rows and (most is None or how.max_context <= most))
    tiling = EXACT if how.is_exact else next(fits, UNSPLIT)
    # float32 products run without tensor cores, and larger tiles of them do not fit into registers.
    most = 16 if q.element_size() > 2 else min(tiling.block_m, QUERY_BYTES // (padded * q.element_size()))
    block_m = max(16, most, triton.next_power_of_2(group))
    num_warps = tiling.num_warps if block_m == tiling.block_m else min(4, tiling.num_warps)
    if block_m * padded > 64 * 128:
        num_warps = 8
    # Slots are loaded before keys: five stages keep two tiles in flight, three one and room for a program.
    tile_bytes = 2 * PLACES.value * padded * keys.element_size()
    num_stages = min(3, tiling.num_stages) if tile_bytes > 32 * 1024 else tiling.num_stages
    if tile_bytes > 64 * 1024:
        num_stages = 1
    near = tiling.near_size or triton.cdiv(places, PLACES.value) * PLACES.value
    beyond = max(0, places - NEAR.value * near)
    num_splits = NEAR.value + triton.cdiv(beyond, tiling.far_size) if beyond else triton.cdiv(places, near)
    is_one_tile = near == PLACES.value and not beyond and not how.is_exact
    is_short = is_one_tile and near * padded * q.element_size() <= SHORT_BYTES
    together = min(tiling.together, triton.next_power_of_2(num_splits))
    by_last = min(tiling.by_last, block_m, triton.next_power_of_2(group * how.max_rows))
    return tiling._replace(
        near_size=near, block_m=block_m, num_warps=num_warps, num_stages=num_stages, together=together,
        by_last=by_last, num_splits=num_splits, is_short=is_short,
    )  # fmt: skip


def attend(
    q: Tensor,  # [T, heads, dim]
    cache: LayerCache,  # [slots, kv_heads, dim], int8 with scales (cuda/rows.py); this pass's rows are there
    batch: DeviceBatch,
    how: Attending,
    out: Tensor,  # [T, heads, dim]
) -> None:
    (num_rows, heads, dim), (keys, values), num_requests = q.shape, cache, len(batch.prefix_lens)
    kv_heads, tiling, counters = keys.shape[1], launch_for(q, keys, how), how.counters
    num_splits, is_short = tiling.num_splits, tiling.is_short
    width = dim + SCALE_BYTES.value * (keys.dtype == torch.int8)
    assert keys.shape == values.shape == (len(keys), kv_heads, width), "keys and values of the queries' width"
    assert heads % kv_heads == 0, "each KV head has the same number of query heads"
    assert len(batch.slots) == len(batch.masks) == num_rows, "one of each a row"
    assert len(batch.starts) == len(batch.block_tables) + 1 == num_requests + 1, "one of each a request"
    assert are_dense(q, keys, values, out, batch.block_tables, batch.masks), "addresses follow from shapes"
    count = 0 if num_splits == 1 else num_rows * heads * num_splits
    partials = torch.empty(count * (dim + 2), dtype=torch.float32, device=q.device)
    sums, peaks, totals = partials.split([count * dim, count, count])  # the first is aligned
    padded, group = triton.next_power_of_2(dim), heads // kv_heads
    searched = FEW if num_requests <= FEW else max(MANY, triton.next_power_of_2(num_requests))
    num_tiles = num_rows // (tiling.block_m // group) + num_requests
    is_one_chunk = num_splits <= tiling.together
    chunk = num_splits if is_one_chunk else tiling.together
    room = 0 if counters is None else len(counters)
    is_added = num_splits > 1 and tiling.by_last > 0 and num_tiles * kv_heads <= room
    of_last = (tiling.by_last, chunk, is_one_chunk) if is_added else (0, 0, False)
    attend_split[(num_tiles, kv_heads, num_splits)](
        q, keys, values, out, peaks, totals, sums,
        batch.starts, batch.prefix_lens, batch.slots, batch.positions, batch.block_tables, batch.masks,
        counters if is_added else None, how.scale * LOG2_E, num_requests, batch.block_tables.shape[1],
        batch.masks.shape[1], num_splits, tiling.near_size, tiling.far_size,
        kv_heads, group, dim, padded, searched, tiling.block_m, how.window or 0,
        num_splits == 1, tiling.num_loops, is_short, is_short and how.is_prefix_old,
        *of_last, tiling.is_late, num_warps=tiling.num_warps, num_stages=tiling.num_stages, **LAUNCH,
    )  # fmt: skip
    if num_splits > 1 and not is_added:
        num_sums, at_once = num_rows * heads, tiling.at_once
        add_splits[(triton.cdiv(num_sums, at_once),)](
            peaks, totals, sums, out, num_sums, num_splits, dim, padded, at_once, chunk, is_one_chunk,
            num_warps=at_once, **LAUNCH,
        )  # fmt: skip
