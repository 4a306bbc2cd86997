"""Integer dot products: 8 outputs of a few tokens, weights int8 or int4, activations int8, one float scale a
group of k.

A tile is one stream of blocks, a block the weights of 8 rows for one group of k and then their scales (and
minima, for int4): [group / 4][8 rows][4 k] bytes, or for int4 [group / 8][8 rows][4] bytes whose low nibbles
are four k and high nibbles the next four. Invariant: the integers are exact and the float sum over groups is
one chain in order, so neither the number of tokens nor the instruction set changes a bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from paceline.cpu.features import VARIANT
from paceline.cpu.lanes import INT32, Emitter, bytes_, floats, instruction
from paceline.models.quantize import DOT_ROWS, GROUP

ROWS = DOT_ROWS  # outputs of a tile
BLOCK = {8: ROWS * GROUP[8] + 2 * ROWS, 4: ROWS * GROUP[4] // 2 + 4 * ROWS}  # bytes
USUAL_TOKENS = 4  # of a tile: what keeps every sum in one of 32 registers
MAX_TOKENS = 6  # of the only or last tile: spilling some sums costs less than another turn over the weights
AHEAD = 512  # prefetch distance in bytes: measured, more or less is slower
WIDTH = 8 if VARIANT == "vnni" else 4  # outputs of a register
# A half-precision scale's bits, shifted into a float, are worth 2**-112 of it, and it is stored times 2**8:
# token scales make up for both.
SCALE_SHIFT = 112 - 8


class Sources(NamedTuple):
    """Addresses a tile reads, and the strides between tokens or groups."""

    weights: Any
    x: Any
    scales: Any
    sums: Any
    bias: Any
    x_stride: Any
    group_stride: Any


def _ints(width: int) -> ir.VectorType:
    return ir.VectorType(INT32, width)


def dot(emit: Emitter, total: Any, weights: Any, quad: Any) -> Any:
    """total[r] += sum of weights[4r : 4r+4] * quad[0:4]: `quad` is the same four bytes for every row."""
    if VARIANT == "sdot":
        return emit.call("llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, [total, weights, quad])
    if VARIANT == "vnni":
        return emit.call("llvm.x86.avx512.vpdpbusd.256", total.type, [total, weights, quad])
    return emit.add_fours(total, weights, quad)


def _weights(emit: Emitter, bits: int, block: Any, quad: int) -> list[Any]:
    """Four values of k of all rows, as bytes that `dot` takes."""
    kind, builder, step = bytes_(4 * WIDTH), emit.builder, 4 * WIDTH
    start = 4 * ROWS * (quad if bits == 8 else quad // 2)
    raw = [emit.load(emit.offset(block, start + at), kind) for at in range(0, 4 * ROWS, step)]
    if bits == 4:
        if quad % 2:
            return [builder.lshr(each, kind([4] * step)) for each in raw]
        return [builder.and_(each, kind([15] * step)) for each in raw]
    # x86 multiplies unsigned by signed bytes: 128 is added here and taken off the sums before they start
    return [builder.xor(each, kind([0x80] * step)) for each in raw] if VARIANT == "vnni" else raw


def _start(emit: Emitter, bits: int, sources: Sources, token: int, group: Any) -> Any:
    zero = ir.Constant(_ints(WIDTH), [0] * WIDTH)
    if VARIANT != "vnni" or bits == 4:
        return zero
    total = emit.load(emit.offset(sources.sums, emit.times(group, sources.group_stride), 4 * token), INT32)
    excess = emit.builder.mul(total, ir.Constant(INT32, 128))
    return emit.builder.sub(zero, emit.spread(excess, WIDTH))


def _group_dots(
    emit: Emitter, bits: int, tokens: int, sources: Sources, block: Any, group: Any
) -> list[list[Any]]:
    """The integer sums of one group: [token][part]."""
    parts = ROWS // WIDTH
    totals = [[_start(emit, bits, sources, t, group)] * parts for t in range(tokens)]
    first = emit.offset(sources.x, emit.times(group, GROUP[bits]))
    rows = [emit.offset(first, emit.times(sources.x_stride, t)) for t in range(tokens)]
    fours: list[Any] = []
    for quad in range(GROUP[bits] // 4):
        if quad % 4 == 0:
            fours = [emit.load(emit.offset(row, 4 * quad), _ints(4)) for row in rows]
        if quad * ROWS * bits // 2 % 64 == 0:  # a new line of the weights
            emit.prefetch(emit.offset(block, quad * ROWS * bits // 2 + AHEAD))
        weights = _weights(emit, bits, block, quad)
        for t, four in enumerate(fours):
            same = emit.builder.bitcast(emit.splat(four, quad % 4, WIDTH), bytes_(4 * WIDTH))
            totals[t] = [dot(emit, *pair, same) for pair in zip(totals[t], weights, strict=True)]
    return totals


def _halves(emit: Emitter, address: Any) -> list[Any]:
    """ROWS half-precision numbers, not negative, as floats 2**-112 times as large: their bits fit."""
    short = ir.VectorType(ir.IntType(16), WIDTH)
    raw = [emit.load(emit.offset(address, 2 * at), short) for at in range(0, ROWS, WIDTH)]
    shift = ir.Constant(_ints(WIDTH), [13] * WIDTH)
    wide = [emit.builder.shl(emit.builder.zext(each, _ints(WIDTH)), shift) for each in raw]
    return [emit.builder.bitcast(each, floats(WIDTH)) for each in wide]


def _offsets(emit: Emitter, sums: Any, scales: Any) -> Any:
    """What a group's minima are multiplied by, for up to four tokens: minus the scaled sum of integers."""
    totals = emit.builder.sitofp(emit.load(sums, _ints(scales.type.count)), scales.type)
    return emit.builder.fneg(emit.builder.fmul(totals, scales))


