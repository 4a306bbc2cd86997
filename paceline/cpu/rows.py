"""Row by row: norm, gated activation, rotary embedding with the write into the KV cache, embedding lookup,
and the form a product reads.

Invariant: a row's result is computed by the same instructions in the same order whatever the other rows are.
No fast-math: sums are written out in interleaved chains, and the exponential is a polynomial of ours
(lanes.py), the same in every lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from paceline.cpu.compile import piece, unrolled
from paceline.cpu.dots import BLOCK, SCALE_SHIFT
from paceline.cpu.lanes import (
    FLOAT,
    INT32,
    LANES,
    MAGIC,
    MAGIC_BITS,
    Emitter,
    byte_pointer,
    bytes_,
    float_pointer,
    floats,
    fma,
    instruction,
)
from paceline.models.quantize import DOT_ROWS, GROUP

ONE = np.float32(1)
GROUP_8, GROUP_4, BLOCK_8 = GROUP[8], GROUP[4], BLOCK[8]
WIDTH = 4
REBASE = float(2.0**SCALE_SHIFT)


@instruction(constants=1)
def gate_lanes(emit: Emitter, is_gelu: int, gate: Any, up: Any, out: Any, count: Any) -> None:
    """out = act(gate) * up over `count` floats, a multiple of 16. act is z * sigmoid(s): s is z for silu, and
    for gelu in its tanh form 2 * sqrt(2 / pi) * (z + 0.044715 * z ** 3)."""
    builder = emit.builder
    with emit.loop(builder.sdiv(count, emit.const(LANES))) as turn:
        step = emit.times(turn, 4 * LANES)
        z, inner = [emit.load(emit.offset(gate, step), floats(LANES))] * 2
        if is_gelu:
            cube = builder.fmul(builder.fmul(z, z), builder.fmul(z, emit.constant(0.044715, LANES)))
            inner = builder.fmul(emit.constant(1.5957691216057308, LANES), builder.fadd(z, cube))
        below = builder.fadd(emit.constant(1.0, LANES), emit.exponential(builder.fneg(inner)))
        value = builder.fmul(builder.fdiv(z, below), emit.load(emit.offset(up, step), floats(LANES)))
        emit.store(value, emit.offset(out, step))


@instruction(constants=1)
def quantize_lanes(emit: Emitter, group: int, x: Any, out: Any, scale_at: Any, sum_at: Any) -> None:
    """int8 = round(x / s), s = max|x| / 127 over `group` floats; stores s (rebased: dots.py) and the sum."""
    builder = emit.builder
    turns = range(group // WIDTH)
    values = [emit.load(emit.offset(x, 4 * WIDTH * turn), floats(WIDTH)) for turn in turns]
    sizes = [emit.call(f"llvm.fabs.v{WIDTH}f32", floats(WIDTH), [value]) for value in values]
    while len(sizes) > 1:
        pairs = zip(sizes[::2], sizes[1::2], strict=True)
        sizes = [emit.call(f"llvm.maximum.v{WIDTH}f32", floats(WIDTH), [a, b]) for a, b in pairs]
    # unlike a comparison, it passes on what is not a number
    top = emit.call(f"llvm.vector.reduce.fmaximum.v{WIDTH}f32", FLOAT, [sizes[0]])
    zero, limit = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 127.0)
    is_zero = builder.fcmp_ordered("==", top, zero)
    inverse = emit.broadcast(builder.select(is_zero, zero, builder.fdiv(limit, top)), WIDTH)
    scale = builder.fmul(builder.fdiv(top, limit), ir.Constant(FLOAT, REBASE))
    ints = ir.VectorType(INT32, WIDTH)
    total = ir.Constant(ints, [0] * WIDTH)
    for turn, value in zip(turns, values, strict=True):
        bits = builder.bitcast(emit.fma(value, inverse, emit.constant(MAGIC, WIDTH)), ints)
        whole = builder.sub(bits, ir.Constant(ints, [MAGIC_BITS] * WIDTH))
        total = builder.add(total, whole)
        emit.store(builder.trunc(whole, bytes_(WIDTH)), emit.offset(out, WIDTH * turn))
    emit.store(scale, scale_at)
    lanes = [builder.extract_element(total, ir.Constant(INT32, lane)) for lane in range(WIDTH)]
    emit.store(builder.add(builder.add(lanes[0], lanes[1]), builder.add(lanes[2], lanes[3])), sum_at)


@instruction(types.float32)
def stored_scale(emit: Emitter, at: Any) -> Any:
    """The half-precision scale at this address, as in dots.py; numba itself has no half precision."""
    builder = emit.builder
    bits = builder.zext(emit.load(at, ir.IntType(16)), INT32)
    tiny = builder.bitcast(builder.shl(bits, ir.Constant(INT32, 13)), FLOAT)
    return builder.fmul(tiny, ir.Constant(FLOAT, REBASE))


@instruction(types.float32)
def sum_of_squares(emit: Emitter, x: Any, width: Any) -> Any:
    """Of `width` floats, a multiple of 4: sixteen chains, and four for what is left."""
    builder = emit.builder
    turns = builder.sdiv(width, emit.const(LANES))
    whole, rest = emit.variable(emit.zeros(LANES)), emit.variable(emit.zeros(WIDTH))
    with emit.loop(turns) as turn:
        value = emit.load(emit.offset(x, emit.times(turn, 4 * LANES)), floats(LANES))
        emit.accumulate(whole, value, value)
    done = emit.times(turns, LANES)
    with emit.loop(builder.sdiv(builder.sub(width, done), emit.const(WIDTH))) as turn:
        value = emit.load(emit.offset(x, emit.times(done, 4), emit.times(turn, 4 * WIDTH)), floats(WIDTH))
        emit.accumulate(rest, value, value)
    return builder.fadd(emit.total(builder.load(whole)), emit.total(builder.load(rest)))


@piece
def normalize(x_at, weight_at, y_at, width, eps):  # type: ignore[no-untyped-def]
    """y = x / rms(x) * weight; the width is a multiple of 4. y may be x."""
    x, y = carray(float_pointer(x_at), width), carray(float_pointer(y_at), width)
    weight = carray(float_pointer(weight_at), width)
    factor = ONE / np.sqrt(sum_of_squares(x_at, width) / np.float32(width) + np.float32(eps))
    for i in range(width):
        y[i] = x[i] * factor * weight[i]


@piece
def add(x_at, added_at, width):  # type: ignore[no-untyped-def]
    x, added = carray(float_pointer(x_at), width), carray(float_pointer(added_at), width)
    for i in range(width):
        x[i] += added[i]


@piece
def copy(x_at, y_at, width):  # type: ignore[no-untyped-def]
    x, y = carray(float_pointer(x_at), width), carray(float_pointer(y_at), width)
    for i in range(width):
        y[i] = x[i]


@piece
def fill(x_at, first, last):  # type: ignore[no-untyped-def]
    """Zeros in columns first to last: the end of a row's last group."""
    x = carray(float_pointer(x_at), last)
    for i in range(first, last):
        x[i] = np.float32(0)


