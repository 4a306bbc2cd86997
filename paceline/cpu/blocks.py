"""DFlash in compiled form: the target's features become keys and values of every layer, and a whole block is drafted in one pass.

Rows of a block see all of the context and each other. Their keys and values lie behind the context's and are overwritten by what the
target shows next. With a Markov head a token's logits also depend on the token before it, so the guesses are made from left to right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.compile import kernel, piece
from paceline.cpu.guess import guess
from paceline.cpu.head_attention import value_at, write_key
from paceline.cpu.heads import (
    FUSE,
    HEAD,
    embed_row,
    layer_of,
    matrix_of,
    multiply,
    put_normed,
    put_row,
    run_layer,
    scale_row,
    turn_unit,
)
from paceline.cpu.lanes import double_pointer, int_pointer, seed_pointer
from paceline.cpu.matmul import BLOCK_8, DOT_ROWS, GROUP_8, Activations, Matrix, product_8
from paceline.cpu.rows import add, copy
from paceline.cpu.sync import barrier

MARKOV = 3  # of a shape's matrices


class Context(NamedTuple):
    """Rows of features to be taken into the sequences; addresses of int64 arrays of `num` numbers."""

    num: int
    sources: int  # [num, num_sources] addresses
    num_sources: int
    balance: int
    hidden_norm: int
    places: int
    keys: int
    values: int
    rooms: int


class Block(NamedTuple):
    """How the rows of the blocks speak. Rows of a request follow each other."""

    num: int  # requests
    size: int  # rows of a block
    first: int  # row of a block that guesses the first token
    steps: int
    roots: int  # [num]: as draft ids, num_words where it is none
    temperatures: int
    seeds: int
    positions: int
    ids: int
    num_ids: int
    rank: int  # of the Markov head; 0: none
    before: int  # its first matrix: [num_words + 1, rank] floats
    mixed: int  # [num, num_outputs]: what the Markov head adds
    logits: int  # [steps, num, num_outputs]
    tokens: int  # [steps, num]
    chances: int
    is_guessing: bool


@piece
def _only_keys_values(s, matrix):  # type: ignore[no-untyped-def]
    """The rows of a qkv matrix below the queries'."""
    skipped = s.num_heads * s.dim
    tiles = skipped // DOT_ROWS
    return Matrix(matrix.weight + tiles * (matrix.k // GROUP_8) * BLOCK_8, matrix.bias + skipped * 4, matrix.k, matrix.n - skipped)


@piece
def _take_in(part, c, s, w):  # type: ignore[no-untyped-def]
    """Features, fused and normed, as keys and values of every layer."""
    sources, places = carray(int_pointer(c.sources), (c.num, c.num_sources)), carray(int_pointer(c.places), c.num)
    keys, values = carray(int_pointer(c.keys), c.num), carray(int_pointer(c.values), c.num)
    rooms = carray(int_pointer(c.rooms), c.num)
    width, fuse = c.num_sources * s.hidden, matrix_of(s, FUSE)
    for row in range(part, c.num, s.threads):
        ready = w.ready + row * w.widest * 4
        for i in range(c.num_sources):
            copy(sources[row, i], ready + i * s.hidden * 4, s.hidden)
        scale_row(ready, c.balance, width)
        put_row(ready, width, w, row, c.num)
    multiply(part, s, w, fuse, w.narrow, c.num)
    for row in range(part, c.num, s.threads):
        put_normed(s, w, w.narrow + row * fuse.n * 4, c.hidden_norm, row, c.num)
    barrier(w.sync, s.threads)
    for i in range(s.num_layers):
        layer = layer_of(s.layers, i)
        matrix = _only_keys_values(s, layer.qkv)
        product_8(part, s.threads, matrix, Activations(w.values, w.scales, w.sums), w.wide, c.num)
        barrier(w.sync, s.threads)
        for item in range(part, c.num * s.num_kv_heads, s.threads):
            row, head = item // s.num_kv_heads, item % s.num_kv_heads
            here = w.wide + (row * matrix.n + head * s.dim) * 4
            turn_unit(s, layer, layer.k_norm, here, places[row])
            write_key(s, i, keys[row], rooms[row], places[row], head, here)
            copy(here + s.num_kv_heads * s.dim * 4, value_at(s, i, values[row], rooms[row], places[row], head), s.dim)
        barrier(w.sync, s.threads)


@piece
def _run(part, r, s, w):  # type: ignore[no-untyped-def]
    tokens = carray(int_pointer(r.tokens), r.num)
    for row in range(part, r.num, s.threads):
        embed_row(s, tokens[row], w.h + row * s.hidden * 4)
    for i in range(s.num_layers):
        layer = layer_of(s.layers, i)
        for row in range(part, r.num, s.threads):
            put_normed(s, w, w.h + row * s.hidden * 4, layer.input_norm, row, r.num)
        run_layer(part, r, s, layer, i, w)
    barrier(w.sync, s.threads)


@piece
def _speak(part, b, s, w):  # type: ignore[no-untyped-def]
    """Logits of all rows that guess, step by step."""
    rows = b.steps * b.num
    for item in range(part, rows, s.threads):
        step, request = item // b.num, item % b.num
        put_normed(s, w, w.h + (request * b.size + b.first + step) * s.hidden * 4, s.norm, item, rows)
    multiply(part, s, w, matrix_of(s, HEAD), b.logits, rows)


@piece
def _add_markov(part, b, s, w, step):  # type: ignore[no-untyped-def]
    """To the logits of a step, what the token before it adds; it is kept in `roots` as a draft id."""
    roots = carray(int_pointer(b.roots), b.num)
    for i in range(part, b.num, s.threads):
        ready = w.ready + i * w.widest * 4
        copy(b.before + roots[i] * b.rank * 4, ready, b.rank)
        put_row(ready, b.rank, w, i, b.num)
    multiply(part, s, w, matrix_of(s, MARKOV), b.mixed, b.num)
    for i in range(part, b.num, s.threads):
        add(b.logits + (step * b.num + i) * s.num_outputs * 4, b.mixed + i * s.num_outputs * 4, s.num_outputs)


@piece
def _guess(part, b, s, w):  # type: ignore[no-untyped-def]
    temperatures, seeds = carray(double_pointer(b.temperatures), b.num), carray(seed_pointer(b.seeds), b.num)
    positions, ids, roots = (
        carray(int_pointer(b.positions), b.num),
        carray(int_pointer(b.ids), b.num_ids),
        carray(int_pointer(b.roots), b.num),
    )
    tokens, chances = carray(int_pointer(b.tokens), (b.steps, b.num)), carray(double_pointer(b.chances), (b.steps, b.num))
    for step in range(b.steps):
        if b.rank:
            _add_markov(part, b, s, w, step)
        for i in range(part, b.num, s.threads):
            at = b.logits + (step * b.num + i) * s.num_outputs * 4
            best, chance = guess(at, s.num_outputs, s.num_words, ids, temperatures[i], seeds[i], positions[i] + step)
            tokens[step, i] = ids[best] if b.num_ids else best
            chances[step, i] = chance
            roots[i] = best
        barrier(w.sync, s.threads)


@piece
def _part(part, c, r, b, s, w):  # type: ignore[no-untyped-def]
    _take_in(part, c, s, w)
    if r.num == 0:
        return
    _run(part, r, s, w)
    _speak(part, b, s, w)
    if b.is_guessing:
        _guess(part, b, s, w)


@kernel(parallel=True)
def draft_blocks(c, r, b, s, w):  # type: ignore[no-untyped-def]
    for part in prange(s.threads):
        _part(np.int64(part), c, r, b, s, w)
