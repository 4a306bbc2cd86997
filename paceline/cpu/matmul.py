"""y = x Wᵀ + b for a few or many tokens, bitwise the same for each token however many there are.

Float weights lie in tiles of 16 output rows, [ceil(N / 16)][K][16]: SIMD runs across the rows, so every
output is one chain of fused multiply-adds over k, in order, whichever tile height computes it. Integer
weights: see dots.py. A product is shared by threads, each of which does a contiguous range of tiles;
`Activations` says where x lies and in which form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.cpu import dots
from paceline.cpu.compile import piece, unrolled
from paceline.cpu.dots import dot_tile
from paceline.cpu.lanes import LANES, Emitter, floats, instruction
from paceline.models.quantize import DOT_ROWS, GROUP

MAX_TOKENS = 6  # tokens in a float tile: 6 * 4 accumulators of the 32 NEON registers
UNROLL = 4  # values of k in one turn of the inner loop
AHEAD = 1024  # prefetch distance in bytes
# rows of x worked on at a time: they stay in the second-level cache while the weights stream by
X_BLOCK_BYTES = 128 * 1024
DOT_TOKENS, MOST_DOT_TOKENS = dots.USUAL_TOKENS, dots.MAX_TOKENS
GROUP_8, GROUP_4, BLOCK_8, BLOCK_4 = GROUP[8], GROUP[4], dots.BLOCK[8], dots.BLOCK[4]


class Matrix(NamedTuple):
    """Where packed weights lie. It borrows the memory: whoever made it keeps the tensors alive."""

    weight: int  # address of the tiles
    bias: int  # address of a float for each row of the tiles
    k: int  # width of x, rounded up to whole groups
    n: int  # outputs, rounded up to whole tiles


class Activations(NamedTuple):
    """Where the input of a product lies: rows of floats, or int8 with scales and sums [groups, rows]."""

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
        first = emit.offset(x, emit.times(turn, 4 * UNROLL))
        columns = [
            emit.load(emit.offset(first, emit.times(x_stride, t)), floats(UNROLL)) for t in range(len(sums))
        ]
        for k in range(UNROLL):
            weight = emit.load(emit.offset(here, 4 * LANES * k), floats(LANES))
            for total, column in zip(sums, columns, strict=True):
                emit.accumulate(total, weight, emit.splat(column, k, LANES))


@instruction(most=MAX_TOKENS)
def float_tile(
    emit: Emitter, tokens: int, weights: Any, x: Any, bias: Any, k: Any, y: Any, y_stride: Any
) -> None:
    """16 outputs of `tokens` consecutive rows of x."""
    sums = [emit.variable(emit.load(bias, floats(LANES))) for _ in range(tokens)]
    _chain(emit, sums, weights, x, emit.times(k, 4), k)
    for t, total in enumerate(sums):
        emit.store(emit.builder.load(total), emit.offset(y, emit.times(y_stride, t)))


@piece
def _float_strip(weights, x, bias, rows, k, y, y_stride):  # type: ignore[no-untyped-def]
    """One tile of weights against `rows` rows of x, in strips of nearly equal height, MAX_TOKENS at most."""
    row = 0
    while row < rows:
        strips = (rows - row + MAX_TOKENS - 1) // MAX_TOKENS
        height = (rows - row + strips - 1) // strips
        float_tile(height, weights, x + row * k * 4, bias, k, y + row * y_stride, y_stride)
        row += height


@unrolled
def _dot_strip(bits, groups, weights, x, bias, rows, k, stride, y, y_stride):  # type: ignore[no-untyped-def]
    """The same with integers. The first strip is high: its arithmetic hides the reading of the weights."""
    row = 0
    while row < rows:
        height = rows - row if rows - row <= MOST_DOT_TOKENS else DOT_TOKENS
        here, scale, total = x.values + row * k, x.scales + row * 4, x.sums + row * 4
        out = y + row * y_stride
        dot_tile(bits, height, weights, here, scale, total, bias, k, stride, groups, out, y_stride)
        row += height


@unrolled
def _dot_share(bits, group, block_bytes, part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    y_stride, tiles, groups = m.n * 4, m.n // DOT_ROWS, m.k // group
    step = max(DOT_TOKENS, X_BLOCK_BYTES // m.k // DOT_TOKENS * DOT_TOKENS)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        own = Activations(x.values + first * m.k, x.scales + first * 4, x.sums + first * 4)
        for t in range(tiles * part // threads, tiles * (part + 1) // threads):
            weights, bias = m.weight + t * groups * block_bytes, m.bias + t * DOT_ROWS * 4
            out = y + first * y_stride + t * DOT_ROWS * 4
            _dot_strip(bits, groups, weights, own, bias, count, m.k, rows * 4, out, y_stride)


@piece
def product_32(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    """One thread's share: m is a Matrix, x Activations of `rows` rows, y [rows, n]."""
    y_stride, tiles = m.n * 4, m.n // LANES
    step = max(MAX_TOKENS, X_BLOCK_BYTES // (m.k * 4) // MAX_TOKENS * MAX_TOKENS)
    for first in range(0, rows, step):
        count, own = min(step, rows - first), x.values + first * m.k * 4
        for t in range(tiles * part // threads, tiles * (part + 1) // threads):
            weights, bias = m.weight + t * m.k * LANES * 4, m.bias + t * LANES * 4
            _float_strip(weights, own, bias, count, m.k, y + first * y_stride + t * LANES * 4, y_stride)


@piece
def product_8(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    _dot_share(8, GROUP_8, BLOCK_8, part, threads, m, x, y, rows)


@piece
def product_4(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
    _dot_share(4, GROUP_4, BLOCK_4, part, threads, m, x, y, rows)


@piece
def outputs_of(matrix, first, count):  # type: ignore[no-untyped-def]
    """Some of an int8 matrix's outputs; both are multiples of DOT_ROWS."""
    tile_bytes = matrix.k // GROUP_8 * BLOCK_8
    return Matrix(matrix.weight + first // DOT_ROWS * tile_bytes, matrix.bias + first * 4, matrix.k, count)
