"""What the compiled drafting heads share: the decoder's layer (layer.py) in int8, over sequences of their own
(head_attention.py), and what they are told.

A head only guesses, so nothing here has to be the same for every shape of a pass; it is, as it happens.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import carray

from paceline.cpu.compile import piece
from paceline.cpu.head_attention import attend_rows, value_at, write_key
from paceline.cpu.lanes import float_pointer, int_pointer
from paceline.cpu.layer import leave_layer, multiply, put_norm, put_norms, put_row, turn_head
from paceline.cpu.matmul import product_8
from paceline.cpu.rows import copy, embed_8, embed_32, normalize, put_8
from paceline.cpu.sync import barrier, range_of


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
    scores: int  # [threads, queries that take turns, longest]
    longest: int
    widest: int


@piece
def embed_row(m, token, to):  # type: ignore[no-untyped-def]
    if m.is_float_embedding:
        embed_32(m.embedding, token, to, m.hidden, m.embed_scale)
    else:
        embed_8(m.embedding, token, to, m.hidden, m.embed_scale)


@piece
def put_8_row(ready, width, w, row, rows):  # type: ignore[no-untyped-def]
    put_row(put_8, ready, width, w, row, rows)


@piece
def put_8_norm(source, weight, m, w, row, rows):  # type: ignore[no-untyped-def]
    put_norm(put_8, source, weight, m, w, row, rows)


@piece
def put_8_norms(share, rows, m, w, weight):  # type: ignore[no-untyped-def]
    put_norms(put_8, share, rows, m, w, weight)


@piece
def multiply_8(share, matrix, w, y, rows):  # type: ignore[no-untyped-def]
    multiply(product_8, share, matrix, w, y, rows)


@piece
def put_features(e, sources, norm, first, m, w, row, rows):  # type: ignore[no-untyped-def]
    """Hidden states of a row, from column `first` of `ready` on, as the input of the product that fuses them.
    e has num_sources and balance, a factor for each column; norm: address, 0: they are taken as they are."""
    ready, width = w.ready + row * w.widest * 4, first + e.num_sources * m.hidden
    for i in range(e.num_sources):
        to = ready + (first + i * m.hidden) * 4
        if norm != 0:
            normalize(sources[i], norm, to, m.hidden, m.eps)
        else:
            copy(sources[i], to, m.hidden)
    x, factors = carray(float_pointer(ready), width), carray(float_pointer(e.balance), width)
    for i in range(width):
        x[i] *= factors[i]
    put_8_row(ready, width, w, row, rows)


@piece
def place_rows(share, r, m, layer, i, w):  # type: ignore[no-untyped-def]
    """Norm and rotate queries in place, keys and values into their sequences. Each thread takes about the
    columns that it has computed."""
    positions, places = carray(int_pointer(r.positions), r.num), carray(int_pointer(r.places), r.num)
    keys, values = carray(int_pointer(r.keys), r.num), carray(int_pointer(r.values), r.num)
    rooms, dim = carray(int_pointer(r.rooms), r.num), m.dim
    first, last = range_of(share, m.num_heads + 2 * m.num_kv_heads)
    for unit in range(first, last):
        for row in range(r.num):
            here = w.wide + (row * layer.qkv.n + unit * dim) * 4
            if unit < m.num_heads:
                turn_head(m, layer, layer.q_norm, here, positions[row])
            elif unit < m.num_heads + m.num_kv_heads:
                turn_head(m, layer, layer.k_norm, here, positions[row])
                write_key(m, i, keys[row], rooms[row], places[row], unit - m.num_heads, here)
            else:
                head = unit - m.num_heads - m.num_kv_heads
                copy(here, value_at(m, i, values[row], rooms[row], places[row], head), dim)


@piece
def keep_layer(share, r, m, layer, i, w):  # type: ignore[no-untyped-def]
    """From rows that are put as the input of qkv to their keys and values."""
    multiply_8(share, layer.qkv, w, w.wide, r.num)
    place_rows(share, r, m, layer, i, w)


@piece
def finish_layer(share, r, size, m, layer, i, w):  # type: ignore[no-untyped-def]
    """From where keys and values are kept to the residual stream after the layer. size: rows of a group."""
    barrier(share)
    attend_rows(share, r, size, m, layer, i, w)
    leave_layer(product_8, put_8, share, r.num, m, layer, w)
