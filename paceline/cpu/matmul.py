"""y = x Wᵀ + b for a few or many tokens, bitwise the same for each token however many there are.

Weights lie in tiles of 16 output rows: [ceil(N / 16)][K][16] floats, bytes or nibble pairs (two values of k to a byte). SIMD runs
across the 16 rows, so every output is one chain of fused multiply-adds over k, in order, whichever tile height computes it.
Quantized weights are stored plus 2**(bits-1), so never negative; the products of a group of k are summed first, and the sum times
the group's scale is added to the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numba
from numba import prange, types
from numba.extending import intrinsic

from paceline.cpu.compile import kernel, unrolled
from paceline.cpu.lanes import LANES, Emitter, bytes_, floats

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 6  # tokens in a tile: 6 * 4 accumulators of the 32 NEON registers
UNROLL = 4  # values of k in one turn of the inner loop
AHEAD = 1024  # prefetch distance in bytes
X_BLOCK_BYTES = 256 * 1024  # rows of x worked on at a time: they stay in the second-level cache while the weights stream by


def _weights(emit: Emitter, bits: int, address: Any) -> list[Any]:
    """The weights of UNROLL consecutive k: one <16 x float> each."""
    builder = emit.builder
    if bits == 32:
        return [emit.load(emit.offset(address, 4 * LANES * k), floats(LANES)) for k in range(UNROLL)]
    if bits == 8:
        raw = [emit.load(emit.offset(address, LANES * k), bytes_(LANES)) for k in range(UNROLL)]
    else:
        pairs = [emit.load(emit.offset(address, LANES * k), bytes_(LANES)) for k in range(UNROLL // 2)]
        low, four = bytes_(LANES)([15] * LANES), bytes_(LANES)([4] * LANES)
        raw = [half for pair in pairs for half in (builder.and_(pair, low), builder.lshr(pair, four))]
    return [emit.widen(each, 2 ** (bits - 1)) for each in raw]


def _chain(emit: Emitter, bits: int, sums: list[Any], weights: Any, x: Any, x_stride: Any, count: Any) -> None:
    """sums[t] += w[k] * x[t, k] for `count` values of k, in order."""
    step = bits * LANES * UNROLL // 8
    with emit.loop(emit.builder.sdiv(count, emit.const(UNROLL))) as turn:
        here = emit.offset(weights, emit.times(turn, step))
        for line in range(0, step, 64):
            emit.prefetch(emit.offset(here, line + AHEAD))
        rows = [emit.offset(x, emit.times(x_stride, t), emit.times(turn, 4 * UNROLL)) for t in range(len(sums))]
        columns = [emit.load(row, floats(UNROLL)) for row in rows]
        for k, weight in enumerate(_weights(emit, bits, here)):
            for total, column in zip(sums, columns, strict=True):
                emit.accumulate(total, weight, emit.splat(column, k, LANES))


def _float_tile(emit: Emitter, tokens: int, weights: Any, x: Any, y: Any, bias: Any, k: Any, y_stride: Any) -> None:
    sums = [emit.variable(emit.load(bias, floats(LANES))) for _ in range(tokens)]
    _chain(emit, 32, sums, weights, x, emit.times(k, 4), k)
    for t, total in enumerate(sums):
        emit.store(emit.builder.load(total), emit.offset(y, emit.times(y_stride, t)))


def _grouped_tile(
    emit: Emitter, bits: int, tokens: int, weights: Any, scales: Any, x: Any, y: Any, bias: Any, k: Any, group: Any, y_stride: Any
) -> None:
    outputs = [emit.offset(y, emit.times(y_stride, t)) for t in range(tokens)]
    for output in outputs:
        emit.store(emit.load(bias, floats(LANES)), output)
    group_bytes = emit.builder.sdiv(emit.times(group, bits * LANES), emit.const(8))
    with emit.loop(emit.builder.sdiv(k, group)) as g:
        sums = [emit.variable(emit.zeros(LANES)) for _ in range(tokens)]
        here = emit.offset(weights, emit.times(g, group_bytes))
        _chain(emit, bits, sums, here, emit.offset(x, emit.times(emit.times(g, group), 4)), emit.times(k, 4), group)
        scale = emit.load(emit.offset(scales, emit.times(g, 4 * LANES)), floats(LANES))
        for total, output in zip(sums, outputs, strict=True):  # the outer sums wait in memory: the registers are all taken
            emit.store(emit.fma(emit.builder.load(total), scale, emit.load(output, floats(LANES))), output)


@intrinsic(prefer_literal=True)
def tile(
    _context: Any, bits: Any, tokens: Any, weights: Any, scales: Any, x: Any, y: Any, bias: Any, k: Any, group: Any, y_stride: Any
) -> Any:
    """16 outputs of `tokens` consecutive rows of x; `bits` and `tokens` are compile-time constants."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, scales, x, y, bias, k, group, y_stride = arguments[2:]
        emit = Emitter(builder)
        if bits.literal_value == 32:
            _float_tile(emit, tokens.literal_value, weights, x, y, bias, k, y_stride)
        else:
            _grouped_tile(emit, bits.literal_value, tokens.literal_value, weights, scales, x, y, bias, k, group, y_stride)
        return context.get_dummy_value()

    return types.void(bits, tokens, *[types.int64] * 8), generate


