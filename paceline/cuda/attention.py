"""Paged attention of a whole pass under tree masks, flash-style: scores are never stored.

A request's keys stand at places: its cached prefix at 0 .. prefix - 1, then the rows of this pass in order,
so a chain's row stands at its position; in exact mode so does a tree's (`paths_of`). Places are cut into
splits: as many as fill the device, equal shares of a request's context; in exact mode short ones near the
start and long ones after. Invariant: splits and tiles follow from a request's own context and never from what
else is in the launch, and what a row does not see adds an exact zero: its bits depend on its own context, on
where its ancestors stand, and on constants that the sizes of a launch choose (`launch_for`); in exact mode
these are fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from paceline.cuda.add_splits import add_splits
from paceline.cuda.attend_split import LONGEST_PATH, NEAR, PLACES, attend_split, trace
from paceline.cuda.batch import DeviceBatch
from paceline.cuda.rows import BLOCK_SIZE, LAUNCH, SCALE_BYTES, are_dense
from paceline.models.attention import LayerCache

LOG2_E = 1.4426950408889634
FEW, MANY = 16, 512  # requests a program searches for its own: few sizes, since each is compiled for
QUERY_BYTES = 32 * 1024  # of a tile of queries, at most
MOST_SPLIT_ROWS = 256  # more rows fill a device without splits
SHORT_BYTES = 128 * 128 * 2  # of keys that are all loaded before any is used, at most


class Tiling(NamedTuple):
    """For 16-bit numbers and heads up to 128 wide; larger ones take smaller tiles."""

    block_m: int  # at most
    num_warps: int
    num_stages: int
    num_programs: int  # that fill a device: a launch has as many splits as bring it there
    num_loops: int  # 2: first tiles that all rows see in full, then those under a mask; 1: all under a mask
    together: int  # splits whose sums are loaded together, at most; changes no bits
    near_size: int = 0  # keys of a split, a multiple of PLACES, as is the far size; 0: equal shares
    far_size: int = 0
    has_short: bool = False  # a split of one tile is loaded at once
    by_last: int = 0  # rows and heads at a time, if the last program of a tile adds them; 0: another kernel
    is_late: bool = False  # the next kernel may start when sums are there: it takes no room before
    num_splits: int = 1  # of a launch


# Measured on an H200: one request's few rows, few rows of each request, trees, and the rows of prompts.
FEW_ROWS = Tiling(16, 4, 2, 768, 1, 16, has_short=True)
ALONE = FEW_ROWS._replace(by_last=4, is_late=True)
LARGE = Tiling(128, 8, 3, 128, 2, 16)
UNSPLIT = Tiling(128, 8, 5, 1, 2, 1)
EXACT = Tiling(64, 4, 3, 0, 1, 8, near_size=128, far_size=1024)  # for any number of rows
MOST_SPLITS, SUMS = 32, 4096  # of a row and head: numbers of sums that are loaded together, at most


class Attending(NamedTuple):
    """How a pass attends."""

    scale: float  # of scores
    max_rows: int  # of one request
    window: int | None = None
    is_prefix_old: bool = True  # its keys were there before a product that let nothing start early
    is_exact: bool = False  # a row's bits depend on its own context alone; with trees only with `paths`
    paths: Tensor | None = None  # [T, LONGEST_PATH] int32: what `paths_of` says
    sinks: Tensor | None = None  # [heads] float32: scores without values, times log2(e)
    counters: Tensor | None = None  # [any] int32, zero before and after; shared by passes of one stream


def launch_for(q: Tensor, keys: Tensor, batch: DeviceBatch, how: Attending) -> Tiling:
    """A tiling fitted to the model's sizes and to the rows and requests of the batch."""
    num_rows, heads, dim = q.shape
    num_requests, padded, group = len(batch.prefix_lens), triton.next_power_of_2(dim), heads // keys.shape[1]
    tiling = LARGE if how.max_rows > 16 else FEW_ROWS if num_rows > 8 else ALONE
    if how.is_exact or num_rows > MOST_SPLIT_ROWS:
        tiling = EXACT if how.is_exact else UNSPLIT
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
    if tiling.near_size:
        places = len(batch.block_tables) * BLOCK_SIZE.value + how.max_rows
        beyond = triton.cdiv(max(0, places - NEAR.value * tiling.near_size), tiling.far_size)
        num_splits = NEAR.value + beyond if beyond else triton.cdiv(places, tiling.near_size)
    else:
        num_tiles = min(num_rows, num_requests * triton.cdiv(how.max_rows * group, block_m))
        wanted = tiling.num_programs // (num_tiles * keys.shape[1])
        num_splits = min(MOST_SPLITS, 1 << max(0, wanted.bit_length() - 1))
    return tiling._replace(
        block_m=block_m, num_warps=num_warps, num_stages=num_stages, num_splits=num_splits,
        has_short=tiling.has_short and PLACES.value * padded * q.element_size() <= SHORT_BYTES,
        together=min(tiling.together, SUMS // padded, triton.next_power_of_2(num_splits)),
        by_last=min(tiling.by_last, block_m, triton.next_power_of_2(group * how.max_rows)),
    )  # fmt: skip


def paths_of(batch: DeviceBatch) -> Tensor:
    """[T, LONGEST_PATH] int32: the slots of each row's ancestors in this pass and its own, in order."""
    (num_rows, num_words), num_requests = batch.masks.shape, len(batch.prefix_lens)
    paths = torch.empty((num_rows, LONGEST_PATH.value), dtype=torch.int32, device=batch.masks.device)
    most = min(num_words, LONGEST_PATH.value // PLACES.value)  # longer requests are chains
    trace[(num_rows,)](
        batch.starts, batch.slots, batch.masks, paths, num_requests, num_words, most,
        _searched(num_requests), num_warps=1, **LAUNCH,
    )  # fmt: skip
    return paths


def _searched(num_requests: int) -> int:
    return FEW if num_requests <= FEW else max(MANY, triton.next_power_of_2(num_requests))


def attend(
    q: Tensor,  # [T, heads, dim]
    cache: LayerCache,  # [slots, kv_heads, dim], int8 with scales (cuda/rows.py); this pass's rows are there
    batch: DeviceBatch,
    how: Attending,
    out: Tensor,  # [T, heads, dim]
) -> None:
    (num_rows, heads, dim), (keys, values), num_requests = q.shape, cache, len(batch.prefix_lens)
    kv_heads, tiling, counters = keys.shape[1], launch_for(q, keys, batch, how), how.counters
    num_splits = tiling.num_splits
    width = dim + SCALE_BYTES.value * (keys.dtype == torch.int8)
    assert keys.shape == values.shape == (len(keys), kv_heads, width), "keys and values of the queries' width"
    assert heads % kv_heads == 0, "each KV head has the same number of query heads"
    assert len(batch.slots) == len(batch.masks) == num_rows, "one of each a row"
    assert len(batch.starts) == num_requests + 1 <= batch.block_tables.shape[1] + 1, "one of each a request"
    assert are_dense(q, keys, values, out, batch.block_tables, batch.masks), "addresses follow from shapes"
    count = 0 if num_splits == 1 else num_rows * heads
    partials = torch.empty(count * num_splits * (dim + 2), dtype=torch.float32, device=q.device)
    sums, peaks, totals = partials.split([count * num_splits * each for each in (dim, 1, 1)])
    ends = torch.empty(count, dtype=torch.int32, device=q.device)
    padded, group = triton.next_power_of_2(dim), heads // kv_heads
    assert how.paths is None or how.is_exact, "splits of fixed sizes"
    num_tiles = num_rows // (tiling.block_m // group if how.paths is None else 1) + num_requests
    room = 0 if counters is None else len(counters)
    is_added = num_splits > 1 and tiling.by_last > 0 and num_tiles * kv_heads <= room
    attend_split[(num_tiles, kv_heads, num_splits)](
        q, keys, values, out, peaks, totals, sums, ends,
        batch.starts, batch.prefix_lens, batch.slots, batch.positions, batch.block_tables, batch.masks,
        how.paths, how.sinks, counters if is_added else None, how.scale * LOG2_E, num_requests,
        batch.block_tables.shape[1], batch.masks.shape[1], num_splits,
        kv_heads, group, dim, padded, _searched(num_requests), tiling.block_m, how.window or 0,
        tiling.near_size, tiling.far_size, num_splits == 1, tiling.num_loops, tiling.has_short,
        tiling.has_short and how.is_prefix_old, tiling.by_last if is_added else 0,
        tiling.together if is_added else 0, tiling.is_late,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **LAUNCH,
    )  # fmt: skip
    if num_splits > 1 and not is_added:
        add_splits[(num_rows * heads,)](
            peaks, totals, sums, ends, out, num_splits, dim, padded, tiling.together, num_warps=1, **LAUNCH
        )
