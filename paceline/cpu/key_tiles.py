"""Attention scores from integers: heads of queries and keys as int8, each half of a head with a scale of its
own.

A head in memory is `dim` int8, two float32 scales and the sums of both halves' integers: dim + TAIL bytes. A
cached key has no use for the sums, and has the scale of the value of its position there (value_tiles.py). A
half ends at a multiple of 16, so of 48 numbers the first has 32 and of 16 it has all. Invariant: the integer
sums are exact, and a score is one float expression of its own query and key, so neither the shape of a tile
nor the instruction set changes a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from paceline.cpu.features import VARIANT
from paceline.cpu.lanes import FLOAT, INT32, LANES, MAGIC, MAGIC_BITS, Emitter, bytes_, floats, instruction
from paceline.cpu.tiles import AHEAD, PLACE, SCORED, SPAN, addresses

TAIL = 16  # bytes after the integers of a head
VALUE_SCALE = 8  # bytes into a cached key's tail: where its value's scale lies
SUMS = ir.VectorType(INT32, 4)


def _halves(emit: Emitter, dim: Any) -> list[tuple[Any, Any]]:
    """First number and sixteens of both halves."""
    sixteens = emit.builder.sdiv(dim, emit.const(16))
    first = emit.builder.sdiv(emit.offset(sixteens, 1), emit.const(2))
    return [(emit.const(0), first), (emit.times(first, 16), emit.builder.sub(sixteens, first))]


def round_numbers(emit: Emitter, x: Any, turns: Any, out: Any, scale_at: Any, sum_at: Any = None) -> None:
    """Sixteen floats a turn as int8, their scale, and where it is wanted their sum."""
    builder, kind, ints = emit.builder, floats(LANES), ir.VectorType(INT32, LANES)
    tops = emit.variable(emit.zeros(LANES))
    with emit.loop(turns) as turn:
        value = emit.load(emit.offset(x, emit.times(turn, 4 * LANES)), kind)
        size = emit.call(f"llvm.fabs.v{LANES}f32", kind, [value])
        builder.store(emit.call(f"llvm.maximum.v{LANES}f32", kind, [size, builder.load(tops)]), tops)
    # unlike a comparison, it passes on what is not a number
    top = emit.call(f"llvm.vector.reduce.fmaximum.v{LANES}f32", FLOAT, [builder.load(tops)])
    zero, limit = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 127.0)
    inverse = builder.select(builder.fcmp_ordered("==", top, zero), zero, builder.fdiv(limit, top))
    factor, total = emit.broadcast(inverse, LANES), emit.variable(ir.Constant(ints, [0] * LANES))
    with emit.loop(turns) as turn:
        value = emit.load(emit.offset(x, emit.times(turn, 4 * LANES)), kind)
        bits = builder.bitcast(emit.fma(value, factor, emit.constant(MAGIC, LANES)), ints)
        whole = builder.sub(bits, ir.Constant(ints, [MAGIC_BITS] * LANES))
        builder.store(builder.add(builder.load(total), whole), total)
        emit.store(builder.trunc(whole, bytes_(LANES)), emit.offset(out, emit.times(turn, LANES)))
    emit.store(builder.fdiv(top, limit), scale_at)
    if sum_at is not None:
        emit.store(emit.call(f"llvm.vector.reduce.add.v{LANES}i32", INT32, [builder.load(total)]), sum_at)


@instruction()
def round_head(emit: Emitter, x: Any, dim: Any, out: Any) -> None:
    """`dim` floats become a head in memory: int8 = round(x / s) with s = max|x| / 127 of each half."""
    tail = emit.offset(out, dim)
    for i, (first, turns) in enumerate(_halves(emit, dim)):
        source, scale_at, sum_at = emit.offset(x, emit.times(first, 4)), 4 * i, 8 + 4 * i
        to = emit.offset(out, first)
        round_numbers(emit, source, turns, to, emit.offset(tail, scale_at), emit.offset(tail, sum_at))


@instruction()
def round_key(emit: Emitter, x: Any, dim: Any, out: Any) -> None:
    """The same without the sums: nothing is written there."""
    for i, (first, turns) in enumerate(_halves(emit, dim)):
        source = emit.offset(x, emit.times(first, 4))
        round_numbers(emit, source, turns, emit.offset(out, first), emit.offset(out, dim, 4 * i))


def _dot(emit: Emitter, total: Any, keys: Any, query: Any) -> Any:
    """total[r] += sum of keys[4r : 4r+4] * query[4r : 4r+4]."""
    if VARIANT == "sdot":
        return emit.call("llvm.aarch64.neon.sdot.v4i32.v16i8", SUMS, [total, keys, query])
    if (
        VARIANT == "vnni"
    ):  # it multiplies unsigned by signed bytes: 128 is added, its share taken off the sums
        unsigned = emit.builder.xor(keys, bytes_(16)([0x80] * 16))
        return emit.call("llvm.x86.avx512.vpdpbusd.128", SUMS, [total, unsigned, query])
    return emit.add_fours(total, keys, query)


def _add_neighbours(emit: Emitter, first: Any, second: Any) -> Any:
    if VARIANT == "sdot":
        return emit.call("llvm.aarch64.neon.addp.v4i32", SUMS, [first, second])
    masks = [ir.Constant(SUMS, list(range(start, 8, 2))) for start in (0, 1)]
    return emit.builder.add(*(emit.builder.shuffle_vector(first, second, mask) for mask in masks))


def _half_dots(
    emit: Emitter, queries: list[Any], rows: list[Any], first: Any, turns: Any, sums_at: Any
) -> list[Any]:
    """For each query the exact products of one half with SPAN keys, as floats."""
    builder, kind = emit.builder, bytes_(16)
    sums = [[emit.variable(ir.Constant(SUMS, [0] * 4)) for _ in rows] for _ in queries]
    with emit.loop(turns) as turn:
        at = emit.offset(first, emit.times(turn, 16))
        each = [emit.load(emit.offset(query, at), kind) for query in queries]
        for p, row in enumerate(rows):
            key = emit.load(emit.offset(row, at), kind)
            for q, query in enumerate(each):
                builder.store(_dot(emit, builder.load(sums[q][p]), key, query), sums[q][p])
    found = []
    for q, of_query in enumerate(sums):
        lanes = [builder.load(total) for total in of_query] * (SPAN // len(rows))
        while len(lanes) > 1:
            lanes = [_add_neighbours(emit, *pair) for pair in zip(lanes[::2], lanes[1::2], strict=True)]
        whole = lanes[0]
        if VARIANT == "vnni":
            excess = builder.mul(emit.load(emit.offset(queries[q], sums_at), INT32), ir.Constant(INT32, 128))
            whole = builder.sub(whole, emit.spread(excess, 4))
        found.append(builder.sitofp(whole, floats(4)))
    return found


def _key_scales(emit: Emitter, rows: list[Any], dim: Any) -> list[Any]:
    """Of the first halves of SPAN keys and of the second."""
    pairs = [emit.load(emit.offset(row, dim), floats(2)) for row in rows] * (SPAN // len(rows))
    whole, shuffle = ir.Constant(SUMS, [0, 1, 2, 3]), emit.builder.shuffle_vector
    both = [shuffle(a, b, whole) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    return [shuffle(*both, ir.Constant(SUMS, list(range(half, 8, 2)))) for half in (0, 1)]


def _tile(emit: Emitter, span: int, num_queries: int, *operands: Any) -> None:
    """out[q, p] = queries[q] · keys[p] for `span` positions (SPAN or 1), as tiles.score_tile, from heads that
    are rounded."""
    (queries, keys, places, dim, out, stride), builder = operands, emit.builder
    rows = addresses(emit, keys, places, span)
    for row in addresses(emit, keys, emit.offset(places, PLACE * AHEAD), span):
        emit.prefetch(row)
        emit.prefetch(emit.offset(row, 64))
    own = [emit.offset(queries, emit.times(emit.offset(dim, TAIL), q)) for q in range(num_queries)]
    halves = [(*half, emit.offset(dim, 8 + 4 * i)) for i, half in enumerate(_halves(emit, dim))]
    dots = [_half_dots(emit, own, rows, *half) for half in halves]
    scales = _key_scales(emit, rows, dim)
    for q, query in enumerate(own):
        factors = [emit.broadcast(emit.load(emit.offset(query, dim, 4 * i), FLOAT), 4) for i in (0, 1)]
        first, second = (builder.fmul(factor, scale) for factor, scale in zip(factors, scales, strict=True))
        lanes = emit.fma(dots[0][q], first, builder.fmul(dots[1][q], second))
        found = lanes if span == SPAN else builder.extract_element(lanes, emit.first)
        emit.store(found, emit.offset(out, emit.times(stride, q)))


score_rounded = instruction(constants=1, most=SCORED, operands=6)(_tile)
