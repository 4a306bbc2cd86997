"""Attention's sums of values from integers: values as int8, weights as two times seven bits.

A head of a value in memory is `dim` int8; its scale lies with the key of the same position (tiles.py). A
weight times the value's scale is rounded to 14 bits of the largest such product of its query, and is kept as
a high and a low byte: four high, four low, and so on. Invariant: sums are exact integers, so neither the
order of the positions, nor how they are cut into turns, nor the instruction set changes a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from paceline.cpu.compile import FEATURES, UNSIGNED_FIRST, VARIANT, piece
from paceline.cpu.lanes import FLOAT, INT32, INT64, LANES, MAGIC, Emitter, bytes_, floats, instruction, ints
from paceline.cpu.tiles import PLACE, addresses, each_span, exponents, power_of_two

# positions whose values are added before the next columns' turn; lists of offsets go on in memory for as many
CHUNK = 128
TURN = 8  # positions whose values are turned together, and whose weights are 16 bytes
TURNED = (CHUNK + TURN) * LANES  # bytes of a chunk's values, sixteen columns, wherever it begins
WIDTH = (16 if FEATURES.get("avx512vnni") else 8) if VARIANT in UNSIGNED_FIRST else 4  # columns of a register
ADDED = 6 if WIDTH == LANES else 3  # queries of a tile: their sums, high and low, stay in registers
LARGEST = 16383.0  # a weight
# 2 ** x for x from -1/2 to 1/2 within 1e-7, which hardly ever changes what is rounded to 14 bits
POWER = (0.001326472, 0.009671514, 0.05550734, 0.24022242, 0.693147, 1.0)
LONGEST = 1 << 17  # positions whose sums surely fit 32 bits: 127 * 127 * LONGEST < 2 ** 31


@instruction()
def round_value(emit: Emitter, x: Any, dim: Any, out: Any, scale_at: Any) -> None:
    """`dim` floats become int8 = round(x / s) with s = max|x| / 127, which is stored elsewhere."""
    emit.round(x, emit.builder.sdiv(dim, emit.const(LANES)), out, scale_at, None)


@instruction()
def copy_scales(emit: Emitter, scales: Any, places: Any, count: Any, rows: Any, out: Any, step: Any) -> None:
    """Floats at the offsets of `count` positions, side by side into rows of `out`, `step` bytes apart."""
    for span, first in each_span(emit, count):
        found, here = emit.constant(0.0, span), emit.offset(places, emit.times(first, PLACE))
        for i, at in enumerate(addresses(emit, scales, here, span)):
            found = emit.builder.insert_element(found, emit.load(at, FLOAT), INT32(i))
        with emit.loop(rows) as row:
            emit.store(found, emit.offset(out, emit.times(row, step), emit.times(first, 4)))


def _split_weights(emit: Emitter, rounded: Any) -> Any:
    """Sixteen floats above MAGIC -> 32 bytes: four high, four low, four high, ..."""
    builder, short = emit.builder, ir.VectorType(ir.IntType(16), LANES)
    whole = builder.trunc(builder.bitcast(rounded, ints(LANES)), short)
    high = builder.trunc(builder.lshr(whole, short([7] * LANES)), bytes_(LANES))
    low = builder.trunc(builder.and_(whole, short([127] * LANES)), bytes_(LANES))
    order = [4 * four + i + half for four in range(LANES // 4) for half in (0, LANES) for i in range(4)]
    return emit.shuffle(order, high, low)


@instruction(operands=6)
def weigh_rounded(emit: Emitter, *operands: Any) -> None:
    """As tiles.weigh_lanes, and then each weight times its scale as an integer into `out`, two bytes a
    position. `out` may be where the scores are, or before. The total has the integers' unit."""
    (scores, scales, turns, scale, out, total_at), builder, kind = operands, emit.builder, floats(LANES)
    total, most = (emit.variable(emit.constant(0.0, LANES)) for _ in range(2))
    exponent = exponents(emit, scores, turns, scale)
    with emit.loop(turns) as turn:
        step = emit.times(turn, 4 * LANES)
        here = emit.offset(scores, step)
        value = power_of_two(emit, exponent(here), POWER)
        builder.store(builder.fadd(builder.load(total), value), total)
        scaled = builder.fmul(value, emit.load(emit.offset(scales, step), kind))
        emit.store(scaled, here)
        # unlike a comparison, it passes on what is not a number
        builder.store(emit.math("maximum", scaled, builder.load(most)), most)
    largest = emit.call(f"llvm.vector.reduce.fmaximum.v{LANES}f32", FLOAT, [builder.load(most)])
    is_zero = builder.fcmp_ordered("==", largest, FLOAT(0.0))
    inverse = builder.select(is_zero, FLOAT(1.0), builder.fdiv(FLOAT(LARGEST), largest))
    unit = emit.broadcast(inverse, LANES)
    with emit.loop(turns) as turn:
        scaled = emit.load(emit.offset(scores, emit.times(turn, 4 * LANES)), kind)
        rounded = emit.fma(scaled, unit, emit.constant(MAGIC, LANES))
        emit.store(_split_weights(emit, rounded), emit.offset(out, emit.times(turn, 2 * LANES)))
    emit.store(builder.fmul(emit.total(builder.load(total)), inverse), total_at)


def _zip(emit: Emitter, a: Any, b: Any, size: int) -> list[Any]:
    """Both halves of two registers' bytes, `size` of one and `size` of the other in turn."""
    order = [which + at + i for at in range(0, 16, size) for which in (0, 16) for i in range(size)]
    return [emit.shuffle(half, a, b) for half in (order[:16], order[16:])]


