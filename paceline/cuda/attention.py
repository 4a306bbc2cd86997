"""Paged attention of a whole pass under tree masks, flash-style: scores are never stored.

A request's keys stand at places: its cached prefix at 0 .. prefix - 1, then the rows of this pass in order,
so a chain's row stands at its position. Places are cut into splits, short ones near the start (few keys: as
many programs as possible) and long ones after (many keys: few sums to add). A program sums each; a second
kernel, or the last of these programs, adds them one after another in order. Invariant: splits and tiles are
aligned to places and never to what else is in the launch, and what a row does not see adds an exact zero. So
a row's bits depend on its own context, on where its ancestors stand, and on constants that the sizes of a
launch choose (`launch_for`); in exact mode these are fixed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton

from paceline.cuda.add_splits import add_splits
from paceline.cuda.attend_split import NEAR, PLACES, attend_split
from paceline.cuda.overlap import LAUNCH
from paceline.cuda.rows import SCALE_BYTES

LOG2_E = 1.4426950408889634
FEW, MANY = 16, 512  # requests a program looks through to find its own: few sizes, since each is compiled for
QUERY_BYTES = 32 * 1024  # of a tile of queries, at most
SHORT_BYTES = 128 * 128 * 2  # of keys that are all loaded before any is used, at most


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
    """What a number of rows chooses, for 16-bit numbers and heads up to 128 wide; larger ones take smaller
    tiles.
    """

    near_size: int  # keys of a split: a multiple of PLACES, as is the far size
    far_size: int
    block_m: int  # at most
    num_warps: int
    num_stages: int
    # 2: first tiles that all rows see in full, then those under a mask; 1: all under a mask, without a pause
    # between
    num_loops: int
    together: int  # splits whose sums are loaded together, at most; this and the next change no bits
    at_once: int  # rows and heads of a program that adds splits
    # rows and heads at a time, if the last program that has a split of a tile adds them; 0: another kernel
    # does
    by_last: int = 0
    is_late: bool = (
        False  # the next kernel may start when sums are there, and not at once: it takes no room before
    )


PLANS = (
    (8, 512, Plan(64, 64, 16, 4, 2, 1, 16, 1, by_last=4, is_late=True)),
    (8, 2048, Plan(128, 128, 16, 4, 2, 1, 16, 1)),
    (8, 16384, Plan(192, 192, 16, 4, 2, 1, 16, 1)),
    (8, None, Plan(512, 1024, 16, 4, 2, 1, 16, 1)),
    (16, 512, Plan(64, 64, 16, 4, 2, 1, 16, 1)),
    (32, 2048, Plan(128, 128, 64, 8, 2, 2, 16, 1)),
    (32, 16384, Plan(384, 384, 64, 4, 3, 2, 8, 1)),
    (32, None, Plan(512, 2048, 64, 4, 3, 2, 8, 1)),
    (128, 2048, Plan(128, 128, 128, 8, 3, 2, 8, 1)),
    (128, None, Plan(1024, 1024, 64, 4, 3, 2, 16, 1)),
    (256, None, Plan(1024, 1024, 128, 8, 5, 2, 8, 4)),
)  # up to so many rows, up to so long a context (measured on an H200: scripts/gpu_attention.py); more rows fill a device without splits
UNSPLIT = Plan(0, 0, 128, 8, 5, 2, 1, 1)
EXACT = Plan(128, 1024, 64, 4, 3, 1, 8, 1)  # whatever the rows


class Launch(NamedTuple):
    """Constants of a launch. Those that depend on the context change no bits: `num_splits`, and no loop where
    splits are a tile each.
    """

    block_m: int  # rows of a tile times the query heads of a KV head
    num_warps: int
    num_stages: int
    num_loops: int  # where splits are not short
    is_short: bool  # every split is one tile
    near_size: int
    far_size: int
    num_splits: int
    together: int
    at_once: int
    by_last: int
    is_late: bool


def _plan_for(num_rows: int, max_context: int) -> Plan:
    fitting = (
        plan
        for rows, context, plan in PLANS
        if num_rows <= rows and (context is None or max_context <= context)
    )
    return next(fitting, UNSPLIT)


def launch_for(
    q: torch.Tensor, keys: torch.Tensor, max_context: int, max_rows: int, is_exact: bool = False
) -> Launch:
    num_rows, heads, dim = q.shape
    kv_heads, padded = keys.shape[1], triton.next_power_of_2(dim)
    group, places = heads // kv_heads, max_context + max_rows
    plan = EXACT if is_exact else _plan_for(num_rows, max_context)
    # float32 products run without tensor cores, and larger tiles of them do not fit into registers.
    most = 16 if q.element_size() > 2 else min(plan.block_m, QUERY_BYTES // (padded * q.element_size()))
    block_m = max(16, most, triton.next_power_of_2(group))
    num_warps = (
        8
        if block_m * padded > 64 * 128
        else plan.num_warps
        if block_m == plan.block_m
        else min(4, plan.num_warps)
    )
    # Slots are loaded before keys: five stages keep two tiles in flight, three keep one and leave room for a
    # second program.
    tile_bytes = 2 * PLACES.value * padded * keys.element_size()
    num_stages = (
        1
        if tile_bytes > 64 * 1024
        else min(3, plan.num_stages)
        if tile_bytes > 32 * 1024
        else plan.num_stages
    )
    near = plan.near_size or triton.cdiv(places, PLACES.value) * PLACES.value
    beyond = max(0, places - NEAR.value * near)
    num_splits = NEAR.value + triton.cdiv(beyond, plan.far_size) if beyond else triton.cdiv(places, near)
    is_short = (
        near == PLACES.value
        and not beyond
        and not is_exact
        and near * padded * q.element_size() <= SHORT_BYTES
    )
    together = min(plan.together, triton.next_power_of_2(num_splits))
    by_last = min(plan.by_last, block_m, triton.next_power_of_2(group * max_rows))
    sizes = (near, plan.far_size, num_splits, together, plan.at_once, by_last)
    return Launch(block_m, num_warps, num_stages, plan.num_loops, is_short, *sizes, plan.is_late)


def attend(
    q: torch.Tensor,  # [T, heads, dim]
    # [num_slots, kv_heads, dim], int8 with scales (cuda/rows.py); the rows of this pass are already there
    keys: torch.Tensor,
    values: torch.Tensor,  # as the keys
    batch: Sights,
    *,
    scale: float,
    window: int | None,
    max_context: int,  # cached tokens of one request, at most
    max_rows: int,  # of one request
    out: torch.Tensor,  # [T, heads, dim]
    # its keys were there before the last product that let nothing start early; else they may be as new as q
    is_prefix_old: bool = True,
    # a row's bits depend on its own context alone, whatever the launch; trees are not such, chains are
    is_exact: bool = False,
    counters: torch.Tensor
    | None = None,  # [any] int32, all zero before and after: who passes the same does so on one stream
) -> None:
    num_rows, heads, dim = q.shape
    kv_heads, num_requests = keys.shape[1], len(batch.prefix_lens)
    assert out.shape == q.shape, "as many results as queries"
    width = dim + SCALE_BYTES.value * (keys.dtype == torch.int8)
    assert keys.shape == values.shape == (len(keys), kv_heads, width), "keys and values of the queries' width"
    assert heads % kv_heads == 0, "each KV head has the same number of query heads"
    assert len(batch.slots) == len(batch.positions) == len(batch.masks) == num_rows, "one of each a row"
    assert len(batch.starts) == num_requests + 1 == len(batch.block_tables) + 1, (
        "one start and one table a request"
    )
    assert all(x.is_contiguous() for x in (q, keys, values, out, batch.block_tables, batch.masks)), (
        "addresses follow from shapes"
    )
    assert scale > 0, "a maximum of scores is a maximum of scaled scores"
    assert window is None or window > 0, "a row sees itself"
    launch = launch_for(q, keys, max_context, max_rows, is_exact)
    count = 0 if launch.num_splits == 1 else num_rows * heads * launch.num_splits
    partials = torch.empty(count * (dim + 2), dtype=torch.float32, device=q.device)
    sums, peaks, totals = partials.split([count * dim, count, count])  # the first is aligned
    padded, group = triton.next_power_of_2(dim), heads // kv_heads
    looked_through = FEW if num_requests <= FEW else max(MANY, triton.next_power_of_2(num_requests))
    num_tiles = num_rows // (launch.block_m // group) + num_requests
    is_one_chunk = launch.num_splits <= launch.together
    chunk = launch.num_splits if is_one_chunk else launch.together
    is_added = (
        launch.num_splits > 1
        and launch.by_last > 0
        and counters is not None
        and num_tiles * kv_heads <= len(counters)
    )
    of_last = (
        (launch.by_last, chunk, is_one_chunk) if is_added else (0, 0, False)
    )  # what is of no use makes no other kernel
    attend_split[(num_tiles, kv_heads, launch.num_splits)](
        q, keys, values, out, peaks, totals, sums,
        batch.starts, batch.prefix_lens, batch.slots, batch.positions, batch.block_tables, batch.masks,
        counters if is_added else None, scale * LOG2_E, num_requests, batch.block_tables.shape[1], batch.masks.shape[1],
        launch.num_splits, launch.near_size, launch.far_size,
        kv_heads, group, dim, padded, looked_through, launch.block_m, window or 0,
        launch.num_splits == 1, launch.num_loops, launch.is_short, launch.is_short and is_prefix_old,
        *of_last, launch.is_late, num_warps=launch.num_warps, num_stages=launch.num_stages, **LAUNCH,
    )  # fmt: skip
    if launch.num_splits > 1 and not is_added:
        num_sums, at_once = num_rows * heads, launch.at_once
        add_splits[(triton.cdiv(num_sums, at_once),)](
            peaks, totals, sums, out, num_sums, launch.num_splits,
            dim, padded, at_once, chunk, is_one_chunk, num_warps=at_once, **LAUNCH,
        )  # fmt: skip
