"""Which experts a row wakes, and rows grouped by expert, without the host: one kernel.

Each row chooses for itself and takes a place among the rows of its experts; the last to arrive cuts these
into tiles. What its expert of rank r says of row t of T is row r * T + t of the result: it lies in the order
of the row's own choice, as parts of a product do. Invariant: experts and shares depend on the row alone, of
equal scores the first expert's wins; places depend on time, and bits do not depend on places. A row that is
no number wakes as many experts as any other: no place is beyond the end of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.linear import Grouped
from paceline.cuda.rows import LAUNCH, added_up, let_next_start, wait_for_previous
from paceline.models.config import ExpertsConfig

TINY = tl.constexpr(1e-20)  # shares that are all zero are divided by this
LOWEST = tl.constexpr(-1e38)  # below any score; what is no number counts as this


@triton.jit
def _best(choice: tensor, e: tensor) -> tensor:
    """choice and e [E] -> the highest, and its first place."""
    highest = tl.max(choice, 0)
    return highest, tl.min(tl.where(choice == highest, e, 2**30), 0)


@triton.jit
def _among_groups(choice: tensor, e: tensor, SIZE: constexpr, GROUPS: constexpr, TOP: constexpr) -> tensor:
    """choice [E] without the experts of all but the best groups; a group is as good as its best two."""
    bests: tl.tuple = ()
    own, better, group = tl.zeros_like(choice), tl.zeros_like(e), e // SIZE
    for i in tl.static_range(GROUPS):
        inside = tl.where(group == i, choice, float("-inf"))
        total, at = _best(inside, e)
        if SIZE > 1:
            total += tl.max(tl.where(e == at, float("-inf"), inside), 0)
        own = tl.where(group == i, total, own)
        bests += (total,)
    for i in tl.static_range(GROUPS):
        better += ((bests[i] > own) | ((bests[i] == own) & (i < group))).to(tl.int32)
    return tl.where(better < TOP, choice, float("-inf"))


@triton.jit
def _cut(
    counts: tensor, woken: tensor, tiles: tensor, num_rows: tensor, most: tensor, COUNT: constexpr,
    SHARED: constexpr, BLOCK_T: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Tiles of all experts, those of one after the other; counts are zero afterwards."""
    e = tl.arange(0, BLOCK)
    count = tl.where(e < COUNT, tl.atomic_xchg(counts + e, 0, mask=e < COUNT), 0)
    tl.store(woken, tl.sum((count > 0).to(tl.int32), 0))
    count = tl.where(e < COUNT, count, tl.where(e < COUNT + SHARED, num_rows, 0))
    num_tiles = (count + BLOCK_T - 1) // BLOCK_T
    first, total = tl.cumsum(num_tiles, 0) - num_tiles, tl.sum(num_tiles, 0)
    for i in tl.range(0, tl.max(num_tiles, 0)):
        at, is_tile = tiles + 3 * (first + i), i < num_tiles
        tl.store(at, e, mask=is_tile)
        tl.store(at + 1, e * num_rows + i * BLOCK_T, mask=is_tile)
        tl.store(at + 2, tl.minimum(count - i * BLOCK_T, BLOCK_T), mask=is_tile)
    for start in tl.range(total, most, BLOCK):
        tl.store(tiles + 3 * (start + e) + 2, 0, mask=start + e < most)


@triton.jit
def _put(tiles: tensor, order: tensor, at: tensor, expert: tensor, mask: tensor) -> None:
    """Tile `at` is of this expert and has row `at` of the result alone."""
    tl.store(tiles + 3 * at, expert, mask=mask)
    tl.store(tiles + 3 * at + 1, at, mask=mask)
    tl.store(tiles + 3 * at + 2, 1, mask=mask)
    tl.store(order + at, at, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "most"])
