"""y = x Wᵀ + b for a few or many tokens, bitwise the same for each token however many there are.

Float weights lie in tiles of 16 output rows, [ceil(N / 16)][K][16]: SIMD runs across the rows, so every
output is one chain of fused multiply-adds over k, in order, whichever tile height computes it. Integer
weights: see dots.py. A product is shared by threads, each of which does a contiguous range of tiles;
`Activations` says where x lies and in which form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from paceline.cpu import dots
from paceline.cpu.compile import piece, unrolled
from paceline.cpu.dots import dot_tile
from paceline.cpu.lanes import LANES, Emitter, floats

MAX_TOKENS = 6  # tokens in a float tile: 6 * 4 accumulators of the 32 NEON registers
UNROLL = 4  # values of k in one turn of the inner loop
AHEAD = 1024  # prefetch distance in bytes
X_BLOCK_BYTES = (
    128 * 1024
)  # rows of x worked on at a time: they stay in the second-level cache while the weights stream by
DOT_ROWS, DOT_TOKENS, MOST_DOT_TOKENS = dots.ROWS, dots.USUAL_TOKENS, dots.MAX_TOKENS
GROUP_8, GROUP_4, BLOCK_8, BLOCK_4 = dots.GROUP[8], dots.GROUP[4], dots.BLOCK[8], dots.BLOCK[4]


class Matrix(NamedTuple):
    """Where packed weights lie. It borrows the memory: whoever made it keeps the tensors alive."""

    weight: int  # address of the tiles
    bias: int  # address of a float for each row of the tiles
    k: int  # width of x, rounded up to whole groups
    n: int  # outputs, rounded up to whole tiles


class Activations(NamedTuple):
    """Where the input of a product lies: rows of floats, or of int8 with a scale and a sum for each group and
    row, [groups, rows].
    """

    values: int
    scales: int
    sums: int


def _chain(emit: Emitter, sums: list[Any], weights: Any, x: Any, x_stride: Any, count: Any) -> None:
    """sums[t] += w[k] * x[t, k] for `count` values of k, in order."""
    step = 4 * LANES * UNROLL
    with emit.loop(emit.builder.sdiv(count, emit.const(UNROLL))) as turn:
        here = emit.offset(weights, emit.times(turn, step))
        for line in range(0, step, 64):
            emit.prefetch(emit.offset(here, line + AHEAD))
        rows = [
            emit.offset(x, emit.times(x_stride, t), emit.times(turn, 4 * UNROLL)) for t in range(len(sums))
        ]
        columns = [emit.load(row, floats(UNROLL)) for row in rows]
        for k in range(UNROLL):
            weight = emit.load(emit.offset(here, 4 * LANES * k), floats(LANES))
            for total, column in zip(sums, columns, strict=True):
                emit.accumulate(total, weight, emit.splat(column, k, LANES))


@intrinsic(prefer_literal=True)
def float_tile(
    _context: Any, tokens: Any, weights: Any, x: Any, bias: Any, k: Any, y: Any, y_stride: Any
) -> Any:
    """16 outputs of `tokens` (a compile-time constant) consecutive rows of x."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, x, bias, k, y, y_stride = arguments[1:]
        emit = Emitter(builder)
        sums = [emit.variable(emit.load(bias, floats(LANES))) for _ in range(tokens.literal_value)]
        _chain(emit, sums, weights, x, emit.times(k, 4), k)
        for t, total in enumerate(sums):
            emit.store(builder.load(total), emit.offset(y, emit.times(y_stride, t)))
        return context.get_dummy_value()

    return types.void(tokens, *[types.int64] * 6), generate


@piece
def _float_strip(weights, x, bias, rows, k, y, y_stride):  # type: ignore[no-untyped-def]
    """One tile of weights against `rows` rows of x, in strips of at most MAX_TOKENS of nearly equal
    height.
    """
    row = 0
    while row < rows:
        strips = (rows - row + MAX_TOKENS - 1) // MAX_TOKENS
        height = (rows - row + strips - 1) // strips
        here, out = x + row * k * 4, y + row * y_stride
        if height == 1:
            float_tile(1, weights, here, bias, k, out, y_stride)
        elif height == 2:
            float_tile(2, weights, here, bias, k, out, y_stride)
        elif height == 3:
            float_tile(3, weights, here, bias, k, out, y_stride)
        elif height == 4:
            float_tile(4, weights, here, bias, k, out, y_stride)
        elif height == 5:
            float_tile(5, weights, here, bias, k, out, y_stride)
        else:
            float_tile(6, weights, here, bias, k, out, y_stride)
        row += height


@unrolled
def _dot_strip(bits, group, weights, x, scales, sums, bias, rows, k, all_rows, y, y_stride):  # type: ignore[no-untyped-def]
    """The same with integers. The first strip is high: its arithmetic hides the reading of the weights."""
    row, groups, stride = 0, k // group, all_rows * 4
    while row < rows:
        height = rows - row if rows - row <= MOST_DOT_TOKENS else DOT_TOKENS
        here, scale, total, out = x + row * k, scales + row * 4, sums + row * 4, y + row * y_stride
        if height == 1:
            dot_tile(bits, 1, weights, here, scale, total, bias, k, stride, groups, out, y_stride)
        elif height == 2:
            dot_tile(bits, 2, weights, here, scale, total, bias, k, stride, groups, out, y_stride)
        elif height == 3:
            dot_tile(bits, 3, weights, here, scale, total, bias, k, stride, groups, out, y_stride)
        elif height == 4:
            dot_tile(bits, 4, weights, here, scale, total, bias, k, stride, groups, out, y_stride)
        elif height == 5:
            dot_tile(bits, 5, weights, here, scale, total, bias, k, stride, groups, out, y_stride)
        else:
            dot_tile(bits, 6, weights, here, scale, total, bias, k, stride, groups, out, y_stride)
        row += height


@unrolled
def _dot_share(bits, group, block_bytes, part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    y_stride, tiles, tile_bytes = m.n * 4, m.n // DOT_ROWS, m.k // group * block_bytes
    step = max(DOT_TOKENS, X_BLOCK_BYTES // m.k // DOT_TOKENS * DOT_TOKENS)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        for t in range(tiles * part // threads, tiles * (part + 1) // threads):
            _dot_strip(
                bits, group, m.weight + t * tile_bytes, x.values + first * m.k, x.scales + first * 4, x.sums + first * 4,
                m.bias + t * DOT_ROWS * 4, count, m.k, rows, y + first * y_stride + t * DOT_ROWS * 4, y_stride,
            )  # fmt: skip


@piece
def product_32(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    """One thread's share: m is a Matrix, x Activations of `rows` rows, y [rows, n]."""
    y_stride, tiles = m.n * 4, m.n // LANES
    step = max(MAX_TOKENS, X_BLOCK_BYTES // (m.k * 4) // MAX_TOKENS * MAX_TOKENS)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        for t in range(tiles * part // threads, tiles * (part + 1) // threads):
            out = y + first * y_stride + t * LANES * 4
            _float_strip(
                m.weight + t * m.k * LANES * 4,
                x.values + first * m.k * 4,
                m.bias + t * LANES * 4,
                count,
                m.k,
                out,
                y_stride,
            )


@piece
def product_8(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    _dot_share(8, GROUP_8, BLOCK_8, part, threads, m, x, y, rows)


@piece
def product_4(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    _dot_share(4, GROUP_4, BLOCK_4, part, threads, m, x, y, rows)
