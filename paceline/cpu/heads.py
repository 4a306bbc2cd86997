"""What the compiled drafting heads share: a decoder layer in int8 over sequences of their own
(head_attention.py).

A head only guesses, so nothing here has to be the same for every shape of a pass; it is, as it happens.
Invariant: as in forward.py, a step reads only what was finished before the last barrier, or by the same
thread since.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import carray

from paceline.cpu.compile import piece
from paceline.cpu.head_attention import attend_rows, value_at, write_key
from paceline.cpu.lanes import double_pointer, float_pointer, int_pointer
from paceline.cpu.matmul import BLOCK_8, DOT_ROWS, GROUP_8, Activations, Matrix, product_8
from paceline.cpu.rows import add, copy, embed_8, embed_32, fill, gate, normalize, put_8, turn
from paceline.cpu.sync import barrier

COLUMNS = 64  # a product's input is put into groups of so many
EMBEDDING, HEAD, FUSE = 0, 1, 2  # of a shape's matrices


class Shape(NamedTuple):
    """Sizes of a head, and where what all its layers share lies."""

    layers: int  # address of [num_layers, NUM_FIELDS] int64
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    dim: int
    eps: float
    scale: float
    embed_scale: float
    is_gelu: bool
    # address of [n, fields of a Matrix]: the target's embedding, the output layer, what fuses features,
    # others
    matrices: int
    is_float_embedding: bool
    cos: int
    sin: int
    norm: int  # of the output; 0: none
    num_words: int  # of the draft's vocabulary
    num_outputs: int  # rows of the output layer: those, filled up to whole lanes
    threads: int


class LayerRow(NamedTuple):
    """Addresses of a layer's weights, 0 for what is not there."""

    input_norm: int
    hidden_norm: int
    qkv: Matrix
    q_norm: int
    k_norm: int
    out: Matrix
    mlp_norm: int
    gate_up: Matrix
    down: Matrix


NUM_FIELDS = len(LayerRow._fields) + 4 * (len(Matrix._fields) - 1)


class Rows(NamedTuple):
    """The rows of one pass: addresses of int64 arrays of `num` numbers."""

    num: int
    tokens: int
    positions: int
    keys: int  # where each row's sequence lies
    values: int
    rooms: int  # how many blocks its sequence has room for
    places: int  # in its sequence: where its own keys and values go
    seen: int
    others: int  # [num, most_others]: places seen beside the first `seen`
    num_others: int
    most_others: int


class Work(NamedTuple):
    """Memory of a pass, one address each."""

    sync: int
    h: int  # [rows, hidden] the residual stream
    ready: int  # [rows, widest] what becomes the input of a product
    wide: int
    narrow: int
    values: int
    scales: int
    sums: int
    scores: int  # a thread each: [queries scored at once, longest]
    longest: int
    widest: int


@piece
def rows_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 11)
    return Rows(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10])


@piece
def shape_at(at):  # type: ignore[no-untyped-def]
    f, x = carray(int_pointer(at), 19), carray(double_pointer(at), 19)
    return Shape(
        f[0],
        f[1],
        f[2],
        f[3],
        f[4],
        f[5],
        f[6],
        x[7],
        x[8],
        x[9],
        f[10] != 0,
        f[11],
        f[12] != 0,
        f[13],
        f[14],
        f[15],
        f[16],
        f[17],
        f[18],
    )


@piece
def work_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 11)
    return Work(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10])


@piece
def layer_of(layers_at, i):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(layers_at + i * NUM_FIELDS * 8), NUM_FIELDS)
    qkv, out = Matrix(f[2], f[3], f[4], f[5]), Matrix(f[8], f[9], f[10], f[11])
    gate_up, down = Matrix(f[13], f[14], f[15], f[16]), Matrix(f[17], f[18], f[19], f[20])
    return LayerRow(f[0], f[1], qkv, f[6], f[7], out, f[12], gate_up, down)


@piece
def matrix_of(s, i):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(s.matrices + i * 32), 4)
    return Matrix(f[0], f[1], f[2], f[3])