@piece
def put_32(x_at, width, first, last, to, row, rows):  # type: ignore[no-untyped-def]
    """Columns first to last of a row of `width` floats into `to`, the Activations of the next product."""
    copy(x_at + first * 4, to.values + (row * width + first) * 4, min(last, width) - first)


@unrolled
def _put_groups(group, x_at, width, first, last, to, row, rows):  # type: ignore[no-untyped-def]
    """The same in int8. `first` is a multiple of the group, and the row goes on with zeros to the end of its
    last one; `last` may lie in the next row, which another thread writes."""
    padded = (width + group - 1) // group * group
    for start in range(first, min(last, padded), group):
        at = (start // group * rows + row) * 4
        quantize_lanes(
            group, x_at + start * 4, to.values + row * padded + start, to.scales + at, to.sums + at
        )


@piece
def put_8(x_at, width, first, last, to, row, rows):  # type: ignore[no-untyped-def]
    _put_groups(GROUP_8, x_at, width, first, last, to, row, rows)


@piece
def put_4(x_at, width, first, last, to, row, rows):  # type: ignore[no-untyped-def]
    _put_groups(GROUP_4, x_at, width, first, last, to, row, rows)


@piece
def embed_32(m, token, y_at, width, scale):  # type: ignore[no-untyped-def]
    """Row `token` of a packed Matrix, times `scale`."""
    y = carray(float_pointer(y_at), width)
    tile = carray(float_pointer(m.weight + token // LANES * m.k * LANES * 4), m.k * LANES)
    for i in range(width):
        y[i] = tile[i * LANES + token % LANES] * np.float32(scale)


@piece
def embed_8(m, token, y_at, width, scale):  # type: ignore[no-untyped-def]
    y, lane = carray(float_pointer(y_at), width), token % DOT_ROWS
    for first in range(0, width, GROUP_8):
        block = m.weight + (token // DOT_ROWS * (m.k // GROUP_8) + first // GROUP_8) * BLOCK_8
        weights = carray(byte_pointer(block), BLOCK_8)
        factor = stored_scale(block + BLOCK_8 - 2 * (DOT_ROWS - lane))
        for i in range(min(GROUP_8, width - first)):
            whole = np.float32(weights[i // 4 * 4 * DOT_ROWS + lane * 4 + i % 4])
            y[first + i] = whole * factor * np.float32(scale)


@piece
def gate(is_gelu, gate_at, up_at, out_at, width):  # type: ignore[no-untyped-def]
    if is_gelu:
        gate_lanes(1, gate_at, up_at, out_at, width)
    else:
        gate_lanes(0, gate_at, up_at, out_at, width)


@piece
def turn(x_at, y_at, cos_at, sin_at, dim):  # type: ignore[no-untyped-def]
    """Rotate one head, rotate-half layout: pairs are (i, i + half). y may be x."""
    half = dim // 2
    x, y = carray(float_pointer(x_at), dim), carray(float_pointer(y_at), dim)
    cos, sin = carray(float_pointer(cos_at), half), carray(float_pointer(sin_at), half)
    for i in range(half):
        left, right = x[i], x[half + i]
        y[i] = fma(left, cos[i], -(right * sin[i]))
        y[half + i] = fma(right, cos[i], left * sin[i])
