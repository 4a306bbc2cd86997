"""Rows of this pass straight from the product that computes them, inside attention: what `place` (cuda/rows.py) does by itself.

Invariant: queries, keys and values have the bits that `place` gives them. A program writes the keys it needs, so where the tiles of a
request are several, several programs write the same bits to the same slots, and each reads what it has written itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.overlap import wait_for_previous
from paceline.cuda.rows import added_up, turned


@triton.jit
def turned_queries(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, part_step: tl.tensor,
    row: tl.tensor, head: tl.tensor, is_row: tl.tensor,
    WIDTH: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """-> [M, D] of rows and heads [M]; all but the product's results is loaded before the product has ended."""
    HALF: tl.constexpr = DIM // 2
    at, mask = tl.arange(0, HALF)[None, :], is_row[:, None]
    position = tl.load(positions + row, mask=is_row, other=0).to(tl.int64)[:, None]
    its_cos = tl.load(cos + position * HALF + at, mask=mask, other=0.0)
    its_sin = tl.load(sin + position * HALF + at, mask=mask, other=0.0)
    wait_for_previous()
    source = qkv + row.to(tl.int64)[:, None] * WIDTH + head[:, None] * DIM + at
    left = added_up(source, part_step, mask, PARTS, DTYPE)  # [M, D / 2]
    right = added_up(source + HALF, part_step, mask, PARTS, DTYPE)
    left, right = turned(left, right, its_cos, its_sin)
    both = tl.permute(tl.join(left.to(DTYPE), right.to(DTYPE)), (0, 2, 1))  # [M, 2, D / 2]
    return tl.reshape(both, (row.shape[0], DIM))


@triton.jit
def place_fresh(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, slots: tl.tensor, part_step: tl.tensor,
    keys: tl.tensor, values: tl.tensor, first: tl.tensor, end: tl.tensor, kv_head: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Write the keys and values of rows `first` to `end`, FRESH at a time; when it returns, all threads of the program see them."""
    HALF: tl.constexpr = DIM // 2
    WIDTH: tl.constexpr = (GROUP + 2) * KV_HEADS * DIM
    at = tl.arange(0, HALF)[None, :]
    for turn in tl.range(0, tl.cdiv(end - first, FRESH)):
        row = (first + turn * FRESH + tl.arange(0, FRESH))[:, None]
        mask = (row < end) & (at < HALF)
        position = tl.load(positions + row, mask=row < end, other=0).to(tl.int64)
        slot = tl.load(slots + row, mask=row < end, other=0).to(tl.int64)
        its_cos = tl.load(cos + position * HALF + at, mask=mask, other=0.0)
        its_sin = tl.load(sin + position * HALF + at, mask=mask, other=0.0)
        wait_for_previous()
        source = qkv + row.to(tl.int64) * WIDTH + (KV_HEADS * GROUP + kv_head) * DIM + at
        left, right = added_up(source, part_step, mask, PARTS, DTYPE), added_up(source + HALF, part_step, mask, PARTS, DTYPE)
        source += KV_HEADS * DIM
        value, other_value = added_up(source, part_step, mask, PARTS, DTYPE), added_up(source + HALF, part_step, mask, PARTS, DTYPE)
        left, right = turned(left, right, its_cos, its_sin)
        line = (slot * KV_HEADS + kv_head) * DIM + at
        tl.store(keys + line, left.to(DTYPE), mask=mask)
        tl.store(keys + line + HALF, right.to(DTYPE), mask=mask)
        tl.store(values + line, value.to(DTYPE), mask=mask)
        tl.store(values + line + HALF, other_value.to(DTYPE), mask=mask)
    tl.debug_barrier()