@piece
def outputs_of(matrix, first, count):  # type: ignore[no-untyped-def]
    """Some of a matrix's outputs; both are multiples of DOT_ROWS."""
    tile_bytes = matrix.k // GROUP_8 * BLOCK_8
    return Matrix(matrix.weight + first // DOT_ROWS * tile_bytes, matrix.bias + first * 4, matrix.k, count)


@piece
def embed_row(s, token, to):  # type: ignore[no-untyped-def]
    if s.is_float_embedding:
        embed_32(matrix_of(s, EMBEDDING), token, to, s.hidden, s.embed_scale)
    else:
        embed_8(matrix_of(s, EMBEDDING), token, to, s.hidden, s.embed_scale)


@piece
def put_row(ready, width, w, row, rows):  # type: ignore[no-untyped-def]
    """A whole row of `ready` becomes a row of the next product's input."""
    last = (width + COLUMNS - 1) // COLUMNS * COLUMNS
    fill(ready, width, last)
    put_8(ready, width, 0, last, Activations(w.values, w.scales, w.sums), row, rows)


@piece
def scale_row(x_at, factors_at, width):  # type: ignore[no-untyped-def]
    x, factors = carray(float_pointer(x_at), width), carray(float_pointer(factors_at), width)
    for i in range(width):
        x[i] *= factors[i]


@piece
def put_normed(s, w, source, weight, row, rows):  # type: ignore[no-untyped-def]
    ready = w.ready + row * w.widest * 4
    if weight != 0:
        normalize(source, weight, ready, s.hidden, s.eps)
    else:
        copy(source, ready, s.hidden)
    put_row(ready, s.hidden, w, row, rows)


@piece
def multiply(part, s, w, matrix, y, rows):  # type: ignore[no-untyped-def]
    """Between barriers: before, all rows are put; after, all of y is there."""
    barrier(w.sync, s.threads)
    product_8(part, s.threads, matrix, Activations(w.values, w.scales, w.sums), y, rows)
    barrier(w.sync, s.threads)


@piece
def turn_unit(s, layer, norm, here, position):  # type: ignore[no-untyped-def]
    angle = position * (s.dim // 2) * 4
    if norm != 0:
        normalize(here, norm, here, s.dim, s.eps)
    turn(here, here, s.cos + angle, s.sin + angle, s.dim)


@piece
def place_rows(part, r, s, layer, i, w):  # type: ignore[no-untyped-def]
    """Norm and rotate queries in place, keys and values into their sequences. Each thread takes about the
    columns that it has computed.
    """
    positions, places = carray(int_pointer(r.positions), r.num), carray(int_pointer(r.places), r.num)
    keys, values = carray(int_pointer(r.keys), r.num), carray(int_pointer(r.values), r.num)
    rooms = carray(int_pointer(r.rooms), r.num)
    units, dim = s.num_heads + 2 * s.num_kv_heads, s.dim
    for unit in range(units * part // s.threads, units * (part + 1) // s.threads):
        for row in range(r.num):
            here = w.wide + (row * layer.qkv.n + unit * dim) * 4
            if unit < s.num_heads:
                turn_unit(s, layer, layer.q_norm, here, positions[row])
            elif unit < s.num_heads + s.num_kv_heads:
                turn_unit(s, layer, layer.k_norm, here, positions[row])
                write_key(s, i, keys[row], rooms[row], places[row], unit - s.num_heads, here)
            else:
                head = unit - s.num_heads - s.num_kv_heads
                copy(here, value_at(s, i, values[row], rooms[row], places[row], head), dim)


@piece
def add_rows(part, r, s, w, stride):  # type: ignore[no-untyped-def]
    """h += narrow."""
    for row in range(part, r.num, s.threads):
        add(w.h + row * s.hidden * 4, w.narrow + row * stride * 4, s.hidden)


@piece
def _put_gate(part, r, s, w, stride):  # type: ignore[no-untyped-def]
    """Each thread takes the columns that it has just computed (the order of the rows of gate_up:
    loaders/packed.py).
    """
    blocks, x = (s.inner + COLUMNS - 1) // COLUMNS, Activations(w.values, w.scales, w.sums)
    for row in range(r.num):
        ready, source = w.ready + row * w.widest * 4, w.wide + row * stride * 4
        for first in range(
            blocks * part // s.threads * COLUMNS, blocks * (part + 1) // s.threads * COLUMNS, COLUMNS
        ):
            size = min(COLUMNS, s.inner - first)
            gate(s.is_gelu, source + 2 * first * 4, source + (2 * first + size) * 4, ready + first * 4, size)
            fill(ready, first + size, first + COLUMNS)
            put_8(ready, s.inner, first, first + COLUMNS, x, row, r.num)


@piece
def keep_layer(part, r, s, layer, i, w):  # type: ignore[no-untyped-def]
    """From rows that are put as the input of qkv to their keys and values."""
    multiply(part, s, w, layer.qkv, w.wide, r.num)
    place_rows(part, r, s, layer, i, w)


@piece
def finish_layer(part, r, s, layer, i, w):  # type: ignore[no-untyped-def]
    """From where keys and values are kept to the residual stream after the layer."""
    barrier(w.sync, s.threads)
    attend_rows(part, r, s, layer, i, w)
    barrier(w.sync, s.threads)
    leave_layer(part, r, s, layer, w)


@piece
def leave_layer(part, r, s, layer, w):  # type: ignore[no-untyped-def]
    """The same from where `ready` is what attention found."""
    for row in range(part, r.num, s.threads):
        put_row(w.ready + row * w.widest * 4, s.num_heads * s.dim, w, row, r.num)
    multiply(part, s, w, layer.out, w.narrow, r.num)
    add_rows(part, r, s, w, layer.out.n)
    for row in range(part, r.num, s.threads):
        put_normed(s, w, w.h + row * s.hidden * 4, layer.mlp_norm, row, r.num)
    multiply(part, s, w, layer.gate_up, w.wide, r.num)
    _put_gate(part, r, s, w, layer.gate_up.n)
    multiply(part, s, w, layer.down, w.narrow, r.num)
    add_rows(part, r, s, w, layer.down.n)
