"""Attention over a paged KV cache under token trees, flash-style: one pass over the context, a running maximum, no score matrix.

A row sees its request's cached prefix, its ancestors in this pass and itself, in position order, whatever else is in the pass.
Invariant: the context is cut into chunks of CHUNK positions at fixed places; the chunk of a (row, head) is a fixed chain of
operations, and chunks are merged in order. So the bits depend on the context alone: which thread did which chunk, and whether a
chunk waited in memory to be merged, changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from paceline.cpu.compile import piece, unrolled
from paceline.cpu.lanes import INT64, LANES, Emitter, address, float_pointer, floats, int_pointer

WIDTH = 4  # lanes of a dot product
SPAN = 4  # positions scored side by side, at most WIDTH
AHEAD = 8  # positions between the keys scored and those asked for
CHUNK = 64  # positions: keys and values of a head in a chunk fit the first-level cache
LOWEST = np.float32(-3e38)  # its exponential is 1e-38, which a sum with a 1 in it does not notice
MAX_HEADS = 3  # query heads of one KV head side by side: that makes 12 chains, enough to hide the latency of a multiply-add
EXTRA = 2  # floats beside the weighted sum of a chunk: its maximum and the sum of its weights


def _rows_at(emit: Emitter, cache: Any, slots: Any, slot_bytes: Any, first: int, last: Any) -> list[Any]:
    """Where SPAN consecutive positions lie in a cache; those after `last` are taken to be it."""
    builder = emit.builder
    inside = [builder.select(builder.icmp_signed("<", emit.const(first + p), last), emit.const(first + p), last) for p in range(SPAN)]
    return [emit.offset(cache, emit.times(emit.load(emit.offset(slots, emit.times(p, 8)), INT64), slot_bytes)) for p in inside]


@intrinsic(prefer_literal=True)
def score_tile(
    _context: Any, heads: Any, is_new: Any, q: Any, keys: Any, values: Any, slots: Any, slot_bytes: Any, last: Any, dim: Any, out: Any,
    out_stride: Any,
) -> Any:  # fmt: skip
    """out[h, p] = q[h] · keys[slots[p]] for SPAN positions; those after `last` repeat it (the caller overwrites or ignores them).

    Rows of a cache lie apart, which no processor foresees, so where they are read for the first time (`is_new`, a compile-time
    constant), each turn asks for lines of keys needed soon, and of values.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q, keys, values, slots, slot_bytes, last, dim, out, out_stride = arguments[2:]
        emit, num_heads = Emitter(builder), heads.literal_value
        rows = _rows_at(emit, keys, slots, slot_bytes, 0, last)
        soon = []
        if is_new.literal_value:
            soon = _rows_at(emit, keys, slots, slot_bytes, AHEAD, last) + _rows_at(emit, values, slots, slot_bytes, 0, last)
        sums = [[emit.variable(emit.zeros(WIDTH)) for _ in rows] for _ in range(num_heads)]
        with emit.loop(builder.sdiv(dim, emit.const(LANES))) as turn:
            line = emit.times(turn, 4 * LANES)  # 64 bytes
            for row in soon:
                emit.prefetch(emit.offset(row, line))
            for step in range(0, 4 * LANES, 4 * WIDTH):
                queries = [emit.load(emit.offset(q, emit.times(dim, 4 * h), line, step), floats(WIDTH)) for h in range(num_heads)]
                for p, row in enumerate(rows):
                    key = emit.load(emit.offset(row, line, step), floats(WIDTH))
                    for h, query in enumerate(queries):
                        emit.accumulate(sums[h][p], query, key)
        for h, row_sums in enumerate(sums):
            emit.store(emit.totals([builder.load(total) for total in row_sums]), emit.offset(out, emit.times(out_stride, h)))
        return context.get_dummy_value()

    return types.void(heads, is_new, *[types.int64] * 9), generate


def _add_values(emit: Emitter, sums: list[Any], values: Any, slots: Any, slot_bytes: Any, weights: list[Any], lane: int) -> None:
    """sums[h] += weights[h][lane] * values of the position whose slot is at `slots`."""
    value = emit.load(emit.offset(values, emit.times(emit.load(slots, INT64), slot_bytes)), floats(LANES))
    for total, weight in zip(sums, weights, strict=True):
        emit.accumulate(total, emit.splat(weight, lane, LANES), value)


@intrinsic(prefer_literal=True)
def mix_tile(
    _context: Any, heads: Any, weights: Any, weight_stride: Any, values: Any, slots: Any, slot_bytes: Any, count: Any, out: Any, stride: Any
) -> Any:
    """out[h, :16] = sum over positions of weights[h, p] * values[slots[p], :16], in order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, weight_stride, values, slots, slot_bytes, count, out, stride = arguments[1:]
        emit = Emitter(builder)
        rows = [emit.offset(weights, emit.times(weight_stride, h)) for h in range(heads.literal_value)]
        sums = [emit.variable(emit.zeros(LANES)) for _ in rows]
        spans = builder.sdiv(count, emit.const(SPAN))
        with emit.loop(spans) as span:
            first = emit.times(span, 4 * SPAN)
            fours = [emit.load(emit.offset(row, first), floats(SPAN)) for row in rows]
            for p in range(SPAN):
                _add_values(emit, sums, values, emit.offset(slots, emit.times(span, 8 * SPAN), 8 * p), slot_bytes, fours, p)
        whole = emit.times(spans, SPAN)
        with emit.loop(builder.sub(count, whole)) as rest:
            p = builder.add(whole, rest)
            ones = [emit.load(emit.offset(row, emit.times(p, 4)), floats(1)) for row in rows]
            _add_values(emit, sums, values, emit.offset(slots, emit.times(p, 8)), slot_bytes, ones, 0)
        for h, total in enumerate(sums):
            emit.store(builder.load(total), emit.offset(out, emit.times(stride, h)))
        return context.get_dummy_value()

    return types.void(heads, *[types.int64] * 8), generate


@intrinsic
def weigh_lanes(_context: Any, scores: Any, turns: Any, scale: Any, maximum_at: Any) -> Any:
    """Scale the scores, then exp(score - maximum) in place over 16 * turns floats; stores the maximum, then the sum of the results."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, turns, scale, maximum_at = arguments
        emit, kind = Emitter(builder), floats(LANES)
        factor = emit.broadcast(scale, LANES)
        top, total = emit.variable(emit.constant(float(LOWEST), LANES)), emit.variable(emit.zeros(LANES))
        with emit.loop(turns) as turn:
            score = builder.fmul(emit.load(emit.offset(scores, emit.times(turn, 4 * LANES)), kind), factor)
            builder.store(emit.call(f"llvm.maxnum.v{LANES}f32", kind, [score, builder.load(top)]), top)
        maximum = emit.largest(builder.load(top))
        largest = emit.broadcast(maximum, LANES)
        with emit.loop(turns) as turn:
            here = emit.offset(scores, emit.times(turn, 4 * LANES))
            value = emit.exponential(builder.fsub(builder.fmul(emit.load(here, kind), factor), largest))
            emit.store(value, here)
            builder.store(builder.fadd(builder.load(total), value), total)
        emit.store(maximum, maximum_at)
        emit.store(emit.total(builder.load(total)), emit.offset(maximum_at, 4))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def exponential(_context: Any, x: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        lanes = emit.exponential(emit.broadcast(arguments[0], WIDTH))
        return builder.extract_element(lanes, emit.first)

    return types.float32(types.float32), generate


@piece
def trace_paths(b, paths_at):  # type: ignore[no-untyped-def]
    """paths[row, :depth]: slots of the row's ancestors in this pass, oldest first, then its own; paths[row, rows] is how many."""
    parents, slots = carray(int_pointer(b.parents), b.rows), carray(int_pointer(b.slots), b.rows)
    paths = carray(int_pointer(paths_at), (b.rows, b.rows + 1))
    for row in range(b.rows):
        parent, depth = parents[row], 0
        if parent >= 0:
            depth = paths[parent, b.rows]
            for i in range(depth):
                paths[row, i] = paths[parent, i]
        paths[row, depth] = slots[row]
        paths[row, b.rows] = depth + 1


@piece
def expand_tables(b, part, places_at):  # type: ignore[no-untyped-def]
    """places[request, position]: the slots of the cached prefixes. A thread takes every so many requests."""
    room = b.max_blocks * b.block_size
    lengths = carray(int_pointer(b.prefix_lens), b.num_requests)
    for request in range(part, b.num_requests, b.threads):
        table = carray(int_pointer(b.block_tables + request * b.max_blocks * 8), b.max_blocks)
        places = carray(int_pointer(places_at + request * room * 8), room)
        for position in range(lengths[request]):
            places[position] = table[position // b.block_size] * b.block_size + position % b.block_size


@piece
def _slots(b, places_at, paths_at, row, first, last, scratch):  # type: ignore[no-untyped-def]
    """Address of the slots of positions first to last of what `row` sees, put together in `scratch` if not all are cached."""
    request = carray(int_pointer(b.request_of), b.rows)[row]
    prefix = carray(int_pointer(b.prefix_lens), b.num_requests)[request]
    cached = places_at + (request * b.max_blocks * b.block_size + first) * 8
    if last <= prefix:
        return cached
    slots, places = carray(int_pointer(scratch), CHUNK), carray(int_pointer(cached), CHUNK)
    paths = carray(int_pointer(paths_at), (b.rows, b.rows + 1))
    for i in range(prefix - first):
        slots[i] = places[i]
    for position in range(max(first, prefix), last):
        slots[position - first] = paths[row, position - prefix]
    return scratch


@piece
def length_of(b, paths_at, row):  # type: ignore[no-untyped-def]
    """How many positions a row sees, itself included."""
    request = carray(int_pointer(b.request_of), b.rows)[row]
    paths = carray(int_pointer(paths_at), (b.rows, b.rows + 1))
    return carray(int_pointer(b.prefix_lens), b.num_requests)[request] + paths[row, b.rows]


@unrolled
def _some_heads(heads, is_new, q, keys, values, slot_bytes, where, count, scores, scale, dim, out, stride):  # type: ignore[no-untyped-def]
    """`heads` query heads (a compile-time constant) of one row over one chunk of one KV head: maximum, weight and weighted sum each."""
    at = address(scores)
    for p in range(0, count, SPAN):
        if is_new:
            score_tile(heads, 1, q, keys, values, where + p * 8, slot_bytes, count - 1 - p, dim, at + p * 4, CHUNK * 4)
        else:
            score_tile(heads, 0, q, keys, values, where + p * 8, slot_bytes, count - 1 - p, dim, at + p * 4, CHUNK * 4)
    turns = (count + LANES - 1) // LANES
    for h in range(heads):
        for i in range(count, turns * LANES):
            scores[h * CHUNK + i] = LOWEST
        weigh_lanes(at + h * CHUNK * 4, turns, np.float32(scale), out + h * stride)
    for d in range(0, dim, LANES):
        mix_tile(heads, at, CHUNK * 4, values + d * 4, where, slot_bytes, count, out + (EXTRA + d) * 4, stride)


@piece
def attend_chunk(b, h, w, row, is_new, kv_head, first, last, q, keys, values, scratch, out):  # type: ignore[no-untyped-def]
    """All query heads of a KV head over positions first to last; out[head] = maximum, weight, weighted sum [dim]."""
    where = _slots(b, w.places, w.paths, row, first, last, scratch)
    scores = carray(float_pointer(scratch + CHUNK * 8), MAX_HEADS * CHUNK)
    group, slot_bytes, skip = h.num_heads // h.num_kv_heads, h.num_kv_heads * h.dim * 4, kv_head * h.dim * 4
    stride, head = (h.dim + EXTRA) * 4, 0
    while head < group:
        parts = (group - head + MAX_HEADS - 1) // MAX_HEADS
        heads = (group - head + parts - 1) // parts
        query, to = q + head * h.dim * 4, out + head * stride
        if heads == 1:
            _some_heads(1, is_new, query, keys + skip, values + skip, slot_bytes, where, last - first, scores, h.scale, h.dim, to, stride)
        elif heads == 2:
            _some_heads(2, is_new, query, keys + skip, values + skip, slot_bytes, where, last - first, scores, h.scale, h.dim, to, stride)
        else:
            _some_heads(3, is_new, query, keys + skip, values + skip, slot_bytes, where, last - first, scores, h.scale, h.dim, to, stride)
        head += heads
        is_new = False


@piece
def merge(total_at, chunk_at, dim):  # type: ignore[no-untyped-def]
    """Add one head's chunk to its running total: the one with the smaller maximum shrinks."""
    total, chunk = carray(float_pointer(total_at), dim + EXTRA), carray(float_pointer(chunk_at), dim + EXTRA)
    top = max(total[0], chunk[0])
    old, new = exponential(total[0] - top), exponential(chunk[0] - top)
    total[0] = top
    for i in range(1, dim + EXTRA):
        total[i] = total[i] * old + chunk[i] * new


@piece
def finish(total_at, out_at, dim):  # type: ignore[no-untyped-def]
    """The weighted mean of a head."""
    total, out = carray(float_pointer(total_at), dim + EXTRA), carray(float_pointer(out_at), dim)
    shrink = np.float32(1) / total[1]
    for i in range(dim):
        out[i] = total[i + EXTRA] * shrink