@unrolled
def _strip(bits, w, scales, x, y, bias, rows, k, group, y_stride):  # type: ignore[no-untyped-def]
    """One tile of weights against `rows` rows of x, in strips of at most MAX_TOKENS of nearly equal height."""
    row = 0
    while row < rows:
        left = rows - row
        strips = (left + MAX_TOKENS - 1) // MAX_TOKENS
        height = (left + strips - 1) // strips
        here, out = x + row * k * 4, y + row * y_stride
        if height == 1:
            tile(bits, 1, w, scales, here, out, bias, k, group, y_stride)
        elif height == 2:
            tile(bits, 2, w, scales, here, out, bias, k, group, y_stride)
        elif height == 3:
            tile(bits, 3, w, scales, here, out, bias, k, group, y_stride)
        elif height == 4:
            tile(bits, 4, w, scales, here, out, bias, k, group, y_stride)
        elif height == 5:
            tile(bits, 5, w, scales, here, out, bias, k, group, y_stride)
        else:
            tile(bits, 6, w, scales, here, out, bias, k, group, y_stride)
        row += height


@unrolled
def _share(bits, part, parts, w, scales, x, y, bias, rows, k, group, tiles):  # type: ignore[no-untyped-def]
    """One thread's share of the tiles, for a block of rows of x at a time."""
    share = (tiles + parts - 1) // parts
    y_stride = tiles * LANES * 4
    block = max(MAX_TOKENS, X_BLOCK_BYTES // (k * 4) // MAX_TOKENS * MAX_TOKENS)
    for first in range(0, rows, block):
        for t in range(part * share, min(tiles, (part + 1) * share)):
            _strip(
                bits, w + t * (k * bits * LANES // 8), scales + t * (k // group) * LANES * 4, x + first * k * 4,
                y + first * y_stride + t * LANES * 4, bias + t * LANES * 4, min(block, rows - first), k, group, y_stride,
            )  # fmt: skip


class Tiles(NamedTuple):
    """Where a packed weight lies. It borrows the memory: whoever made it keeps the tensors alive."""

    weight: int  # address of [tiles, K, 16] float32 or uint8, or [tiles, K / 2, 16] uint8 of nibble pairs
    scales: int  # address of [tiles, K / group, 16] float32; not read for float weights
    bias: int  # address of [tiles * 16] float32
    k: int
    group: int
    tiles: int


@kernel(parallel=True)
def product_32(w, x, y, rows, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        _share(32, part, threads, w.weight, w.scales, x, y, w.bias, rows, w.k, w.group, w.tiles)


@kernel(parallel=True)
def product_8(w, x, y, rows, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        _share(8, part, threads, w.weight, w.scales, x, y, w.bias, rows, w.k, w.group, w.tiles)


@kernel(parallel=True)
def product_4(w, x, y, rows, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        _share(4, part, threads, w.weight, w.scales, x, y, w.bias, rows, w.k, w.group, w.tiles)


PRODUCTS = {32: product_32, 8: product_8, 4: product_4}


def tiles_of(weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, bits: int, k: int, group: int) -> Tiles:
    assert all(t.is_contiguous() for t in (weight, scales, bias)), "tiles are contiguous"
    assert k % UNROLL == 0, "rows are a multiple of the unrolled inner loop"
    tiles = weight.shape[0]
    assert weight.numel() * weight.element_size() == tiles * k * bits * LANES // 8, "the tiles do not match the number of bits"
    return Tiles(weight.data_ptr(), scales.data_ptr(), bias.data_ptr(), k, group, tiles)


def product(tiles: Tiles, bits: int, x: torch.Tensor) -> torch.Tensor:
    """x [T, K] -> [T, tiles * 16]."""
    import torch

    rows, width = x.shape
    assert width == tiles.k, "the input is as wide as the weights"
    assert x.is_contiguous() & (x.dtype is torch.float32), "the kernels read contiguous float32"
    y = torch.empty((rows, tiles.tiles * LANES))
    PRODUCTS[bits](tiles, x.data_ptr(), y.data_ptr(), rows, numba.get_num_threads())
    return y
