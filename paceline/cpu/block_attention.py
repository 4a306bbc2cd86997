"""Attention of blocks: the rows of a block all see the same positions, so keys and values are read once for
many queries.

A query is a head of a row. A thread has a run of all queries, head after head and in each row after row;
those of one KV head take their turns at a few positions while these are in the nearest cache. Sequences lie
in memory as head_attention.py says.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from paceline.cpu.compile import piece
from paceline.cpu.head_attention import (
    AHEAD,
    BLOCK,
    LOWEST,
    UNROLL,
    first_block,
    largest_lanes,
    mix_values,
    score_block,
    sum_exponentials,
)
from paceline.cpu.lanes import LANES, float_pointer, int_pointer
from paceline.cpu.rows import fill

TILE = 5  # rows whose queries are worked on side by side: their sums take 20 of 32 registers
SHARED = 16  # queries that take turns
CHUNK = (
    AHEAD // BLOCK
)  # blocks of values that they take turns at, asking for the next: 16 KB where heads are 64 wide


@piece
def _height(unit, end, size):  # type: ignore[no-untyped-def]
    """Rows of the tile that begins with this query: of one head, and nearly as many as those of the other
    tiles.
    """
    left = min(size - unit % size, end - unit)
    tiles = (left + TILE - 1) // TILE
    return (left + tiles - 1) // tiles


@piece
def _score(height, q, q_stride, keys, dim, out, stride):  # type: ignore[no-untyped-def]
    if height == 1:
        score_block(1, q, q_stride, keys, dim, out, stride)
    elif height == 2:
        score_block(2, q, q_stride, keys, dim, out, stride)
    elif height == 3:
        score_block(3, q, q_stride, keys, dim, out, stride)
    elif height == 4:
        score_block(4, q, q_stride, keys, dim, out, stride)
    else:
        score_block(5, q, q_stride, keys, dim, out, stride)


@piece
def _mix(height, weights, stride, values, row_bytes, turns, out, out_stride):  # type: ignore[no-untyped-def]
    if height == 1:
        mix_values(1, weights, stride, values, row_bytes, turns, out, out_stride)
    elif height == 2:
        mix_values(2, weights, stride, values, row_bytes, turns, out, out_stride)
    elif height == 3:
        mix_values(3, weights, stride, values, row_bytes, turns, out, out_stride)
    elif height == 4:
        mix_values(4, weights, stride, values, row_bytes, turns, out, out_stride)
    else:
        mix_values(5, weights, stride, values, row_bytes, turns, out, out_stride)


@piece
def _weigh(s, scores, longest, queries, seen):  # type: ignore[no-untyped-def]
    """Scores become weights, which sum up to one."""
    turns = (seen + BLOCK - 1) // BLOCK
    for i in range(queries):
        at = scores + i * longest * 4
        mine = carray(float_pointer(at), longest)
        mine[seen : turns * LANES] = LOWEST
        shrink = np.float32(1) / sum_exponentials(1, at, turns, np.float32(s.scale), largest_lanes(at, turns))
        for p in range(turns * LANES):
            mine[p] *= shrink


@piece
def _attend_some(s, size, stride, q, keys, values, seen, first, end, w, scores, out):  # type: ignore[no-untyped-def]
    """Queries first to end of a request, all of one KV head. q, out: of the request's first row; stride:
    bytes between rows of q.
    """
    blocks, block_bytes, row_bytes, out_stride = (
        (seen + BLOCK - 1) // BLOCK,
        s.dim * BLOCK * 4,
        s.dim * 4,
        w.widest * 4,
    )
    for b in range(blocks):
        unit = first
        while unit < end:
            height, row, column = _height(unit, end, size), unit % size, unit // size * row_bytes
            to = scores + ((unit - first) * w.longest + b * BLOCK) * 4
            _score(
                height, q + row * stride + column, stride, keys + b * block_bytes, s.dim, to, w.longest * 4
            )
            unit += height
    _weigh(s, scores, w.longest, end - first, seen)
    for unit in range(first, end):
        fill(out + unit % size * out_stride + unit // size * row_bytes, 0, s.dim)
    for b in range(0, blocks, CHUNK):
        turns = min(CHUNK, blocks - b) * BLOCK // UNROLL
        for d in range(0, row_bytes, LANES * 4):
            unit = first
            while unit < end:
                height, to = (
                    _height(unit, end, size),
                    out + unit % size * out_stride + unit // size * row_bytes + d,
                )
                weights = scores + ((unit - first) * w.longest + b * BLOCK) * 4
                _mix(
                    height,
                    weights,
                    w.longest * 4,
                    values + b * block_bytes + d,
                    row_bytes,
                    turns,
                    to,
                    out_stride,
                )
                unit += height


@piece
def attend_blocks(part, b, r, s, layer, i, w):  # type: ignore[no-untyped-def]
    """Attention of all rows into `ready`."""
    keys, values, rooms = (
        carray(int_pointer(r.keys), r.num),
        carray(int_pointer(r.values), r.num),
        carray(int_pointer(r.rooms), r.num),
    )
    seen, units, stride = carray(int_pointer(r.seen), r.num), s.num_heads * b.size, layer.qkv.n * 4
    together, scores = s.num_heads // s.num_kv_heads * b.size, w.scores + part * SHARED * w.longest * 4
    at, last = b.num * units * part // s.threads, b.num * units * (part + 1) // s.threads
    while at < last:
        row, first = at // units * b.size, at % units
        kv_head = first // together
        end = min(first + last - at, (kv_head + 1) * together, first + SHARED)
        skip, q, out = (
            first_block(s, i, rooms[row], kv_head),
            w.wide + row * stride,
            w.ready + row * w.widest * 4,
        )
        _attend_some(
            s, b.size, stride, q, keys[row] + skip, values[row] + skip, seen[row], first, end, w, scores, out
        )
        at += end - first
