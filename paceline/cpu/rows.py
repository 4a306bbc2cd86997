"""Row by row: root-mean-square norm, gated activation, rotary embedding with the write into the KV cache.

Invariant: a row's result is computed by the same instructions in the same order whatever the other rows are. No fast-math: sums are
written out in four interleaved chains, and the exponential is a polynomial of ours, so vectorizing cannot change a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np
from numba import carray, prange

from paceline.cpu.lanes import float_pointer, fma, int_pointer, power_of_two

if TYPE_CHECKING:
    import torch

    from paceline.types import Batch

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
ROUNDING = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to an integer
TAYLOR = tuple(np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2))
MANY = 16  # fewer rows than this are done before a second thread would wake
ONE, LOWEST, HIGHEST = np.float32(1), np.float32(-87), np.float32(88)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def exponential(x):  # type: ignore[no-untyped-def]
    """e ** x to within 2 units in the last place, for x clamped to [-87, 88]."""
    x = min(max(x, LOWEST), HIGHEST)
    whole = fma(x, LOG2_E, ROUNDING) - ROUNDING
    rest = fma(whole, -LN2_LOW, fma(whole, -LN2_HIGH, x))
    series = fma(TAYLOR[0], rest, TAYLOR[1])
    series = fma(series, rest, TAYLOR[2])
    series = fma(series, rest, TAYLOR[3])
    series = fma(series, rest, TAYLOR[4])
    series = fma(series, rest, TAYLOR[5])
    series = fma(series, rest, ONE)
    return fma(series, rest, ONE) * power_of_two(np.int32(whole))


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _normalize(x, start, weight, y, eps):  # type: ignore[no-untyped-def]
    """y[start + i] = x[start + i] / rms(x) * weight[i]; the width is a multiple of 4."""
    width = weight.size
    a = b = c = d = np.float32(0)
    for i in range(start, start + width, 4):
        a, b, c, d = fma(x[i], x[i], a), fma(x[i + 1], x[i + 1], b), fma(x[i + 2], x[i + 2], c), fma(x[i + 3], x[i + 3], d)
    factor = ONE / np.sqrt(((a + b) + (c + d)) / np.float32(width) + eps)
    for i in range(width):
        y[start + i] = x[start + i] * factor * weight[i]


@numba.njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _norm(first, last, x_at, weight_at, y_at, width, eps):  # type: ignore[no-untyped-def]
    x, y = carray(float_pointer(x_at), last * width), carray(float_pointer(y_at), last * width)
    weight = carray(float_pointer(weight_at), width)
    for row in range(first, last):
        _normalize(x, row * width, weight, y, np.float32(eps))


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _silu_gate(gate, up, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = gate[i] / (ONE + exponential(-gate[i])) * up[i]


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _gelu_gate(gate, up, out):  # type: ignore[no-untyped-def]
    """The tanh form, written as z * sigmoid(2 * sqrt(2 / pi) * (z + 0.044715 * z ** 3))."""
    for i in range(out.size):
        z = gate[i]
        inner = np.float32(1.5957691216057308) * fma(np.float32(0.044715) * z * z, z, z)
        out[i] = z / (ONE + exponential(-inner)) * up[i]


@numba.njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _gate(first, last, x_at, y_at, width, is_gelu):  # type: ignore[no-untyped-def]
    x, y = carray(float_pointer(x_at), (last, 2 * width)), carray(float_pointer(y_at), (last, width))
    for row in range(first, last):
        if is_gelu:
            _gelu_gate(x[row, :width], x[row, width:], y[row])
        else:
            _silu_gate(x[row, :width], x[row, width:], y[row])


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _turn(x, start, cos, sin, angle, half, y, out):  # type: ignore[no-untyped-def]
    """Rotate one head, rotate-half layout: pairs are (i, i + half)."""
    for i in range(half):
        left, right = x[start + i], x[start + half + i]
        y[out + i] = fma(left, cos[angle + i], -(right * sin[angle + i]))
        y[out + half + i] = fma(right, cos[angle + i], left * sin[angle + i])


@numba.njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
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
        values[out : out + kv_heads * dim] = qkv[tail : tail + kv_heads * dim]


@numba.njit(parallel=True, nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _norm_parallel(rows, x_at, weight_at, y_at, width, eps, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        _norm(rows * part // threads, rows * (part + 1) // threads, x_at, weight_at, y_at, width, eps)


@numba.njit(parallel=True, nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _gate_parallel(rows, x_at, y_at, width, is_gelu, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        _gate(rows * part // threads, rows * (part + 1) // threads, x_at, y_at, width, is_gelu)


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, width] -> [T, width]."""
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[1] == weight.numel() and x.shape[1] % 4 == 0
    y = x.new_empty(x.shape)
    arguments = (x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[1], eps)
    if len(x) < MANY:
        _norm(0, len(x), *arguments)
    else:
        _norm_parallel(len(x), *arguments, numba.get_num_threads())
    return y


def gate_rows(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [T, 2 * width] (gate, then up) -> [T, width]."""
    assert x.is_contiguous()
    y = x.new_empty(len(x), x.shape[1] // 2)
    arguments = (x.data_ptr(), y.data_ptr(), y.shape[1], activation == "gelu_tanh")
    if len(x) < MANY:
        _gate(0, len(x), *arguments)
    else:
        _gate_parallel(len(x), *arguments, numba.get_num_threads())
    return y


def place_rows(
    qkv: torch.Tensor,  # [T, (heads + 2 * kv_heads) * dim]; its queries are normed and rotated in place
    batch: Batch,
    tables: tuple[torch.Tensor, torch.Tensor],  # cos and sin, [num_positions, dim / 2]
    cache: tuple[torch.Tensor, torch.Tensor],  # [num_slots, kv_heads, dim]
    norms: tuple[torch.Tensor, torch.Tensor] | None,  # [dim] for queries and keys
    eps: float,
) -> None:
    """Norm and rotate queries and keys; write keys and values at `batch.slots`."""
    (cos, sin), (keys, values) = tables, cache
    num_slots, kv_heads, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    assert keys.is_contiguous() and values.is_contiguous() and qkv.is_contiguous() and cos.shape[1] * 2 == dim
    q_norm, k_norm = (norms[0].data_ptr(), norms[1].data_ptr()) if norms else (0, 0)
    _place(
        0, len(qkv), qkv.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_norm, k_norm,
        keys.data_ptr(), values.data_ptr(), heads, kv_heads, dim, len(cos), num_slots, eps,
    )  # fmt: skip
