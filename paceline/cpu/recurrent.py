"""A recurrent layer's part between its products, by entry: compiled for models that have such layers alone.

Threads take key heads, each with the value heads that share it: nothing is shared between them, and a head's
rows follow each other, each from the state that its parent has left. Invariant: an output is made of chains
in a fixed order (over the positions of a convolution, over the keys of a state), so its bits depend on its
own text alone. The reference: models/recurrent.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import carray

from paceline.cpu.compile import kernel, piece, struct
from paceline.cpu.forward import pass_at
from paceline.cpu.lanes import address, float_pointer, fma, int_pointer
from paceline.cpu.layer import work_at
from paceline.cpu.rows import copy, fill, gate, normalize, sum_of_squares, times

ONE, EPS = np.float32(1), np.float32(1e-6)
LINEAR_FROM = 20.0  # where log(1 + exp(x)) is x, as torch has it


class Recurrent(NamedTuple):
    """One layer's, as the kernel reads it: addresses and sizes."""

    entry: int  # of `recur`
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # rows that the convolution sees
    stride: int  # floats of a row of the product: queries, keys, values, gates, rates, steps
    convolution: int  # [kernel, mixed]
    decay: int  # [value heads]: minus exp(A_log)
    step_bias: int  # [value heads]
    norm: int  # [value_dim]
    eps: float


recurrent_at = struct(Recurrent)


@piece
def _mixed(r):  # type: ignore[no-untyped-def]
    return 2 * r.key_heads * r.key_dim + r.value_heads * r.value_dim


@piece
def _convolve(r, x, tail, to, first, count, ones, out):  # type: ignore[no-untyped-def]
    """Some columns of a row after the convolution and silu. tail: the rows before it; to: its own tail."""
    mixed, found = _mixed(r), carray(float_pointer(out), count)
    fill(out, 0, count)
    for t in range(r.kernel):
        at = x + first * 4 if t == r.kernel - 1 else tail + (t * mixed + first) * 4
        line = carray(float_pointer(at), count)
        weight = carray(float_pointer(r.convolution + (t * mixed + first) * 4), count)
        for i in range(count):
            found[i] = fma(line[i], weight[i], found[i])
    for t in range(r.kernel - 2):
        copy(tail + ((t + 1) * mixed + first) * 4, to + (t * mixed + first) * 4, count)
    copy(x + first * 4, to + ((r.kernel - 2) * mixed + first) * 4, count)
    gate(False, out, ones, out, count)


@piece
def _unit(x, width, scale):  # type: ignore[no-untyped-def]
    """Of length `scale`, in place."""
    times(x, width, np.float32(scale) / np.sqrt(sum_of_squares(x, width) + EPS))


@piece
def _step(r, row, head):  # type: ignore[no-untyped-def]
    """A head's decay and rate; row: where a row of the product lies."""
    line = carray(float_pointer(row), r.stride)
    at = _mixed(r) + r.value_heads * r.value_dim + head
    bias = carray(float_pointer(r.step_bias), r.value_heads)[head]
    step, decay = float(line[at + r.value_heads] + bias), carray(float_pointer(r.decay), r.value_heads)[head]
    step = step if step > LINEAR_FROM else math.log1p(math.exp(step))
    return np.float32(math.exp(float(decay) * step)), np.float32(1.0 / (1.0 + math.exp(-float(line[at]))))


@piece
def _advance(r, state, to, step, q_at, k_at, v_at, out_at):  # type: ignore[no-untyped-def]
    """A head's state after a row, and what the row reads of it. `to` may be `state`; the value is used up."""
    (decay, rate), keys, values = step, r.key_dim, r.value_dim
    old, new = (carray(float_pointer(state), (keys, values)), carray(float_pointer(to), (keys, values)))
    q, k = carray(float_pointer(q_at), keys), carray(float_pointer(k_at), keys)
    v, out = carray(float_pointer(v_at), values), carray(float_pointer(out_at), values)
    fill(out_at, 0, values)
    for i in range(keys):
        for j in range(values):
            out[j] = fma(old[i, j] * decay, k[i], out[j])
    for j in range(values):
        v[j] = (v[j] - out[j]) * rate
    fill(out_at, 0, values)
    for i in range(keys):
        for j in range(values):
            changed = fma(k[i], v[j], old[i, j] * decay)
            new[i, j] = changed
            out[j] = fma(changed, q[i], out[j])


@kernel
def recur(part, threads, b_at, w_at, r_at, states, tails):  # type: ignore[no-untyped-def]
    """From a product's rows in `wide` to `ready`; states and tails: of all slots."""
    b, w, r = pass_at(b_at), work_at(w_at), recurrent_at(r_at)
    sources, targets = carray(int_pointer(b.states_in), b.rows), carray(int_pointer(b.states_out), b.rows)
    keys, values, each = r.key_dim, r.value_dim, r.value_heads // r.key_heads
    state_bytes, tail_bytes = r.value_heads * keys * values * 4, (r.kernel - 1) * _mixed(r) * 4
    memory = np.ones(3 * max(keys, values) + 2 * keys, np.float32)
    ones = address(memory)
    v, out = ones + max(keys, values) * 4, ones + 2 * max(keys, values) * 4
    q, k = ones + 3 * max(keys, values) * 4, ones + (3 * max(keys, values) + keys) * 4
    for head in range(part, r.key_heads, threads):
        state, tail = states, tails
        for row in range(b.rows):
            if sources[row] >= 0:
                state, tail = states + sources[row] * state_bytes, tails + sources[row] * tail_bytes
            to, tail_to = w.state, w.tail
            if targets[row] >= 0:
                to, tail_to = states + targets[row] * state_bytes, tails + targets[row] * tail_bytes
            x = w.wide + row * r.stride * 4
            _convolve(r, x, tail, tail_to, head * keys, keys, ones, q)
            _convolve(r, x, tail, tail_to, (r.key_heads + head) * keys, keys, ones, k)
            _unit(q, keys, 1.0 / math.sqrt(float(keys)))
            _unit(k, keys, 1.0)
            for own in range(head * each, (head + 1) * each):
                at = own * keys * values * 4
                _convolve(r, x, tail, tail_to, 2 * r.key_heads * keys + own * values, values, ones, v)
                _advance(r, state + at, to + at, _step(r, x, own), q, k, v, out)
                normalize(out, r.norm, out, values, r.eps)
                ready = w.ready + (row * w.widest + own * values) * 4
                gate(False, x + (_mixed(r) + own * values) * 4, out, ready, values)
            state, tail = to, tail_to
