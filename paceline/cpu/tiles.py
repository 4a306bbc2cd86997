"""The arithmetic of attention: scores of a few queries against cached keys, their weights, and sums of values
by weight.

A position is named by the byte offsets of its rows among the keys and the values; lists of such pairs lie in
memory. "Queries" are the query heads of one KV head in any number of rows. Invariant: a score, a weight and a
column of a sum are each one chain of operations that depends on its own query and its own positions alone, so
how many queries or positions a tile takes changes no bit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from paceline.cpu.lanes import INT32, INT64, LANES, MAGIC, Emitter, floats, instruction

WIDTH = 4  # lanes of a dot product
SPAN = 4  # positions of a tile, at most WIDTH
# positions between what is read and what is asked for; lists of offsets must go on in memory for as many
AHEAD = 16
PLACE = 16  # bytes of a pair of offsets
HAS_32_REGISTERS = platform.machine() in ("aarch64", "arm64")
# queries of a tile: with SPAN positions each, the sums stay in registers (5: 9 % slower, 6: 31 %)
SCORED = 4 if HAS_32_REGISTERS else 3
MIXED = 5 if HAS_32_REGISTERS else 3  # the same, with 16 columns each (3: 5 % slower, 6: 27 %)
LOWEST = -3e38  # a score that weighs nothing
LEAST = -126.0  # the smallest exponent of a float: nothing weighs less than 2 ** -126
# 2 ** x for x from -1/2 to 1/2, fitted by least squares of the relative error: 2e-9 before rounding
POWER = (0.00015337577, 0.001339986, 0.00961852, 0.05550329, 0.24022646, 0.6931472, 1.0)


def addresses(emit: Emitter, cache: Any, places: Any, count: int) -> list[Any]:
    """Of the rows of `count` positions."""
    return [emit.offset(cache, emit.load(emit.offset(places, PLACE * p), INT64)) for p in range(count)]


@instruction(constants=1, most=SCORED, operands=6)
def score_tile(emit: Emitter, span: int, num_queries: int, *operands: Any) -> None:
    """out[q, p] = queries[q] · keys[p] for `span` positions (SPAN or 1). Four lanes go along the head and are
    added neighbours first. Rows of a cache lie apart, which no processor foresees: each turn asks for lines
    needed AHEAD positions on. operands: queries, keys, places, dim, out, its stride."""
    (queries, keys, places, dim, out, stride), builder = operands, emit.builder
    wanted, rows = range(num_queries), addresses(emit, keys, places, span)
    soon = addresses(emit, keys, emit.offset(places, PLACE * AHEAD), span)
    sums = [[emit.variable(emit.zeros(WIDTH)) for _ in rows] for _ in wanted]
    with emit.loop(builder.sdiv(dim, emit.const(LANES))) as turn:
        line = emit.times(turn, 4 * LANES)  # 64 bytes
        for row in soon:
            emit.prefetch(emit.offset(row, line))
        for step in range(0, 4 * LANES, 4 * WIDTH):
            at = emit.offset(queries, line, step)
            each = [emit.load(emit.offset(at, emit.times(dim, 4 * q)), floats(WIDTH)) for q in wanted]
            for p, row in enumerate(rows):
                key = emit.load(emit.offset(row, line, step), floats(WIDTH))
                for q, query in enumerate(each):
                    emit.accumulate(sums[q][p], query, key)
    for q, of_query in enumerate(sums):
        lanes = emit.totals([builder.load(total) for total in of_query] * (SPAN // span))
        found = lanes if span == SPAN else builder.extract_element(lanes, emit.first)
        emit.store(found, emit.offset(out, emit.times(stride, q)))


def _add_values(
    emit: Emitter, sums: list[Any], values: Any, place: Any, weights: list[Any], lane: int
) -> None:
    """sums[q] += weights[q][lane] * values of the position whose offset is at `place`."""
    emit.prefetch(emit.offset(values, emit.load(emit.offset(place, PLACE * AHEAD), INT64)))
    value = emit.load(emit.offset(values, emit.load(place, INT64)), floats(LANES))
    for total, weight in zip(sums, weights, strict=True):
        emit.accumulate(total, emit.splat(weight, lane, LANES), value)


@instruction(most=MIXED, operands=7)
def mix_tile(emit: Emitter, num_queries: int, *operands: Any) -> None:
    """out[q, :16] += sum over positions of weights[q, p] * values[p, :16], in order. operands: weights, their
    stride, values, places (the values' offsets), count of positions, out, its stride."""
    weights, weight_stride, values, places, count, out, stride = operands
    builder, wanted = emit.builder, range(num_queries)
    rows = [emit.offset(weights, emit.times(weight_stride, q)) for q in wanted]
    targets = [emit.offset(out, emit.times(stride, q)) for q in wanted]
    sums = [emit.variable(emit.load(target, floats(LANES))) for target in targets]
    spans = builder.sdiv(count, emit.const(SPAN))
    with emit.loop(spans) as turn:
        fours = [emit.load(emit.offset(row, emit.times(turn, 4 * SPAN)), floats(SPAN)) for row in rows]
        for p in range(SPAN):
            at = emit.offset(places, emit.times(turn, PLACE * SPAN), PLACE * p)
            _add_values(emit, sums, values, at, fours, p)
    whole = emit.times(spans, SPAN)
    with emit.loop(builder.sub(count, whole)) as rest:
        p = builder.add(whole, rest)
        ones = [emit.load(emit.offset(row, emit.times(p, 4)), floats(1)) for row in rows]
        _add_values(emit, sums, values, emit.offset(places, emit.times(p, PLACE)), ones, 0)
    for total, target in zip(sums, targets, strict=True):
        emit.store(builder.load(total), target)


def power_of_two(emit: Emitter, x: Any, polynomial: Sequence[float] = POWER) -> Any:
    """2 ** x for x <= 0 and not below LEAST: a polynomial of what rounding leaves, its exponent moved."""
    builder, width = emit.builder, x.type.count
    ints = ir.VectorType(INT32, width)
    shifted = builder.fadd(x, emit.constant(MAGIC, width))
    rest = builder.fsub(x, builder.fsub(shifted, emit.constant(MAGIC, width)))
    series = emit.constant(polynomial[0], width)
    for coefficient in polynomial[1:]:
        series = emit.fma(series, rest, emit.constant(coefficient, width))
    exponent = builder.shl(builder.bitcast(shifted, ints), ir.Constant(ints, [23] * width))
    return builder.bitcast(builder.add(builder.bitcast(series, ints), exponent), x.type)


def largest_of(emit: Emitter, at: Any, turns: Any) -> Any:
    """The largest of 16 * turns floats; what is not a number is passed over."""
    top, kind = emit.variable(emit.constant(LOWEST, LANES)), floats(LANES)
    with emit.loop(turns) as turn:
        value = emit.load(emit.offset(at, emit.times(turn, 4 * LANES)), kind)
        emit.builder.store(emit.call(f"llvm.maxnum.v{LANES}f32", kind, [value, emit.builder.load(top)]), top)
    return emit.largest(emit.builder.load(top))


def exponents(emit: Emitter, scores: Any, turns: Any, scale: Any) -> Callable[[Any], Any]:
    """Of the weights of 16 * turns scores: a function of an address among them, never below LEAST."""
    builder, factor = emit.builder, emit.broadcast(scale, LANES)
    top = emit.broadcast(largest_of(emit, scores, turns), LANES)
    down = builder.fneg(builder.fmul(top, factor))

    def exponent(at: Any) -> Any:
        found = emit.fma(emit.load(at, floats(LANES)), factor, down)
        return emit.call(f"llvm.maxnum.v{LANES}f32", found.type, [found, emit.constant(LEAST, LANES)])

    return exponent


@instruction()
def weigh_lanes(emit: Emitter, scores: Any, turns: Any, scale: Any, total_at: Any) -> None:
    """In place over 16 * turns floats, 2 ** (scale * (score - the largest)), scale > 0; stores their sum."""
    builder, total = emit.builder, emit.variable(emit.zeros(LANES))
    exponent = exponents(emit, scores, turns, scale)
    with emit.loop(turns) as turn:
        here = emit.offset(scores, emit.times(turn, 4 * LANES))
        value = power_of_two(emit, exponent(here))
        emit.store(value, here)
        builder.store(builder.fadd(builder.load(total), value), total)
    emit.store(emit.total(builder.load(total)), total_at)
