"""The arithmetic of attention: scores of a few queries against cached keys, their weights, and sums of values
by weight.

A position is named by the byte offsets of its rows among the keys and the values; lists of such pairs lie in
memory. "Queries" are the query heads of one KV head in any number of rows. Invariant: a score, a weight and a
column of a sum are each one chain of operations that depends on its own query and its own positions alone, so
how many queries or positions a tile takes changes no bit.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paceline.cpu.lanes import INT32, INT64, LANES, Emitter, floats

WIDTH = 4  # lanes of a dot product
SPAN = 4  # positions of a tile, at most WIDTH
# positions between what is read and what is asked for; lists of offsets must go on in memory for as many
AHEAD = 16
PLACE = 16  # bytes of a pair of offsets
HAS_32_REGISTERS = platform.machine() in ("aarch64", "arm64")
SCORED = (
    4 if HAS_32_REGISTERS else 3
)  # queries of a tile: with SPAN positions each, the sums stay in registers (5: 9 % slower, 6: 31 %)
MIXED = 5 if HAS_32_REGISTERS else 3  # the same, with 16 columns each (3: 5 % slower, 6: 27 %)
LOWEST = -3e38  # a score that weighs nothing
LEAST = -126.0  # the smallest exponent of a float: nothing weighs less than 2 ** -126
# 2 ** x for x from -1/2 to 1/2, fitted by least squares of the relative error: 2e-9 before rounding
POWER = (0.00015337577, 0.001339986, 0.00961852, 0.05550329, 0.24022646, 0.6931472, 1.0)
ROUNDING = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, which then is the low bits


def addresses(emit: Emitter, cache: Any, places: Any, count: int) -> list[Any]:
    """Of the rows of `count` positions."""
    return [emit.offset(cache, emit.load(emit.offset(places, PLACE * p), INT64)) for p in range(count)]


@intrinsic(prefer_literal=True)
def score_tile(
    _context: Any,
    num_queries: Any,
    span: Any,
    queries: Any,
    keys: Any,
    places: Any,
    dim: Any,
    out: Any,
    stride: Any,
) -> Any:
    """out[q, p] = queries[q] · keys[p] for `span` positions (SPAN or 1). Four lanes go along the head and are
    added neighbours first.

    Rows of a cache lie apart, which no processor foresees: each turn asks for lines needed AHEAD positions
    on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, keys, places, dim, out, stride = arguments[2:]
        emit, wanted, width = Emitter(builder), range(num_queries.literal_value), span.literal_value
        rows = addresses(emit, keys, places, width)
        soon = addresses(emit, keys, emit.offset(places, PLACE * AHEAD), width)
        sums = [[emit.variable(emit.zeros(WIDTH)) for _ in rows] for _ in wanted]
        with emit.loop(builder.sdiv(dim, emit.const(LANES))) as turn:
            line = emit.times(turn, 4 * LANES)  # 64 bytes
            for row in soon:
                emit.prefetch(emit.offset(row, line))
            for step in range(0, 4 * LANES, 4 * WIDTH):
                each = [
                    emit.load(emit.offset(queries, emit.times(dim, 4 * q), line, step), floats(WIDTH))
                    for q in wanted
                ]
                for p, row in enumerate(rows):
                    key = emit.load(emit.offset(row, line, step), floats(WIDTH))
                    for q, query in enumerate(each):
                        emit.accumulate(sums[q][p], query, key)
        for q, of_query in enumerate(sums):
            lanes = emit.totals([builder.load(total) for total in of_query] * (SPAN // width))
            emit.store(
                lanes if width == SPAN else builder.extract_element(lanes, emit.first),
                emit.offset(out, emit.times(stride, q)),
            )
        return context.get_dummy_value()

    return types.void(num_queries, span, *[types.int64] * 6), generate


def _add_values(
    emit: Emitter, sums: list[Any], values: Any, place: Any, weights: list[Any], lane: int
) -> None:
    """sums[q] += weights[q][lane] * values of the position whose offset is at `place`."""
    emit.prefetch(emit.offset(values, emit.load(emit.offset(place, PLACE * AHEAD), INT64)))
    value = emit.load(emit.offset(values, emit.load(place, INT64)), floats(LANES))
    for total, weight in zip(sums, weights, strict=True):
        emit.accumulate(total, emit.splat(weight, lane, LANES), value)


@intrinsic(prefer_literal=True)
def mix_tile(
    _context: Any,
    num_queries: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    places: Any,
    count: Any,
    out: Any,
    stride: Any,
) -> Any:
    """out[q, :16] += sum over positions of weights[q, p] * values[p, :16], in order. `places` are the values'
    offsets.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, weight_stride, values, places, count, out, stride = arguments[1:]
        emit, wanted = Emitter(builder), range(num_queries.literal_value)
        rows = [emit.offset(weights, emit.times(weight_stride, q)) for q in wanted]
        targets = [emit.offset(out, emit.times(stride, q)) for q in wanted]
        sums = [emit.variable(emit.load(target, floats(LANES))) for target in targets]
        spans = builder.sdiv(count, emit.const(SPAN))
        with emit.loop(spans) as turn:
            fours = [emit.load(emit.offset(row, emit.times(turn, 4 * SPAN)), floats(SPAN)) for row in rows]
            for p in range(SPAN):
                _add_values(
                    emit,
                    sums,
                    values,
                    emit.offset(places, emit.times(turn, PLACE * SPAN), PLACE * p),
                    fours,
                    p,
                )
        whole = emit.times(spans, SPAN)
        with emit.loop(builder.sub(count, whole)) as rest:
            p = builder.add(whole, rest)
            ones = [emit.load(emit.offset(row, emit.times(p, 4)), floats(1)) for row in rows]
            _add_values(emit, sums, values, emit.offset(places, emit.times(p, PLACE)), ones, 0)
        for total, target in zip(sums, targets, strict=True):
            emit.store(builder.load(total), target)
        return context.get_dummy_value()

    return types.void(num_queries, *[types.int64] * 7), generate


def power_of_two(emit: Emitter, x: Any, polynomial: Sequence[float] = POWER) -> Any:
    """2 ** x lane by lane for x <= 0 and not below LEAST: a polynomial of what is left after rounding, its
    exponent moved.
    """
    builder, width = emit.builder, x.type.count
    ints = ir.VectorType(INT32, width)
    shifted = builder.fadd(x, emit.constant(ROUNDING, width))
    rest = builder.fsub(x, builder.fsub(shifted, emit.constant(ROUNDING, width)))
    series = emit.constant(polynomial[0], width)
    for coefficient in polynomial[1:]:
        series = emit.fma(series, rest, emit.constant(coefficient, width))
    exponent = builder.shl(builder.bitcast(shifted, ints), ir.Constant(ints, [23] * width))
    return builder.bitcast(builder.add(builder.bitcast(series, ints), exponent), x.type)


@intrinsic
def weigh_lanes(_context: Any, scores: Any, turns: Any, scale: Any, total_at: Any) -> Any:
    """In place over 16 * turns floats, 2 ** (scale * (score - the largest)); stores their sum. `scale` is
    positive.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, turns, scale, total_at = arguments
        emit, kind = Emitter(builder), floats(LANES)
        top, total = emit.variable(emit.constant(LOWEST, LANES)), emit.variable(emit.zeros(LANES))
        with emit.loop(turns) as turn:
            score = emit.load(emit.offset(scores, emit.times(turn, 4 * LANES)), kind)
            builder.store(emit.call(f"llvm.maxnum.v{LANES}f32", kind, [score, builder.load(top)]), top)
        factor = emit.broadcast(scale, LANES)
        down = builder.fneg(builder.fmul(emit.broadcast(emit.largest(builder.load(top)), LANES), factor))
        with emit.loop(turns) as turn:
            here = emit.offset(scores, emit.times(turn, 4 * LANES))
            exponent = emit.fma(emit.load(here, kind), factor, down)
            exponent = emit.call(f"llvm.maxnum.v{LANES}f32", kind, [exponent, emit.constant(LEAST, LANES)])
            value = power_of_two(emit, exponent)
            emit.store(value, here)
            builder.store(builder.fadd(builder.load(total), value), total)
        emit.store(emit.total(builder.load(total)), total_at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate
