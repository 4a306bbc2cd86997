"""y = x Wᵀ + b for a few or many tokens, bitwise the same for each token however many there are.

Float weights lie in tiles of 16 output rows, [ceil(N / 16)][K][16]. An integer tile is a stream of blocks:
the weights of 8 rows for one group of k and then their scales (and minima, for int4), [group / 4][8 rows][4
k] bytes, or for int4 [group / 8][8 rows][4] bytes whose low nibbles are four k and high nibbles the next
four. Invariant: integers are exact and an output is one chain of float sums in the order of k, so neither the
number of tokens nor the instruction set changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from paceline.cpu import amx
from paceline.cpu.compile import UNSIGNED_FIRST, VARIANT, piece, piece_named
from paceline.cpu.lanes import FLOAT, INT32, LANES, Emitter, bytes_, floats, instruction, ints
from paceline.models.quantize import BLOCK, DOT_ROWS, GROUP

ROWS = DOT_ROWS  # outputs of a tile
USUAL_TOKENS = 4  # of a tile: what keeps every sum in one of 32 registers
MAX_TOKENS = 6  # of the only or last tile: spilling some sums costs less than another turn over the weights
AHEAD = 512  # prefetch distance in bytes: measured, more or less is slower
IS_UNSIGNED = VARIANT in UNSIGNED_FIRST
WIDTH = 8 if IS_UNSIGNED else 4  # outputs of a register
# A half-precision scale's bits, shifted into a float, are worth 2**-112 of it, and it is stored times 2**8:
# token scales make up for both.
SCALE_SHIFT = 112 - 8
REBASE = 2.0**SCALE_SHIFT
FLOAT_TOKENS = 6  # of a tile, at most: 6 * 4 accumulators of the 32 NEON registers
UNROLL = 4  # values of k in one turn of the inner loop
TURN_BYTES = 4 * LANES * UNROLL
FLOAT_AHEAD = 1024  # prefetch distance in bytes
# rows of x worked on at a time: they stay in the second-level cache while the weights stream by
X_BLOCK_BYTES = 128 * 1024
SIZES = {bits: BLOCK[bits] * 32 // (ROWS * GROUP[bits]) for bits in (8, 4)} | {32: 128}  # bytes of 32 weights
GROUP_8, BLOCK_8, SIZE_8 = GROUP[8], BLOCK[8], SIZES[8]
Row = Callable[[int], Any]


class Matrix(NamedTuple):
    """Where packed weights lie. It borrows the memory: its maker keeps the tensors alive."""

    weight: int  # address of the tiles
    bias: int  # address of a float for each row of the tiles
    k: int  # width of x, rounded up to whole groups
    n: int  # outputs, rounded up to whole tiles


def _weights(emit: Emitter, bits: int, block: Any, quad: int) -> list[Any]:
    """Four values of k of all rows, as bytes that `emit.dot` takes first."""
    kind, builder, step = bytes_(4 * WIDTH), emit.builder, 4 * WIDTH
    start = 4 * ROWS * (quad if bits == 8 else quad // 2)
    raw = [emit.load(emit.offset(block, start + at), kind) for at in range(0, 4 * ROWS, step)]
    if bits == 4:
        if quad % 2:
            return [builder.lshr(each, kind([4] * step)) for each in raw]
        return [builder.and_(each, kind([15] * step)) for each in raw]
    # x86 multiplies unsigned by signed bytes: 128 is added here and taken off the sums before they start
    return [builder.xor(each, kind([0x80] * step)) for each in raw] if IS_UNSIGNED else raw


def _group_dots(emit: Emitter, bits: int, block: Any, rows: list[Any], sums_at: Any) -> list[list[Any]]:
    """The integer sums of one group: [token][part]. rows: where the group begins in each token's x."""
    starts, fours = [ints(WIDTH)([0] * WIDTH) for _ in rows], []
    if IS_UNSIGNED and bits == 8:
        totals = [emit.load(emit.offset(sums_at, 4 * t), INT32) for t in range(len(rows))]
        starts = [emit.broadcast(emit.builder.mul(total, INT32(-128)), WIDTH) for total in totals]
    dots = [[start] * (ROWS // WIDTH) for start in starts]
    for quad in range(GROUP[bits] // 4):
        if quad % 4 == 0:
            fours = [emit.load(emit.offset(row, 4 * quad), ints(4)) for row in rows]
        if quad * ROWS * bits // 2 % 64 == 0:  # a new line of the weights
            emit.prefetch(emit.offset(block, quad * ROWS * bits // 2 + AHEAD))
        weights = _weights(emit, bits, block, quad)
        for t, four in enumerate(fours):  # the same four bytes for every row
            same = emit.builder.bitcast(emit.splat(four, quad % 4, WIDTH), bytes_(4 * WIDTH))
            dots[t] = [emit.dot(VARIANT, *pair, same) for pair in zip(dots[t], weights, strict=True)]
    return dots


@instruction(types.float32)
def stored_scale(emit: Emitter, at: Any) -> Any:
    """The half-precision scale at this address, for `embed`; numba itself has no half precision."""
    bits = emit.builder.zext(emit.load(at, ir.IntType(16)), INT32)
    return emit.builder.fmul(emit.builder.bitcast(emit.builder.shl(bits, INT32(13)), FLOAT), FLOAT(REBASE))


def _tile(emit: Emitter, bits: int, tokens: int, *operands: Any) -> None:
    """8 outputs of `tokens` consecutive rows of x. operands: addresses, strides between tokens or groups, and
    how many groups there are."""
    weights, x, scales_at, sums_at, bias, x_stride, group_stride, groups, y, y_stride = operands
    builder, parts = emit.builder, range(ROWS // WIDTH)
    starts = [emit.load(emit.offset(bias, 4 * WIDTH * p), floats(WIDTH)) for p in parts]
    sums = [[emit.variable(start) for start in starts] for _ in range(tokens)]
    with emit.loop(groups) as group:
        here, block = emit.times(group, GROUP[bits]), emit.offset(weights, emit.times(group, BLOCK[bits]))
        rows = [emit.offset(x, here, emit.times(x_stride, t)) for t in range(tokens)]
        dots = _group_dots(emit, bits, block, rows, emit.offset(sums_at, emit.times(group, group_stride)))
        ends = [emit.offset(block, BLOCK[bits] + 2 * WIDTH * p) for p in parts]
        scales = [emit.halves(emit.offset(end, -2 * ROWS if bits == 8 else -4 * ROWS), WIDTH) for end in ends]
        minima = [emit.halves(emit.offset(end, -2 * ROWS), WIDTH) for end in ends if bits == 4]
        first, fours, offsets = emit.times(group, group_stride), [], []
        for t in range(0, tokens, 4):
            width = min(4, tokens - t)
            fours.append(emit.load(emit.offset(scales_at, first, 4 * t), floats(width)))
            if bits == 4:  # what minima are multiplied by: minus the scaled sum of integers
                whole = emit.load(emit.offset(sums_at, first, 4 * t), ints(width))
                whole = builder.sitofp(whole, floats(width))
                offsets.append(builder.fneg(builder.fmul(whole, fours[-1])))
        # A token's number is a lane of a register: multiplying by it is one instruction, by a scalar two.
        for t in range(tokens):
            spread = emit.splat(fours[t // 4], t % 4, WIDTH)
            for p in parts:
                whole = builder.sitofp(dots[t][p], floats(WIDTH))
                emit.accumulate(sums[t][p], whole, builder.fmul(scales[p], spread))
            for p, minimum in enumerate(minima):
                emit.accumulate(sums[t][p], minimum, emit.splat(offsets[t // 4], t % 4, WIDTH))
    for t in range(tokens):
        for p in parts:
            to = emit.offset(y, emit.times(y_stride, t), 4 * WIDTH * p)
            emit.store(builder.load(sums[t][p]), to)


dot_tile = instruction(constants=1, most=MAX_TOKENS, operands=10)(_tile)


def multiply_floats(emit: Emitter, starts: list[Any], row: Row, *operands: Any, ahead: int = 0) -> None:
    """out[t, :16] = starts[t] + w[k] * x[t, k], in the order of k. row: bytes from x to row t. operands: w as
    [k][16], x, k, out, its stride. ahead: bytes between weights that are read and that are asked for."""
    weights, x, k, out, stride = operands
    sums = [emit.variable(start) for start in starts]
    with emit.loop(emit.builder.sdiv(k, emit.const(UNROLL))) as turn:
        here = emit.offset(weights, emit.times(turn, TURN_BYTES))
        for line in range(0, TURN_BYTES if ahead else 0, 64):
            emit.prefetch(emit.offset(here, line + ahead))
        first = emit.offset(x, emit.times(turn, 4 * UNROLL))
        rows = [emit.offset(first, row(t)) for t in range(len(sums))]
        columns = [emit.load(each, floats(UNROLL)) for each in rows]
        for i in range(UNROLL):
            weight = emit.load(emit.offset(here, 4 * LANES * i), floats(LANES))
            for total, column in zip(sums, columns, strict=True):
                emit.accumulate(total, weight, emit.splat(column, i, LANES))
    for t, total in enumerate(sums):
        emit.store(emit.builder.load(total), emit.offset(out, emit.times(stride, t)))


@instruction(most=FLOAT_TOKENS, operands=6)
def float_tile(emit: Emitter, tokens: int, *operands: Any) -> None:
    """16 outputs of `tokens` rows of x. operands: weights, x, bias, k, y, its stride."""
    weights, x, bias, k, y, stride = operands
    starts, row = [emit.load(bias, floats(LANES)) for _ in range(tokens)], lambda t: emit.times(k, 4 * t)
    multiply_floats(emit, starts, row, weights, x, k, y, stride, ahead=FLOAT_AHEAD)


@piece
def even_height(left, most):  # type: ignore[no-untyped-def]
    """Of the first of nearly equal tiles, `most` at most."""
    tiles = (left + most - 1) // most
    return (left + tiles - 1) // tiles


@piece
def product_32(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    """One thread's share: m is a Matrix, y [rows, n]; x has the addresses `values` of floats, or of int8 with
    `scales` and `sums` [groups, rows] (layer.Work)."""
    y_stride, tiles = m.n * 4, m.n // LANES
    step = max(FLOAT_TOKENS, X_BLOCK_BYTES // (m.k * 4) // FLOAT_TOKENS * FLOAT_TOKENS)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        for t in range(tiles * part // threads, tiles * (part + 1) // threads):
            weights, bias, row = m.weight + t * m.k * LANES * 4, m.bias + t * LANES * 4, first
            while row < last:
                height = even_height(last - row, FLOAT_TOKENS)
                out = y + row * y_stride + t * LANES * 4
                float_tile(height, weights, x.values + row * m.k * 4, bias, m.k, out, y_stride)
                row += height


def _integer_product(bits: int) -> Any:
    """The same with integers."""
    group, block_bytes = GROUP[bits], BLOCK[bits]

    @piece_named(f"product_{bits}")
    def product(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
        stride, tiles, groups = m.n * 4, m.n // ROWS, m.k // group
        step = max(USUAL_TOKENS, X_BLOCK_BYTES // m.k // USUAL_TOKENS * USUAL_TOKENS)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            for t in range(tiles * part // threads, tiles * (part + 1) // threads):
                tile, bias, row = m.weight + t * groups * block_bytes, m.bias + t * ROWS * 4, first
                while row < last:
                    height = last - row if last - row <= MAX_TOKENS else USUAL_TOKENS
                    own, scale, sums = x.values + row * m.k, x.scales + row * 4, x.sums + row * 4
                    out = y + row * stride + t * ROWS * 4
                    dot_tile(bits, height, tile, own, scale, sums, bias, m.k, rows * 4, groups, out, stride)
                    row += height

    return amx.tile_product(bits, product) if VARIANT == "amx" else product


product_8, product_4 = _integer_product(8), _integer_product(4)


@piece
def outputs_of(matrix, first, count):  # type: ignore[no-untyped-def]
    """Some of an int8 matrix's outputs; both are multiples of ROWS."""
    tile_bytes = matrix.k // GROUP_8 * BLOCK_8
    return Matrix(matrix.weight + first // ROWS * tile_bytes, matrix.bias + first * 4, matrix.k, count)