def choose(
    logits: tensor, correction: tensor, scales: tensor, counts: tensor, woken: tensor, tiles: tensor,
    order: tensor, shares: tensor, num_rows: tensor, most: tensor, scale: tensor, COUNT: constexpr,
    PER_TOKEN: constexpr, GROUPS: constexpr, TOP_GROUPS: constexpr, SHARED: constexpr, HAS_GATE: constexpr,
    NORMALIZES: constexpr, SPLITS: constexpr, BLOCK_T: constexpr, BLOCK: constexpr, IS_ALONE: constexpr,
) -> None:  # fmt: skip
    """logits [SPLITS, T, COUNT, or one more: of the shared experts' gate] -> one row's."""
    let_next_start()
    row, e = tl.program_id(0), tl.arange(0, BLOCK)
    is_expert, WIDTH = e < COUNT, COUNT + HAS_GATE
    wait_for_previous()
    line, step = logits + row * WIDTH, num_rows * WIDTH
    scores = tl.where(is_expert, added_up(line + e, step, is_expert, SPLITS, tl.float32), float("-inf"))
    if correction is None:
        choice, scores = scores, tl.exp(scores - tl.max(scores, 0))
        scores /= tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-scores))
        choice = scores + tl.load(correction + e, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, tl.where(choice > LOWEST, choice, LOWEST), float("-inf"))
    if TOP_GROUPS < GROUPS:
        choice = _among_groups(choice, e, COUNT // GROUPS, GROUPS, TOP_GROUPS)
    ranks = tl.full((BLOCK,), -1, tl.int32)
    for rank in tl.range(PER_TOKEN):
        _, at = _best(choice, e)
        ranks, choice = tl.where(e == at, rank, ranks), tl.where(e == at, float("-inf"), choice)
    is_chosen, to = ranks >= 0, ranks * num_rows + row
    if NORMALIZES:
        scores /= tl.sum(tl.where(is_chosen, scores, 0.0), 0) + TINY
    if scales is not None:
        scores *= tl.load(scales + e, mask=is_expert, other=0.0)
    tl.store(shares + to, scores * scale, mask=is_chosen)
    if IS_ALONE:  # each of its experts has one tile, of one row: no program waits for another
        _put(tiles, order, ranks, e, is_chosen)
        tl.store(woken, PER_TOKEN)
    else:
        place = tl.atomic_add(counts + e, 1, mask=is_chosen)
        tl.store(order + e * num_rows + place, to, mask=is_chosen)
    if SHARED > 0:
        share = tl.sum(tl.full((1,), 1.0, tl.float32), 0)
        if HAS_GATE:
            share = 1.0 / (1.0 + tl.exp(-added_up(line + COUNT, step, row >= 0, SPLITS, tl.float32)))
        for i in tl.static_range(SHARED):
            to = (PER_TOKEN + i) * num_rows + row
            tl.store(shares + to, share)
            if IS_ALONE:
                _put(tiles, order, to, COUNT + i, row >= 0)
            else:
                tl.store(order + (COUNT + i) * num_rows + row, to)
    if not IS_ALONE:
        tl.debug_barrier()
        if tl.atomic_add(counts + COUNT, 1, sem="acq_rel", scope="gpu") == num_rows - 1:
            _cut(counts, woken, tiles, num_rows, most, COUNT, SHARED, BLOCK_T, BLOCK)
            tl.store(counts + COUNT, 0)


def num_tiles(num_rows: int, num_experts: int, block_t: int) -> int:
    """At most, of rows of the result: each woken expert may have one that is not full."""
    return min(num_rows, (num_rows + min(num_experts, num_rows) * (block_t - 1)) // block_t)


def route(
    logits: Tensor,  # [parts, T, count, or one more: of the shared experts' gate] float32
    correction: Tensor | None,  # [count] float32: a router with sigmoids has it
    scales: Tensor | None,  # [count] float32: of each expert's shares
    counts: Tensor,  # [count + 1] int32: zeros, before and after
    config: ExpertsConfig,
    num_shared: int,  # experts that every row wakes
    block_t: int,
    woken: Tensor,  # [1] int32: overwritten with the number of experts that were chosen
) -> Grouped:
    parts, num_rows, width = logits.shape
    total, count = config.count + num_shared, num_rows * (config.per_token + num_shared)
    most, block = num_tiles(count, total, block_t), triton.next_power_of_2(total)
    tiles, order = (
        torch.empty(shape, dtype=torch.int32, device=logits.device) for shape in ((most, 3), total * num_rows)
    )
    shares = torch.empty(count, device=logits.device)
    choose[num_rows,](
        logits, correction, scales, counts, woken, tiles, order, shares, num_rows, most, config.scale,
        config.count, config.per_token, config.groups, config.top_groups, num_shared, width - config.count,
        config.normalizes, parts, block_t, block, num_rows == 1, num_warps=1 if block <= 256 else 4, **LAUNCH,
    )  # fmt: skip
    return Grouped(count, total, tiles, order, shares)
