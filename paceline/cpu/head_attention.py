"""Attention of drafting heads over sequences that each lie in one piece of memory.

Keys of sixteen positions lie together, [layer][kv head][block][dim][16], values [layer][kv
head][block][16][dim]: a row's scores are sixteen chains side by side. A row sees the first `seen` positions
of its sequence and then the places listed for it (its ancestors in a tree, itself).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from paceline.cpu.compile import piece, unrolled
from paceline.cpu.lanes import FLOAT, LANES, LOG2_E, Emitter, float_pointer, floats, int_pointer
from paceline.cpu.rows import fill
from paceline.cpu.tiles import LEAST, power_of_two

BLOCK = LANES  # positions that lie together
SIDE_BY_SIDE = 4  # query heads of one KV head scored at once
UNROLL = 4
AHEAD = 64  # positions between values that are read and those that are asked for
LOWEST = np.float32(-3e38)


@intrinsic(prefer_literal=True)
def score_block(
    _context: Any, heads: Any, q: Any, q_stride: Any, keys: Any, dim: Any, out: Any, stride: Any
) -> Any:
    """out[h, :16] = q[h] · keys[:, p] for the sixteen positions of a block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q, q_stride, keys, dim, out, stride = arguments[1:]
        emit, count = Emitter(builder), heads.literal_value
        sums = [emit.variable(emit.zeros(LANES)) for _ in range(count)]
        with emit.loop(builder.sdiv(dim, emit.const(UNROLL))) as step:
            rows = [
                emit.offset(q, emit.times(q_stride, h), emit.times(step, 4 * UNROLL)) for h in range(count)
            ]
            fours = [emit.load(row, floats(UNROLL)) for row in rows]
            for k in range(UNROLL):
                key = emit.load(
                    emit.offset(keys, emit.times(step, 4 * LANES * UNROLL), 4 * LANES * k), floats(LANES)
                )
                for total, four in zip(sums, fours, strict=True):
                    emit.accumulate(total, key, emit.splat(four, k, LANES))
        for h, total in enumerate(sums):
            emit.store(builder.load(total), emit.offset(out, emit.times(stride, h)))
        return context.get_dummy_value()

    return types.void(heads, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def mix_values(
    _context: Any,
    heads: Any,
    weights: Any,
    stride: Any,
    values: Any,
    row_bytes: Any,
    turns: Any,
    out: Any,
    to: Any,
) -> Any:
    """out[h, :16] += sum over 4 * turns positions of weights[h, p] * values[p, :16]. Rows of values are
    `row_bytes` apart, those of out `to`. Lines that lie so far apart no processor foresees: each turn asks
    for those needed AHEAD positions on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, stride, values, row_bytes, turns, out, to = arguments[1:]
        emit, count = Emitter(builder), heads.literal_value
        targets = [emit.offset(out, emit.times(to, h)) for h in range(count)]
        sums = [emit.variable(emit.load(target, floats(LANES))) for target in targets]
        with emit.loop(turns) as turn:
            first, here = (
                emit.times(turn, 4 * UNROLL),
                emit.offset(values, emit.times(emit.times(turn, UNROLL), row_bytes)),
            )
            fours = [
                emit.load(emit.offset(weights, emit.times(stride, h), first), floats(UNROLL))
                for h in range(count)
            ]
            for k in range(UNROLL):
                emit.prefetch(emit.offset(here, emit.times(row_bytes, AHEAD + k)))
                value = emit.load(emit.offset(here, emit.times(row_bytes, k)), floats(LANES))
                for total, four in zip(sums, fours, strict=True):
                    emit.accumulate(total, emit.splat(four, k, LANES), value)
        for total, target in zip(sums, targets, strict=True):
            emit.store(builder.load(total), target)
        return context.get_dummy_value()

    return types.void(heads, *[types.int64] * 7), generate


@intrinsic
def largest_lanes(_context: Any, at: Any, turns: Any) -> Any:
    """The largest of 16 * turns floats; what is not a number is passed over."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        at, turns = arguments
        emit, kind = Emitter(builder), floats(LANES)
        top = emit.variable(emit.constant(float(LOWEST), LANES))
        with emit.loop(turns) as step:
            value = emit.load(emit.offset(at, emit.times(step, 4 * LANES)), kind)
            builder.store(emit.call(f"llvm.maxnum.v{LANES}f32", kind, [value, builder.load(top)]), top)
        return emit.largest(builder.load(top))

    return types.float32(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def sum_exponentials(_context: Any, is_kept: Any, at: Any, turns: Any, scale: Any, top: Any) -> Any:
    """The sum of exp(scale * (x - top)) over 16 * turns floats, none above the top; `is_kept` (a compile-time
    constant): each takes the place of its x."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        at, turns, scale, top = arguments[1:]
        emit, kind = Emitter(builder), floats(LANES)
        factor = emit.broadcast(builder.fmul(scale, ir.Constant(FLOAT, LOG2_E)), LANES)
        largest, least, total = (
            emit.broadcast(top, LANES),
            emit.constant(LEAST, LANES),
            emit.variable(emit.zeros(LANES)),
        )
        with emit.loop(turns) as step:
            here = emit.offset(at, emit.times(step, 4 * LANES))
            below = builder.fmul(builder.fsub(emit.load(here, kind), largest), factor)
            value = power_of_two(emit, emit.call(f"llvm.maxnum.v{LANES}f32", kind, [below, least]))
            if is_kept.literal_value:
                emit.store(value, here)
            builder.store(builder.fadd(builder.load(total), value), total)
        return emit.total(builder.load(total))

    return types.float32(is_kept, types.int64, types.int64, types.float32, types.float32), generate


@piece
def first_block(s, i, room, head):  # type: ignore[no-untyped-def]
    """Where the blocks of a KV head of layer i begin, in bytes."""
    return (i * s.num_kv_heads + head) * room * s.dim * BLOCK * 4


@piece
def write_key(s, i, keys, room, place, head, source):  # type: ignore[no-untyped-def]
    """A key of layer i into its column."""
    at = first_block(s, i, room, head) + place // BLOCK * s.dim * BLOCK * 4
    to, key = carray(float_pointer(keys + at), s.dim * BLOCK), carray(float_pointer(source), s.dim)
    for d in range(s.dim):
        to[d * BLOCK + place % BLOCK] = key[d]


@piece
def value_at(s, i, values, room, place, head):  # type: ignore[no-untyped-def]
    return values + first_block(s, i, room, head) + place * s.dim * 4


@unrolled
def _attend_some(heads, s, q, keys, values, seen, others, scores, longest, out):  # type: ignore[no-untyped-def]
    """`heads` query heads (a compile-time constant) of one KV head, whose blocks begin at keys and values."""
    block_bytes, blocks, dim, stride = s.dim * BLOCK * 4, (seen + BLOCK - 1) // BLOCK, s.dim, longest * 4
    for b in range(blocks):
        score_block(heads, q, dim * 4, keys + b * block_bytes, dim, scores + b * BLOCK * 4, stride)
    turns = blocks + (len(others) + LANES - 1) // LANES
    for h in range(heads):
        mine, query = (
            carray(float_pointer(scores + h * stride), longest),
            carray(float_pointer(q + h * dim * 4), dim),
        )
        mine[seen : turns * LANES] = LOWEST
        for j in range(len(others)):
            at = keys + others[j] // BLOCK * block_bytes
            column, total = carray(float_pointer(at), dim * BLOCK), np.float32(0)
            for d in range(dim):
                total += query[d] * column[d * BLOCK + others[j] % BLOCK]
            mine[blocks * BLOCK + j] = total
        at = scores + h * stride
        mine[longest - 1] = sum_exponentials(1, at, turns, np.float32(s.scale), largest_lanes(at, turns))
    fill(out, 0, heads * dim)
    for d in range(0, dim, LANES):
        mix_values(
            heads, scores, stride, values + d * 4, dim * 4, blocks * BLOCK // UNROLL, out + d * 4, dim * 4
        )
    for h in range(heads):
        mine, to = (
            carray(float_pointer(scores + h * stride), longest),
            carray(float_pointer(out + h * dim * 4), dim),
        )
        shrink = np.float32(1) / mine[longest - 1]
        for j in range(len(others)):
            value = carray(
                float_pointer(values + others[j] // BLOCK * block_bytes + others[j] % BLOCK * dim * 4), dim
            )
            for d in range(dim):
                to[d] += mine[blocks * BLOCK + j] * value[d]
        for d in range(dim):
            to[d] *= shrink


@piece
def attend_rows(part, r, s, layer, i, w):  # type: ignore[no-untyped-def]
    """Attention of all rows into `ready`. A thread takes rows of one KV head after the other, which they
    mostly share.
    """
    keys, values = carray(int_pointer(r.keys), r.num), carray(int_pointer(r.values), r.num)
    seen, counts = carray(int_pointer(r.seen), r.num), carray(int_pointer(r.num_others), r.num)
    rooms, items = carray(int_pointer(r.rooms), r.num), r.num * s.num_kv_heads
    group, scores = s.num_heads // s.num_kv_heads, w.scores + part * SIDE_BY_SIDE * w.longest * 4
    for item in range(items * part // s.threads, items * (part + 1) // s.threads):
        kv_head, row = item // r.num, item % r.num
        others = carray(int_pointer(r.others + row * r.most_others * 8), counts[row])
        skip = first_block(s, i, rooms[row], kv_head)
        k, v, head = keys[row] + skip, values[row] + skip, 0
        while head < group:
            parts = (group - head + SIDE_BY_SIDE - 1) // SIDE_BY_SIDE
            heads, first = (group - head + parts - 1) // parts, kv_head * group + head
            q, out = (
                w.wide + (row * layer.qkv.n + first * s.dim) * 4,
                w.ready + (row * w.widest + first * s.dim) * 4,
            )
            if heads == 1:
                _attend_some(1, s, q, k, v, seen[row], others, scores, w.longest, out)
            elif heads == 2:
                _attend_some(2, s, q, k, v, seen[row], others, scores, w.longest, out)
            elif heads == 3:
                _attend_some(3, s, q, k, v, seen[row], others, scores, w.longest, out)
            else:
                _attend_some(4, s, q, k, v, seen[row], others, scores, w.longest, out)
            head += heads
