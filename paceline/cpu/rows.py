"""Row by row: norm, gated activation, embedding lookup, and the form a product reads.

Invariant: a row's result is computed by the same instructions in the same order whatever the other rows are.
No fast-math: sums are interleaved chains, and the exponential is a polynomial of ours (lanes.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from paceline.cpu.compile import piece, piece_named
from paceline.cpu.lanes import LANES, Emitter, byte_pointer, float_pointer, floats, instruction
from paceline.cpu.matmul import BLOCK_8, GROUP_8, REBASE, stored_scale
from paceline.models.config import Activation
from paceline.models.layer import CLAMP, SLOPE
from paceline.models.quantize import DOT_ROWS, GROUP

ZERO, ONE = np.float32(0), np.float32(1)
WIDTH = 4
SILU, GELU, CLAMPED = range(3)
ACTIVATIONS: dict[Activation, int] = {"silu": SILU, "gelu_tanh": GELU, "clamped": CLAMPED}


@instruction(constants=1)
def gate_lanes(emit: Emitter, kind: int, gate: Any, up: Any, out: Any, count: Any) -> None:
    """out = act(gate) * up over `count` floats, a multiple of 16. act is z * sigmoid(s): s is z for silu, and
    for gelu in its tanh form 2 * sqrt(2 / pi) * (z + 0.044715 * z ** 3). Clamped: s is 1.702 z, and both have
    limits."""
    builder = emit.builder

    def within(value: Any, sign: str, limit: float) -> Any:
        """The limit where the value is above (>) or below (<) it."""
        bound = emit.constant(limit, LANES)
        return builder.select(builder.fcmp_ordered(sign, value, bound), bound, value)

    with emit.loop(builder.sdiv(count, emit.const(LANES))) as turn:
        step = emit.times(turn, 4 * LANES)
        z, ups = (emit.load(emit.offset(at, step), floats(LANES)) for at in (gate, up))
        inner = z
        if kind == CLAMPED:
            z = within(z, ">", CLAMP)
            ups = within(within(ups, ">", CLAMP), "<", -CLAMP)
            ups = builder.fadd(ups, emit.constant(1.0, LANES))
            inner = builder.fmul(z, emit.constant(SLOPE, LANES))
        elif kind == GELU:
            cube = builder.fmul(builder.fmul(z, z), builder.fmul(z, emit.constant(0.044715, LANES)))
            inner = builder.fmul(emit.constant(1.5957691216057308, LANES), builder.fadd(z, cube))
        below = builder.fadd(emit.constant(1.0, LANES), emit.exponential(builder.fneg(inner)))
        emit.store(builder.fmul(builder.fdiv(z, below), ups), emit.offset(out, step))


@instruction()
def open_gates(emit: Emitter, x: Any, gates: Any, count: Any) -> None:
    """x *= sigmoid(gates) over `count` floats, a multiple of 16."""
    builder = emit.builder
    with emit.loop(builder.sdiv(count, emit.const(LANES))) as turn:
        step = emit.times(turn, 4 * LANES)
        shut = emit.exponential(builder.fneg(emit.load(emit.offset(gates, step), floats(LANES))))
        here = emit.offset(x, step)
        opened = builder.fdiv(emit.load(here, floats(LANES)), builder.fadd(emit.constant(1.0, LANES), shut))
        emit.store(opened, here)


@instruction()
def soften_lanes(emit: Emitter, x: Any, count: Any, inverse: Any, cap: Any) -> None:
    """x = cap * tanh(x * inverse) over `count` floats, a multiple of 8; what is no number stays so."""
    builder, one = emit.builder, emit.constant(1.0, DOT_ROWS)
    inverse, cap = (emit.broadcast(value, DOT_ROWS) for value in (inverse, cap))
    with emit.loop(builder.sdiv(count, emit.const(DOT_ROWS))) as turn:
        here = emit.offset(x, emit.times(turn, 4 * DOT_ROWS))
        z = builder.fmul(emit.load(here, floats(DOT_ROWS)), inverse)
        # tanh(z) = 2 / (1 + e ** -2z) - 1
        below = builder.fadd(one, emit.exponential(builder.fmul(z, emit.constant(-2.0, DOT_ROWS))))
        tanh = builder.fsub(builder.fdiv(emit.constant(2.0, DOT_ROWS), below), one)
        is_none = builder.fcmp_unordered("uno", z, z)
        emit.store(builder.select(is_none, z, builder.fmul(tanh, cap)), here)


@piece
def soften(x, count, cap):  # type: ignore[no-untyped-def]
    soften_lanes(x, count, ONE / np.float32(cap), np.float32(cap))


@instruction(constants=1)
def quantize_lanes(emit: Emitter, group: int, x: Any, out: Any, scale_at: Any, sum_at: Any) -> None:
    """int8 = round(x / s), s = max|x| / 127 over `group` floats; stores s times REBASE and the sum."""
    emit.round(x, emit.const(group // LANES), out, scale_at, sum_at, REBASE)


@instruction(types.float32)
def sum_of_squares(emit: Emitter, x: Any, width: Any) -> Any:
    """Of `width` floats, a multiple of 4: sixteen chains, and four for what is left."""
    builder = emit.builder
    turns = builder.sdiv(width, emit.const(LANES))
    whole, rest = emit.variable(emit.constant(0.0, LANES)), emit.variable(emit.constant(0.0, WIDTH))
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
def add(x_at, added_at, width, scale=1.0):  # type: ignore[no-untyped-def]
    """x += added * scale; a scale of one changes no bit."""
    x, added = carray(float_pointer(x_at), width), carray(float_pointer(added_at), width)
    for i in range(width):
        x[i] += added[i] * np.float32(scale)


@piece
def times(x_at, width, factor):  # type: ignore[no-untyped-def]
    x = carray(float_pointer(x_at), width)
    for i in range(width):
        x[i] *= factor


@piece
def copy(x_at, y_at, width):  # type: ignore[no-untyped-def]
    x, y = carray(float_pointer(x_at), width), carray(float_pointer(y_at), width)
    for i in range(width):
        y[i] = x[i]


@piece
def fill(x_at, first, last, value=ZERO):  # type: ignore[no-untyped-def]
    """A value in columns first to last, such as zeros at the end of a row's last group."""
    x = carray(float_pointer(x_at), last)
    for i in range(first, last):
        x[i] = value


