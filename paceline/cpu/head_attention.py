"""Attention of drafting heads over sequences that each lie in one piece of memory.

Keys of sixteen positions lie together, [layer][kv head][block][dim][16], values [layer][kv head][block][16]
[dim]. Rows come in groups that see the first `seen` positions of their sequence (a block of DFlash; else a
group is one row) and then a row's other places: its ancestors in a tree and itself. A query is a head of a
row; queries of one KV head take their turns at a few positions while these are in the nearest cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from paceline.cpu.compile import piece, size_of, struct
from paceline.cpu.lanes import LANES, LOG2_E, Emitter, float_pointer, floats, instruction, int_pointer
from paceline.cpu.matmul import UNROLL, even_height, multiply_floats
from paceline.cpu.rows import fill
from paceline.cpu.sync import range_of
from paceline.cpu.tiles import LOWEST, weigh_lanes

BLOCK = LANES  # positions that lie together
TILE = 5  # queries worked on side by side: their sums take 20 of 32 registers
TOGETHER = 16  # queries that take turns
AHEAD = 64  # positions between values that are read and those that are asked for
CHUNK = AHEAD // BLOCK  # blocks of values that queries take turns at: 16 KB where heads are 64 wide


class Rows(NamedTuple):
    """The rows of one pass."""

    num: int
    tokens: int  # address of [num] int64
    table: int  # address of [num] PlacedRow
    others: int  # [num, most_others]: places seen beside the first `seen`
    most_others: int


class PlacedRow(NamedTuple):
    keys: int  # where its sequence lies
    values: int
    room: int  # how many blocks its sequence has room for
    place: int  # in its sequence: where its own keys and values go
    position: int
    seen: int
    num_others: int


row_at, ROW_SIZE = struct(PlacedRow), size_of(PlacedRow)


@piece
def row_of(r, i):  # type: ignore[no-untyped-def]
    return row_at(r.table + i * ROW_SIZE * 8)


@instruction(most=TILE, operands=6)
def score_block(emit: Emitter, count: int, *operands: Any) -> None:
    """out[h, :16] = q[h] · keys[:, p] for the sixteen positions of a block. operands: q's stride, keys, q,
    dim, out, its stride."""
    q_stride, *rest = operands
    multiply_floats(emit, [emit.constant(0.0, LANES)] * count, lambda h: emit.times(q_stride, h), *rest)


@instruction(most=TILE, operands=7)
def mix_values(emit: Emitter, count: int, *operands: Any) -> None:
    """out[h, :16] += sum over 4 * turns positions of weights[h, p] * values[p, :16]. Rows of values are
    `row_bytes` apart, those of out `to`. Lines that lie so far apart no processor foresees: each turn asks
    for those needed AHEAD positions on."""
    weights, stride, values, row_bytes, turns, out, to = operands
    targets = [emit.offset(out, emit.times(to, h)) for h in range(count)]
    sums = [emit.variable(emit.load(target, floats(LANES))) for target in targets]
    with emit.loop(turns) as turn:
        first = emit.offset(weights, emit.times(turn, 4 * UNROLL))
        here = emit.offset(values, emit.times(emit.times(turn, UNROLL), row_bytes))
        fours = [emit.load(emit.offset(first, emit.times(stride, h)), floats(UNROLL)) for h in range(count)]
        for k in range(UNROLL):
            emit.prefetch(emit.offset(here, emit.times(row_bytes, AHEAD + k)))
            value = emit.load(emit.offset(here, emit.times(row_bytes, k)), floats(LANES))
            for total, four in zip(sums, fours, strict=True):
                emit.accumulate(total, emit.splat(four, k, LANES), value)
    for total, target in zip(sums, targets, strict=True):
        emit.store(emit.builder.load(total), target)


@piece
def first_block(m, i, room, head):  # type: ignore[no-untyped-def]
    """Where the blocks of a KV head of layer i begin, in bytes."""
    return (i * m.num_kv_heads + head) * room * m.dim * BLOCK * 4


@piece
def write_key(m, i, row, head, source):  # type: ignore[no-untyped-def]
    """A row's key of layer i into its column."""
    at = row.keys + first_block(m, i, row.room, head) + row.place // BLOCK * m.dim * BLOCK * 4
    to, key = carray(float_pointer(at), m.dim * BLOCK), carray(float_pointer(source), m.dim)
    for d in range(m.dim):
        to[d * BLOCK + row.place % BLOCK] = key[d]


class Group(NamedTuple):
    """Queries of one KV head and what they see. Query number n is head n // size of row n % size."""

    first: int
    end: int
    size: int  # rows
    q: int  # address of the first row's first head, and
    q_stride: int  # bytes between rows
    out: int
    out_stride: int
    keys: int  # address of this KV head's blocks
    values: int
    seen: int
    others: int  # address of further places, where a group is one row
    num_others: int


