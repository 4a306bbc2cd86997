"""Attention's sums of values from integers: values as int8, weights as two times seven bits, sums over
positions by dot products.

A head of a value in memory is `dim` int8; its scale lies with the key of the same position (key_tiles.py). A
weight times the value's scale is rounded to 14 bits of the largest such product of its query, and is kept as
a high and a low byte: four high, four low, and so on. Invariant: sums are exact integers, so neither the
order of the positions, nor how they are cut into turns, nor the instruction set changes a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.cpu.features import VARIANT
from paceline.cpu.key_tiles import SUMS, round_numbers
from paceline.cpu.lanes import FLOAT, INT32, INT64, LANES, MAGIC, Emitter, bytes_, floats
from paceline.cpu.tiles import LEAST, LOWEST, PLACE, addresses, power_of_two

# positions whose values are added before the next columns' turn; lists of offsets must go on in memory for as
# many
CHUNK = 128
TURN = 8  # positions whose values are turned together, and whose weights are 16 bytes
ADDED = 3  # queries of a tile: their sums, high and low, are 24 of 32 registers
LARGEST = 16383.0  # a weight
# 2 ** x for x from -1/2 to 1/2 within 1e-7, which hardly ever changes what is rounded to 14 bits
POWER = (0.001326472, 0.009671514, 0.05550734, 0.24022242, 0.693147, 1.0)
LONGEST = 1 << 17  # positions whose sums surely fit 32 bits: 127 * 127 * LONGEST < 2 ** 31


@intrinsic
def round_value(_context: Any, x: Any, dim: Any, out: Any, scale_at: Any) -> Any:
    """`dim` floats become int8 = round(x / s) with s = max|x| / 127, which is stored elsewhere."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, dim, out, scale_at = arguments
        emit = Emitter(builder)
        round_numbers(emit, x, builder.sdiv(dim, emit.const(LANES)), out, scale_at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def copy_scales(_context: Any, span: Any, scales: Any, places: Any, rows: Any, out: Any, stride: Any) -> Any:
    """Floats at the offsets of `span` positions (a compile-time constant), side by side into every row of
    `out`.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scales, places, rows, out, stride = arguments[1:]
        emit, width = Emitter(builder), span.literal_value
        found = emit.zeros(width)
        for i, at in enumerate(addresses(emit, scales, places, width)):
            found = builder.insert_element(found, emit.load(at, FLOAT), ir.Constant(INT32, i))
        with emit.loop(rows) as row:
            emit.store(found, emit.offset(out, emit.times(row, stride)))
        return context.get_dummy_value()

    return types.void(span, *[types.int64] * 5), generate


def _split_weights(emit: Emitter, rounded: Any) -> Any:
    """Sixteen floats above MAGIC -> 32 bytes: four high, four low, four high, ..."""
    builder, short = emit.builder, ir.VectorType(ir.IntType(16), LANES)
    whole = builder.trunc(builder.bitcast(rounded, ir.VectorType(INT32, LANES)), short)
    high = builder.trunc(builder.lshr(whole, short([7] * LANES)), bytes_(LANES))
    low = builder.trunc(builder.and_(whole, short([127] * LANES)), bytes_(LANES))
    order = [4 * four + i + half for four in range(LANES // 4) for half in (0, LANES) for i in range(4)]
    return builder.shuffle_vector(high, low, ir.Constant(ir.VectorType(INT32, 2 * LANES), order))


@intrinsic
def weigh_rounded(
    _context: Any, scores: Any, scales: Any, turns: Any, scale: Any, out: Any, total_at: Any
) -> Any:
    """As tiles.weigh_lanes, and then each weight times its scale as an integer into `out`, two bytes a
    position. `out` may be where the scores are, or before. The total is stored in the same unit as the
    integers."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, scales, turns, scale, out, total_at = arguments
        emit, kind = Emitter(builder), floats(LANES)
        top, total, most = (
            emit.variable(emit.constant(LOWEST, LANES)),
            emit.variable(emit.zeros(LANES)),
            emit.variable(emit.zeros(LANES)),
        )
        with emit.loop(turns) as turn:
            score = emit.load(emit.offset(scores, emit.times(turn, 4 * LANES)), kind)
            builder.store(emit.call(f"llvm.maxnum.v{LANES}f32", kind, [score, builder.load(top)]), top)
        factor = emit.broadcast(scale, LANES)
        down = builder.fneg(builder.fmul(emit.broadcast(emit.largest(builder.load(top)), LANES), factor))
        with emit.loop(turns) as turn:
            step = emit.times(turn, 4 * LANES)
            here = emit.offset(scores, step)
            exponent = emit.fma(emit.load(here, kind), factor, down)
            exponent = emit.call(f"llvm.maxnum.v{LANES}f32", kind, [exponent, emit.constant(LEAST, LANES)])
            value = power_of_two(emit, exponent, POWER)
            builder.store(builder.fadd(builder.load(total), value), total)
            scaled = builder.fmul(value, emit.load(emit.offset(scales, step), kind))
            emit.store(scaled, here)
            # unlike a comparison, it passes on what is not a number
            builder.store(emit.call(f"llvm.maximum.v{LANES}f32", kind, [scaled, builder.load(most)]), most)
        largest = emit.call(f"llvm.vector.reduce.fmaximum.v{LANES}f32", FLOAT, [builder.load(most)])
        is_zero = builder.fcmp_ordered("==", largest, ir.Constant(FLOAT, 0.0))
        inverse = builder.select(
            is_zero, ir.Constant(FLOAT, 1.0), builder.fdiv(ir.Constant(FLOAT, LARGEST), largest)
        )
        unit = emit.broadcast(inverse, LANES)
        with emit.loop(turns) as turn:
            scaled = emit.load(emit.offset(scores, emit.times(turn, 4 * LANES)), kind)
            rounded = emit.fma(scaled, unit, emit.constant(MAGIC, LANES))
            emit.store(_split_weights(emit, rounded), emit.offset(out, emit.times(turn, 2 * LANES)))
        emit.store(builder.fmul(emit.total(builder.load(total)), inverse), total_at)
        return context.get_dummy_value()

    return types.void(
        types.int64, types.int64, types.int64, types.float32, types.int64, types.int64
    ), generate


def _zip(emit: Emitter, a: Any, b: Any, size: int) -> list[Any]:
    """Both halves of two registers' bytes, `size` of one and `size` of the other in turn."""
    order = [which + at + i for at in range(0, 16, size) for which in (0, 16) for i in range(size)]
    masks = [ir.Constant(ir.VectorType(INT32, 16), order[start : start + 16]) for start in (0, 16)]
    return [emit.builder.shuffle_vector(a, b, mask) for mask in masks]


def _turn_four(emit: Emitter, rows: list[Any], out: Any) -> None:
    """Sixteen columns of four positions -> [16 columns][4 positions]."""
    a, b, c, d = rows
    firsts, seconds = _zip(emit, a, b, 1), _zip(emit, c, d, 1)
    for i, four in enumerate(
        [each for first, second in zip(firsts, seconds, strict=True) for each in _zip(emit, first, second, 2)]
    ):
        emit.store(four, emit.offset(out, 16 * i))


@intrinsic
def turn_values(_context: Any, values: Any, places: Any, fours: Any, out: Any, asked: Any) -> Any:
    """Sixteen columns of 4 * fours positions, [fours][16][4]. `places` are their offsets. Of the positions a
    chunk further on, two of four are asked for, from the one numbered `asked` on: all at once would be more
    than the processor can remember."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values, places, fours, out, asked = arguments
        emit = Emitter(builder)
        with emit.loop(fours) as four:
            at = emit.offset(places, emit.times(four, 4 * PLACE))
            soon = emit.offset(at, PLACE * CHUNK, emit.times(asked, PLACE))
            for p in range(2):
                emit.prefetch(emit.offset(values, emit.load(emit.offset(soon, PLACE * p), INT64)))
            rows = [
                emit.load(emit.offset(values, emit.load(emit.offset(at, PLACE * p), INT64)), bytes_(16))
                for p in range(4)
            ]
            _turn_four(emit, rows, emit.offset(out, emit.times(four, 64)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def turn_some(_context: Any, values: Any, places: Any, before: Any, after: Any, out: Any) -> Any:
    """The same of four positions, of which those from `before` to `after` (0 to 4) are there; the others'
    values are zero.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values, places, before, after, out = arguments
        emit, zero = Emitter(builder), bytes_(16)([0] * 16)
        rows = [emit.variable(zero) for _ in range(4)]
        for p, row in enumerate(rows):
            is_there = builder.and_(
                builder.icmp_signed("<=", before, emit.const(p)),
                builder.icmp_signed("<", emit.const(p), after),
            )
            with builder.if_then(is_there):
                builder.store(
                    emit.load(
                        emit.offset(values, emit.load(emit.offset(places, PLACE * p), INT64)), bytes_(16)
                    ),
                    row,
                )
        _turn_four(emit, [builder.load(row) for row in rows], out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _dot(emit: Emitter, total: Any, values: Any, weights: Any) -> Any:
    """total[c] += sum of values[4c : 4c+4] * weights[4c : 4c+4]; no weight is negative."""
    if VARIANT == "sdot":
        return emit.call("llvm.aarch64.neon.sdot.v4i32.v16i8", SUMS, [total, values, weights])
    if VARIANT == "vnni":
        return emit.call("llvm.x86.avx512.vpdpbusd.128", SUMS, [total, weights, values])
    return emit.add_fours(total, values, weights)


@intrinsic(prefer_literal=True)
def add_turned(
    _context: Any,
    num_queries: Any,
    weights: Any,
    weight_stride: Any,
    turned: Any,
    turns: Any,
    out: Any,
    stride: Any,
) -> Any:
    """Sums of sixteen columns over TURN * turns positions, added to integers in memory: out[q] has those by
    high bytes, and half a stride on those by low ones."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        weights, weight_stride, turned, turns, out, stride = arguments[1:]
        emit, wanted = Emitter(builder), range(num_queries.literal_value)
        half = builder.sdiv(stride, emit.const(2))
        targets = [
            [emit.offset(out, emit.times(stride, q), emit.times(half, part)) for part in (0, 1)]
            for q in wanted
        ]
        sums = [
            [[emit.variable(emit.load(emit.offset(at, 16 * c), SUMS)) for c in range(4)] for at in both]
            for both in targets
        ]
        with emit.loop(turns) as turn:
            rows = [
                emit.load(emit.offset(weights, emit.times(weight_stride, q), emit.times(turn, 16)), SUMS)
                for q in wanted
            ]
            for four in (0, 1):
                for c in range(4):
                    values = emit.load(
                        emit.offset(turned, emit.times(turn, 128), 64 * four + 16 * c), bytes_(16)
                    )
                    for q in wanted:
                        for part in (0, 1):
                            same = builder.bitcast(emit.splat(rows[q], 2 * four + part, 4), bytes_(16))
                            slot = sums[q][part][c]
                            builder.store(_dot(emit, builder.load(slot), values, same), slot)
        for q in wanted:
            for part in (0, 1):
                for c in range(4):
                    emit.store(builder.load(sums[q][part][c]), emit.offset(targets[q][part], 16 * c))
        return context.get_dummy_value()

    return types.void(num_queries, *[types.int64] * 6), generate


@intrinsic
def combine(_context: Any, at: Any, half: Any, factor: Any, out: Any) -> Any:
    """Sixteen sums in memory, those by low bytes `half` bytes on, times a factor."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        at, half, factor, out = arguments
        emit, ints = Emitter(builder), ir.VectorType(INT32, LANES)
        high, low = (
            builder.sitofp(emit.load(each, ints), floats(LANES)) for each in (at, emit.offset(at, half))
        )
        whole = emit.fma(high, emit.constant(128.0, LANES), low)
        emit.store(builder.fmul(whole, emit.broadcast(factor, LANES)), out)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic(prefer_literal=True)
def stack_memory(_context: Any, size: Any) -> Any:
    """The address of `size` bytes (a compile-time constant) that live as long as the call of the function
    that asks.
    """

    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        return builder.ptrtoint(
            cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), size.literal_value)), INT64
        )

    return types.int64(size), generate