def _turn_four(emit: Emitter, rows: list[Any], out: Any) -> None:
    """Sixteen columns of four positions -> [16 columns][4 positions]."""
    a, b, c, d = rows
    firsts, seconds = _zip(emit, a, b, 1), _zip(emit, c, d, 1)
    fours = [each for pair in zip(firsts, seconds, strict=True) for each in _zip(emit, *pair, 2)]
    for i, four in enumerate(fours):
        emit.store(four, emit.offset(out, 16 * i))


@instruction()
def turn_values(emit: Emitter, values: Any, places: Any, fours: Any, out: Any, asked: Any) -> None:
    """Sixteen columns of 4 * fours positions at the offsets `places`, [fours][16][4]. Of the positions a
    chunk on, two of four are asked for, from number `asked` on: the processor cannot remember more."""
    with emit.loop(fours) as four:
        at = emit.offset(places, emit.times(four, 4 * PLACE))
        for row in addresses(emit, values, emit.offset(at, PLACE * CHUNK, emit.times(asked, PLACE)), 2):
            emit.prefetch(row)
        rows = [emit.load(row, bytes_(16)) for row in addresses(emit, values, at, 4)]
        _turn_four(emit, rows, emit.offset(out, emit.times(four, 64)))


@instruction()
def turn_some(emit: Emitter, values: Any, places: Any, before: Any, after: Any, out: Any) -> None:
    """The same of four positions, of which those from `before` to `after` are there, else zeros."""
    builder, rows = emit.builder, [emit.variable(bytes_(16)([0] * 16)) for _ in range(4)]
    for p, row in enumerate(rows):
        is_first = builder.icmp_signed("<=", before, emit.const(p))
        with builder.if_then(builder.and_(is_first, builder.icmp_signed("<", emit.const(p), after))):
            at = emit.offset(values, emit.load(emit.offset(places, PLACE * p), INT64))
            builder.store(emit.load(at, bytes_(16)), row)
    _turn_four(emit, [builder.load(row) for row in rows], out)


@piece
def turn(values, places, first, last, out, asked):  # type: ignore[no-untyped-def]
    """Sixteen columns of positions first to last, and zeros before and after, from one multiple of TURN to
    another; returns the turns. `places` are the values' offsets from position `first` on."""
    begin, end = first // TURN * TURN, (last + TURN - 1) // TURN * TURN
    whole = (first + 3) // 4 * 4
    fours = max(0, last // 4 - whole // 4)
    for p in range(begin, min(whole, end), 4):
        turn_some(values, places + (p - first) * PLACE, first - p, last - p, out + (p - begin) * LANES)
    turn_values(values, places + (whole - first) * PLACE, fours, out + (whole - begin) * LANES, asked)
    for p in range(whole + 4 * fours, end, 4):
        turn_some(values, places + (p - first) * PLACE, 0, last - p, out + (p - begin) * LANES)
    return (end - begin) // TURN


def _add(emit: Emitter, num_queries: int, *operands: Any) -> None:
    """Sums of sixteen columns over TURN * turns positions, added to integers in memory: out[q] has those by
    high bytes, and half a stride on those by low ones. operands: weights, their stride, turned values, turns,
    out, its stride."""
    weights, weight_stride, turned, turns, out, stride = operands
    builder, wanted = emit.builder, range(num_queries)
    half = builder.sdiv(stride, emit.const(2))
    both = [(q, part) for q in wanted for part in (0, 1)]
    targets = [emit.offset(out, emit.times(stride, q), emit.times(half, part)) for q, part in both]
    kind, parts = ints(WIDTH), range(0, 4 * LANES, 4 * WIDTH)
    sums = [[emit.variable(emit.load(emit.offset(at, c), kind)) for c in parts] for at in targets]
    with emit.loop(turns) as turn:
        here = emit.offset(weights, emit.times(turn, 16))
        rows = [emit.load(emit.offset(here, emit.times(weight_stride, q)), ints(4)) for q in wanted]
        first = emit.offset(turned, emit.times(turn, 128))
        for four in (0, 1):
            for c, at in enumerate(parts):
                values = emit.load(emit.offset(first, 64 * four + at), bytes_(4 * WIDTH))
                for (q, part), of_query in zip(both, sums, strict=True):
                    same = builder.bitcast(emit.splat(rows[q], 2 * four + part, WIDTH), bytes_(4 * WIDTH))
                    # weights have no sign; "sdot" multiplies by a lane that comes second
                    factors = (values, same) if WIDTH == 4 else (same, values)
                    builder.store(emit.dot(VARIANT, builder.load(of_query[c]), *factors), of_query[c])
    for at, of_query in zip(targets, sums, strict=True):
        for c, total in zip(parts, of_query, strict=True):
            emit.store(builder.load(total), emit.offset(at, c))


add_turned = instruction(most=ADDED, operands=6)(_add)


@instruction()
def combine(emit: Emitter, at: Any, half: Any, factor: Any, out: Any) -> None:
    """Sixteen sums in memory, those by low bytes `half` bytes on, times a factor."""
    builder, both = emit.builder, (at, emit.offset(at, half))
    high, low = (builder.sitofp(emit.load(each, ints(LANES)), floats(LANES)) for each in both)
    whole = emit.fma(high, emit.constant(128.0, LANES), low)
    emit.store(builder.fmul(whole, emit.broadcast(factor, LANES)), out)


@instruction(types.int64)
def turned_memory(emit: Emitter) -> Any:
    return emit.memory(TURNED)