@piece
def put_32(x_at, width, first, last, to, row, rows):  # type: ignore[no-untyped-def]
    """Columns first to last of a row of `width` floats into `to`, the input of the next product."""
    copy(x_at + first * 4, to.values + (row * width + first) * 4, min(last, width) - first)


def _put_groups(group: int) -> Any:
    """The same in int8. `first` is a multiple of the group, and the row goes on with zeros to the end of its
    last one; `last` may lie in the next row, which another thread writes."""

    @piece_named(f"put_in_groups_of_{group}")
    def put(x_at, width, first, last, to, row, rows):  # type: ignore[no-untyped-def]
        padded = (width + group - 1) // group * group
        for start in range(first, min(last, padded), group):
            at, out = (start // group * rows + row) * 4, to.values + row * padded + start
            quantize_lanes(group, x_at + start * 4, out, to.scales + at, to.sums + at)

    return put


put_8, put_4 = _put_groups(GROUP[8]), _put_groups(GROUP[4])


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
def gate(kind, gate_at, up_at, out_at, width):  # type: ignore[no-untyped-def]
    """kind: the number of an activation."""
    if kind == CLAMPED:
        gate_lanes(CLAMPED, gate_at, up_at, out_at, width)
    elif kind == GELU:
        gate_lanes(GELU, gate_at, up_at, out_at, width)
    else:
        gate_lanes(SILU, gate_at, up_at, out_at, width)
