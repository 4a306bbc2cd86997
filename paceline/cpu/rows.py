"""Row by row: root-mean-square norm, gated activation, rotary embedding with the write into the KV cache.

Invariant: a row's result is computed by the same instructions in the same order whatever the other rows are. No fast-math: sums are
written out in four interleaved chains, and the exponential is a polynomial of ours (lanes.py), the same in every lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba import carray, prange, types
from numba.extending import intrinsic

from paceline.cpu.compile import kernel, piece
from paceline.cpu.lanes import LANES, Emitter, float_pointer, floats, fma, int_pointer

if TYPE_CHECKING:
    import torch

MANY = 16  # fewer rows than this are done before a second thread would wake
ONE = np.float32(1)


@intrinsic(prefer_literal=True)
def gate_lanes(_context: Any, is_gelu: Any, gate: Any, up: Any, out: Any, count: Any) -> Any:
    """out = act(gate) * up over `count` floats, a multiple of 16. act is z * sigmoid(s): s is z for silu, and for gelu in its tanh
    form 2 * sqrt(2 / pi) * (z + 0.044715 * z ** 3)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gate, up, out, count = arguments[1:]
        emit = Emitter(builder)
        with emit.loop(builder.sdiv(count, emit.const(LANES))) as turn:
            step = emit.times(turn, 4 * LANES)
            z, inner = [emit.load(emit.offset(gate, step), floats(LANES))] * 2
            if is_gelu.literal_value:
                cube = builder.fmul(builder.fmul(z, z), builder.fmul(z, emit.constant(0.044715, LANES)))
                inner = builder.fmul(emit.constant(1.5957691216057308, LANES), builder.fadd(z, cube))
            below = builder.fadd(emit.constant(1.0, LANES), emit.exponential(builder.fneg(inner)))
            value = builder.fmul(builder.fdiv(z, below), emit.load(emit.offset(up, step), floats(LANES)))
            emit.store(value, emit.offset(out, step))
        return context.get_dummy_value()

    return types.void(is_gelu, *[types.int64] * 4), generate


@piece
def _normalize(x, start, weight, y, eps):  # type: ignore[no-untyped-def]
    """y[start + i] = x[start + i] / rms(x) * weight[i]; the width is a multiple of 4."""
    width = weight.size
    a = b = c = d = np.float32(0)
    for i in range(start, start + width, 4):
        a, b, c, d = fma(x[i], x[i], a), fma(x[i + 1], x[i + 1], b), fma(x[i + 2], x[i + 2], c), fma(x[i + 3], x[i + 3], d)
    factor = ONE / np.sqrt(((a + b) + (c + d)) / np.float32(width) + eps)
    for i in range(width):
        y[start + i] = x[start + i] * factor * weight[i]


@kernel
def _norm_range(first, last, x_at, weight_at, y_at, width, eps):  # type: ignore[no-untyped-def]
    x, y = carray(float_pointer(x_at), last * width), carray(float_pointer(y_at), last * width)
    weight = carray(float_pointer(weight_at), width)
    for row in range(first, last):
        _normalize(x, row * width, weight, y, np.float32(eps))


@kernel
def _gate_range(first, last, x, y, width, is_gelu):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        here, out = x + row * width * 8, y + row * width * 4
        if is_gelu:
            gate_lanes(1, here, here + width * 4, out, width)
        else:
            gate_lanes(0, here, here + width * 4, out, width)


@piece
def _turn(x, start, cos, sin, angle, half, y, out):  # type: ignore[no-untyped-def]
    """Rotate one head, rotate-half layout: pairs are (i, i + half)."""
    for i in range(half):
        left, right = x[start + i], x[start + half + i]
        y[out + i] = fma(left, cos[angle + i], -(right * sin[angle + i]))
        y[out + half + i] = fma(right, cos[angle + i], left * sin[angle + i])


@kernel
def place(  # type: ignore[no-untyped-def]
    first, last, qkv_at, positions_at, slots_at, cos_at, sin_at, q_norm_at, k_norm_at, keys_at, values_at,
    heads, kv_heads, dim, num_positions, num_slots, eps,
):  # fmt: skip
    width, half, size = (heads + 2 * kv_heads) * dim, dim // 2, num_slots * kv_heads * dim
    qkv = carray(float_pointer(qkv_at), last * width)
    positions, slots = carray(int_pointer(positions_at), last), carray(int_pointer(slots_at), last)
    cos, sin = carray(float_pointer(cos_at), num_positions * half), carray(float_pointer(sin_at), num_positions * half)
    q_norm, k_norm = carray(float_pointer(q_norm_at), dim), carray(float_pointer(k_norm_at), dim)
    keys, values = carray(float_pointer(keys_at), size), carray(float_pointer(values_at), size)
    for row in range(first, last):
        angle, out = positions[row] * half, slots[row] * kv_heads * dim
        for head in range(heads + kv_heads):
            at, is_query = row * width + head * dim, head < heads
            if q_norm_at != 0:
                _normalize(qkv, at, q_norm if is_query else k_norm, qkv, np.float32(eps))
            if is_query:
                _turn(qkv, at, cos, sin, angle, half, qkv, at)
            else:
                _turn(qkv, at, cos, sin, angle, half, keys, out + (head - heads) * dim)
        tail = row * width + (heads + kv_heads) * dim
        for i in range(kv_heads * dim):  # a slice assignment would take three more seconds to compile
            values[out + i] = qkv[tail + i]


@kernel(parallel=True)
def _norm_parallel(rows, x_at, weight_at, y_at, width, eps, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        first = np.int64(part)  # a loop over threads counts in unsigned integers
        _norm_range(rows * first // threads, rows * (first + 1) // threads, x_at, weight_at, y_at, width, eps)


@kernel(parallel=True)
def _gate_parallel(rows, x_at, y_at, width, is_gelu, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        first = np.int64(part)  # a loop over threads counts in unsigned integers
        _gate_range(rows * first // threads, rows * (first + 1) // threads, x_at, y_at, width, is_gelu)


@kernel
def norm(rows, x, weight, y, width, eps, threads):  # type: ignore[no-untyped-def]
    if rows < MANY:
        _norm_range(0, rows, x, weight, y, width, eps)
    else:
        _norm_parallel(rows, x, weight, y, width, eps, threads)


@kernel
def gate(rows, x, y, width, is_gelu, threads):  # type: ignore[no-untyped-def]
    if rows < MANY:
        _gate_range(0, rows, x, y, width, is_gelu)
    else:
        _gate_parallel(rows, x, y, width, is_gelu, threads)


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, width] -> [T, width]; the width is a multiple of 4."""
    import torch

    rows, width = x.shape
    assert x.is_contiguous(), "the kernels read contiguous float32"
    assert weight.numel() == width, "one weight a column"
    assert width % 4 == 0, "sums run in four chains"
    y = torch.empty((rows, width))
    norm(rows, x.data_ptr(), weight.data_ptr(), y.data_ptr(), width, eps, numba.get_num_threads())
    return y


def gate_rows(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [T, 2 * width] (gate, then up) -> [T, width]."""
    import torch

    rows, width = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous(), "the kernels read contiguous float32"
    assert width % LANES == 0, "whole vectors only"
    y = torch.empty((rows, width))
    gate(rows, x.data_ptr(), y.data_ptr(), width, activation == "gelu_tanh", numba.get_num_threads())
    return y