@piece
def _height(g, n):  # type: ignore[no-untyped-def]
    """Queries of the tile that begins with n: rows of one head or heads of one row, in even tiles."""
    return even_height(min(g.size - n % g.size, g.end - n) if g.size > 1 else g.end - n, TILE)


@piece
def _weigh(m, g, n, at, longest):  # type: ignore[no-untyped-def]
    """Scores of query n, with those of its other places after whole blocks, become weights of sum one."""
    blocks, dim = (g.seen + BLOCK - 1) // BLOCK, m.dim
    turns = blocks + (g.num_others + LANES - 1) // LANES
    mine, others = carray(float_pointer(at), longest), carray(int_pointer(g.others), g.num_others)
    mine[g.seen : turns * LANES] = np.float32(LOWEST)
    query = carray(float_pointer(g.q + n % g.size * g.q_stride + n // g.size * dim * 4), dim)
    for j in range(g.num_others):
        column = carray(float_pointer(g.keys + others[j] // BLOCK * dim * BLOCK * 4), dim * BLOCK)
        total = np.float32(0)
        for d in range(dim):
            total += query[d] * column[d * BLOCK + others[j] % BLOCK]
        mine[blocks * BLOCK + j] = total
    weigh_lanes(at, turns, np.float32(m.scale * LOG2_E), at + (longest - 1) * 4)
    shrink = np.float32(1) / mine[longest - 1]
    for p in range(turns * LANES):
        mine[p] *= shrink


@piece
def _attend_group(m, g, scores, longest):  # type: ignore[no-untyped-def]
    blocks, block_bytes, head_bytes = (g.seen + BLOCK - 1) // BLOCK, m.dim * BLOCK * 4, m.dim * 4
    q_stride = g.q_stride if g.size > 1 else head_bytes
    out_stride = g.out_stride if g.size > 1 else head_bytes
    for b in range(blocks):
        n = g.first
        while n < g.end:
            height, q = _height(g, n), g.q + n % g.size * g.q_stride + n // g.size * head_bytes
            to = scores + ((n - g.first) * longest + b * BLOCK) * 4
            score_block(height, q_stride, g.keys + b * block_bytes, q, m.dim, to, longest * 4)
            n += height
    for n in range(g.first, g.end):
        _weigh(m, g, n, scores + (n - g.first) * longest * 4, longest)
        fill(g.out + n % g.size * g.out_stride + n // g.size * head_bytes, 0, m.dim)
    for b in range(0, blocks, CHUNK):
        turns = min(CHUNK, blocks - b) * BLOCK // UNROLL
        for d in range(0, head_bytes, LANES * 4):
            n, value = g.first, g.values + b * block_bytes + d
            while n < g.end:
                height, to = _height(g, n), g.out + n % g.size * g.out_stride + n // g.size * head_bytes + d
                weights = scores + ((n - g.first) * longest + b * BLOCK) * 4
                mix_values(height, weights, longest * 4, value, head_bytes, turns, to, out_stride)
                n += height
    others = carray(int_pointer(g.others), g.num_others)
    for n in range(g.first, g.end if g.num_others else g.first):
        out = carray(float_pointer(g.out + n % g.size * g.out_stride + n // g.size * head_bytes), m.dim)
        weights = scores + ((n - g.first) * longest + blocks * BLOCK) * 4
        for j in range(g.num_others):
            weight = carray(float_pointer(weights), g.num_others)[j]
            value = carray(float_pointer(g.values + others[j] * head_bytes), m.dim)
            for d in range(m.dim):
                out[d] += weight * value[d]


@piece
def attend_rows(share, r, size, m, layer, i, w):  # type: ignore[no-untyped-def]
    """Attention of all rows, in groups of `size`, into `ready`. A thread has a run of all queries, KV head by
    KV head, which most groups share."""
    groups, together = r.num // size, m.num_heads // m.num_kv_heads * size
    at, last = range_of(share, m.num_kv_heads * groups * together)
    while at < last:
        kv_head, row, n = at // (groups * together), at // together % groups * size, at % together
        end, first, one = min(n + last - at, together, n + TOGETHER), kv_head * together, row_of(r, row)
        skip, others = first_block(m, i, one.room, kv_head), r.others + row * r.most_others * 8
        q, out = w.wide + row * layer.qkv.n * 4, w.ready + row * w.widest * 4
        seen = one.keys + skip, one.values + skip, one.seen, others, one.num_others if size == 1 else 0
        group = Group(first + n, first + end, size, q, layer.qkv.n * 4, out, w.widest * 4, *seen)
        _attend_group(m, group, w.scores + share.part * TOGETHER * w.longest * 4, w.longest)
        at += end - n
