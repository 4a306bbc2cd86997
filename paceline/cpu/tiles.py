"""The arithmetic of attention: scores of a few queries against cached keys, their weights, sums of values.

A position is named by the byte offsets of its rows among the keys and the values. "Queries" are the query
heads of one KV head in any number of rows. A rounded head is `dim` int8, the scales of its two halves (the
first of 48 has 32) and the sums of their integers: dim + TAIL bytes. A cached key has the scale of its
position's value in place of the sums. Invariant: integer sums are exact, and a score, a weight and a column
of a sum are each one chain of operations: neither a tile's shape nor the processor changes a bit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.cpu.compile import FEATURES, UNSIGNED_FIRST, VARIANT
from paceline.cpu.lanes import FLOAT, INT32, INT64, LANES, MAGIC, Emitter, bytes_, floats, instruction, ints

WIDTH = 4  # lanes of a dot product
SPAN = 4  # positions of a tile, at most WIDTH
# positions between what is read and what is asked for; lists of offsets must go on in memory for as many
AHEAD = 16
PLACE = 16  # bytes of a pair of offsets
IS_UNSIGNED = VARIANT in UNSIGNED_FIRST
HAS_32_REGISTERS = platform.machine() in ("aarch64", "arm64") or FEATURES.get("avx512vl", False)
# queries of a tile: with SPAN positions each, the sums stay in registers (5: 9 % slower, 6: 31 %)
SCORED = 4 if HAS_32_REGISTERS else 3
MIXED = 5 if HAS_32_REGISTERS else 3  # the same, with 16 columns each (3: 5 % slower, 6: 27 %)
LOWEST = -3e38  # a score that weighs nothing
LEAST = -126.0  # the smallest exponent of a float: nothing weighs less than 2 ** -126
# 2 ** x for x from -1/2 to 1/2, fitted by least squares of the relative error: 2e-9 before rounding
POWER = (0.00015337577, 0.001339986, 0.00961852, 0.05550329, 0.24022646, 0.6931472, 1.0)
TAIL = 16  # bytes after the integers of a head
VALUE_SCALE = 8  # bytes into a cached key's tail: where its value's scale lies
SUMS = ints(4)


def addresses(emit: Emitter, cache: Any, places: Any, count: int) -> list[Any]:
    """Of the rows of `count` positions."""
    return [emit.offset(cache, emit.load(emit.offset(places, PLACE * p), INT64)) for p in range(count)]


def each_span(emit: Emitter, positions: Any) -> Iterator[tuple[int, Any]]:
    """Loops over positions, SPAN at a time and then one by one: how many, and the first of them."""
    spans = emit.builder.sdiv(positions, emit.const(SPAN))
    with emit.loop(spans) as turn:
        yield SPAN, emit.times(turn, SPAN)
    whole = emit.times(spans, SPAN)
    with emit.loop(emit.builder.sub(positions, whole)) as rest:
        yield 1, emit.builder.add(whole, rest)


def store_scores(emit: Emitter, span: int, lanes: Any, at: Any) -> None:
    """Of `span` positions, the first of four lanes."""
    emit.store(lanes if span == SPAN else emit.builder.extract_element(lanes, emit.first), at)


@instruction(most=SCORED, operands=7)
def score_floats(emit: Emitter, num_queries: int, *operands: Any) -> None:
    """out[q, p] = queries[q] · keys[p]. Four lanes go along the head and are added neighbours first. Rows of
    a cache lie apart, which no processor foresees: each turn asks for lines needed AHEAD positions on.
    operands: queries, keys, places, count of positions, dim, out, its stride."""
    (queries, keys, places, positions, dim, out, stride), builder = operands, emit.builder
    wanted = range(num_queries)
    for span, first in each_span(emit, positions):
        here = emit.offset(places, emit.times(first, PLACE))
        rows = addresses(emit, keys, here, span)
        soon = addresses(emit, keys, emit.offset(here, PLACE * AHEAD), span)
        sums = [[emit.variable(emit.constant(0.0, WIDTH)) for _ in rows] for _ in wanted]
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
            lanes = emit.totals([builder.load(total) for total in of_query] * (SPAN // span), builder.fadd)
            store_scores(emit, span, lanes, emit.offset(out, emit.times(stride, q), emit.times(first, 4)))


@instruction(most=MIXED, operands=7)
def mix_floats(emit: Emitter, num_queries: int, *operands: Any) -> None:
    """out[q, :16] += sum over positions of weights[q, p] * values[p, :16], in order. operands: weights, their
    stride, values, places (the values' offsets), count of positions, out, its stride."""
    weights, weight_stride, values, places, positions, out, stride = operands
    targets = [emit.offset(out, emit.times(stride, q)) for q in range(num_queries)]
    sums = [emit.variable(emit.load(target, floats(LANES))) for target in targets]
    for span, first in each_span(emit, positions):
        at = emit.offset(weights, emit.times(first, 4))
        rows = [emit.offset(at, emit.times(weight_stride, q)) for q in range(num_queries)]
        each = [emit.load(row, floats(span)) for row in rows]
        here = emit.offset(places, emit.times(first, PLACE))
        soon = addresses(emit, values, emit.offset(here, PLACE * AHEAD), span)
        for p, row in enumerate(addresses(emit, values, here, span)):
            emit.prefetch(soon[p])
            value = emit.load(row, floats(LANES))
            for total, weight in zip(sums, each, strict=True):
                emit.accumulate(total, emit.splat(weight, p, LANES), value)
    for total, target in zip(sums, targets, strict=True):
        emit.store(emit.builder.load(total), target)


def power_of_two(emit: Emitter, x: Any, polynomial: Sequence[float] = POWER) -> Any:
    """2 ** x for x <= 0 and not below LEAST: a polynomial of what rounding leaves, its exponent moved."""
    builder, width = emit.builder, x.type.count
    shifted = builder.fadd(x, emit.constant(MAGIC, width))
    rest = builder.fsub(x, builder.fsub(shifted, emit.constant(MAGIC, width)))
    series = emit.constant(polynomial[0], width)
    for coefficient in polynomial[1:]:
        series = emit.fma(series, rest, emit.constant(coefficient, width))
    exponent = builder.shl(builder.bitcast(shifted, ints(width)), ints(width)([23] * width))
    return builder.bitcast(builder.add(builder.bitcast(series, ints(width)), exponent), x.type)


def largest_of(emit: Emitter, at: Any, turns: Any) -> Any:
    """The largest of 16 * turns floats; what is not a number is passed over."""
    builder, top = emit.builder, emit.variable(emit.constant(LOWEST, LANES))
    with emit.loop(turns) as turn:
        value = emit.load(emit.offset(at, emit.times(turn, 4 * LANES)), floats(LANES))
        builder.store(emit.math("maxnum", value, builder.load(top)), top)
    return emit.fold(builder.load(top), lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def exponents(emit: Emitter, scores: Any, turns: Any, scale: Any) -> Callable[[Any], Any]:
    """Of the weights of 16 * turns scores: a function of an address among them, never below LEAST."""
    builder, factor = emit.builder, emit.broadcast(scale, LANES)
    top = emit.broadcast(largest_of(emit, scores, turns), LANES)
    down = builder.fneg(builder.fmul(top, factor))

    def exponent(at: Any) -> Any:
        found = emit.fma(emit.load(at, floats(LANES)), factor, down)
        return emit.math("maxnum", found, emit.constant(LEAST, LANES))

    return exponent


@instruction()
def weigh_lanes(emit: Emitter, scores: Any, turns: Any, scale: Any, total_at: Any) -> None:
    """In place over 16 * turns floats, 2 ** (scale * (score - the largest)), scale > 0; stores their sum."""
    builder, total = emit.builder, emit.variable(emit.constant(0.0, LANES))
    exponent = exponents(emit, scores, turns, scale)
    with emit.loop(turns) as turn:
        here = emit.offset(scores, emit.times(turn, 4 * LANES))
        value = power_of_two(emit, exponent(here))
        emit.store(value, here)
        builder.store(builder.fadd(builder.load(total), value), total)
    emit.store(emit.total(builder.load(total)), total_at)


def _halves(emit: Emitter, dim: Any) -> list[tuple[Any, Any]]:
    """First number and sixteens of both halves."""
    sixteens = emit.builder.sdiv(dim, emit.const(16))
    first = emit.builder.sdiv(emit.offset(sixteens, 1), emit.const(2))
    return [(emit.const(0), first), (emit.times(first, 16), emit.builder.sub(sixteens, first))]


@instruction(constants=1)
def round_head(emit: Emitter, has_sums: int, x: Any, dim: Any, out: Any) -> None:
    """`dim` floats become a head in memory: int8 = round(x / s) with s = max|x| / 127 of each half. Nothing
    is written where the sums of a cached key would be."""
    for i, (first, turns) in enumerate(_halves(emit, dim)):
        source, to = emit.offset(x, emit.times(first, 4)), emit.offset(out, first)
        scale_at = emit.offset(out, dim, 4 * i)
        emit.round(source, turns, to, scale_at, emit.offset(scale_at, 8) if has_sums else None)


def _half_dots(emit: Emitter, queries: list[Any], rows: list[Any], half: tuple[Any, ...]) -> list[Any]:
    """For each query the exact products of one half with SPAN keys, as floats. half: its first number, its
    sixteens, and where a query has the sum of it."""
    (first, turns, sum_at), builder = half, emit.builder
    sums = [[emit.variable(SUMS([0] * 4)) for _ in rows] for _ in queries]
    with emit.loop(turns) as turn:
        at = emit.offset(first, emit.times(turn, 16))
        each = [emit.load(emit.offset(query, at), bytes_(16)) for query in queries]
        for p, row in enumerate(rows):
            key = emit.load(emit.offset(row, at), bytes_(16))
            if IS_UNSIGNED:  # 128 is added, its share taken off the sums
                key = builder.xor(key, bytes_(16)([0x80] * 16))
            for q, query in enumerate(each):
                builder.store(emit.dot(VARIANT, builder.load(sums[q][p]), key, query), sums[q][p])
    found = []
    for query, of_query in zip(queries, sums, strict=True):
        lanes = [builder.load(total) for total in of_query] * (SPAN // len(rows))
        whole = emit.totals(lanes, builder.add)
        if IS_UNSIGNED:
            excess = builder.mul(emit.load(emit.offset(query, sum_at), INT32), INT32(128))
            whole = builder.sub(whole, emit.broadcast(excess, 4))
        found.append(builder.sitofp(whole, floats(4)))
    return found


def _score(emit: Emitter, num_queries: int, *operands: Any) -> None:
    """out[q, p] = queries[q] · keys[p] as score_floats, from heads that are rounded."""
    (queries, keys, places, positions, dim, out, stride), builder = operands, emit.builder
    own = [emit.offset(queries, emit.times(emit.offset(dim, TAIL), q)) for q in range(num_queries)]
    halves = [(*half, emit.offset(dim, 8 + 4 * i)) for i, half in enumerate(_halves(emit, dim))]
    for span, first in each_span(emit, positions):
        here, to = emit.offset(places, emit.times(first, PLACE)), emit.offset(out, emit.times(first, 4))
        rows = addresses(emit, keys, here, span)
        for row in addresses(emit, keys, emit.offset(here, PLACE * AHEAD), span):
            emit.prefetch(row)
            emit.prefetch(emit.offset(row, 64))
        dots = [_half_dots(emit, own, rows, half) for half in halves]
        pairs = [emit.load(emit.offset(row, dim), floats(2)) for row in rows] * (SPAN // span)
        fours = [emit.shuffle(range(4), *pairs[at : at + 2]) for at in (0, 2)]
        scales = [emit.shuffle(range(half, 8, 2), *fours) for half in (0, 1)]  # of SPAN keys' halves
        for q, query in enumerate(own):
            factors = [emit.broadcast(emit.load(emit.offset(query, dim, 4 * i), FLOAT), 4) for i in (0, 1)]
            low, high = (builder.fmul(factor, scale) for factor, scale in zip(factors, scales, strict=True))
            lanes = emit.fma(dots[0][q], low, builder.fmul(dots[1][q], high))
            store_scores(emit, span, lanes, emit.offset(to, emit.times(stride, q)))


score_rounded = instruction(most=SCORED, operands=7)(_score)