def _tile(
    emit: Emitter, bits: int, tokens: int, sources: Sources, groups: Any, y: Any, y_stride: Any
) -> None:
    builder = emit.builder
    parts = range(ROWS // WIDTH)
    sums = [
        [emit.variable(emit.load(emit.offset(sources.bias, 4 * WIDTH * p), floats(WIDTH))) for p in parts]
        for _ in range(tokens)
    ]
    with emit.loop(groups) as group:
        block = emit.offset(sources.weights, emit.times(group, BLOCK[bits]))
        totals = _group_dots(emit, bits, tokens, sources, block, group)
        scales = _halves(emit, emit.offset(block, BLOCK[bits] - (2 * ROWS if bits == 8 else 4 * ROWS)))
        minima = _halves(emit, emit.offset(block, BLOCK[bits] - 2 * ROWS)) if bits == 4 else []
        first = emit.times(group, sources.group_stride)
        fours = [
            emit.load(emit.offset(sources.scales, first, 4 * t), floats(min(4, tokens - t)))
            for t in range(0, tokens, 4)
        ]
        at = emit.offset(sources.sums, first)
        offsets = [_offsets(emit, emit.offset(at, 16 * i), four) for i, four in enumerate(fours) if minima]
        # A token's number is a lane of a register: multiplying by it is one instruction, by a scalar two.
        for t in range(tokens):
            spread = emit.splat(fours[t // 4], t % 4, WIDTH)
            for p in parts:
                whole = builder.sitofp(totals[t][p], floats(WIDTH))
                emit.accumulate(sums[t][p], whole, builder.fmul(scales[p], spread))
            if bits == 4:
                for p in parts:
                    emit.accumulate(sums[t][p], minima[p], emit.splat(offsets[t // 4], t % 4, WIDTH))
    for t in range(tokens):
        for p in parts:
            emit.store(builder.load(sums[t][p]), emit.offset(y, emit.times(y_stride, t), 4 * WIDTH * p))


@instruction(constants=1, most=MAX_TOKENS, operands=10)
def dot_tile(emit: Emitter, bits: int, tokens: int, *operands: Any) -> None:
    """8 outputs of `tokens` consecutive rows of x. operands: the fields of Sources, groups, y, its stride."""
    _tile(emit, bits, tokens, Sources(*operands[:7]), *operands[7:])
