"""DFlash in compiled form: the target's features become keys and values of every layer, and a whole block is
drafted in one pass.

Rows of a block see all of the context and each other. Their keys and values lie behind the context's and are
overwritten by what the target shows next.
"""

from __future__ import annotations

import numpy as np
from numba import carray, prange

from paceline.cpu.block_attention import attend_blocks
from paceline.cpu.block_guess import guess_words
from paceline.cpu.block_rows import (
    BLOCK,
    CONTEXT,
    ROWS,
    SHAPE,
    WORK,
    block_at,
    context_at,
    write_context,
    write_rows,
)
from paceline.cpu.compile import kernel, piece
from paceline.cpu.head_attention import value_at, write_key
from paceline.cpu.heads import (
    FUSE,
    HEAD,
    embed_row,
    keep_layer,
    layer_of,
    leave_layer,
    matrix_of,
    multiply,
    outputs_of,
    put_normed,
    put_row,
    rows_at,
    scale_row,
    shape_at,
    turn_unit,
    work_at,
)
from paceline.cpu.lanes import int_pointer
from paceline.cpu.matmul import Activations, product_8
from paceline.cpu.rows import copy
from paceline.cpu.sync import barrier


@piece
def _take_in(part, c, s, w):  # type: ignore[no-untyped-def]
    """Features, fused and normed, as keys and values of every layer."""
    sources, places = (
        carray(int_pointer(c.sources), (c.num, c.num_sources)),
        carray(int_pointer(c.places), c.num),
    )
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
        matrix = outputs_of(layer.qkv, s.num_heads * s.dim, 2 * s.num_kv_heads * s.dim)
        product_8(part, s.threads, matrix, Activations(w.values, w.scales, w.sums), w.wide, c.num)
        barrier(w.sync, s.threads)
        for item in range(part, c.num * s.num_kv_heads, s.threads):
            row, head = item // s.num_kv_heads, item % s.num_kv_heads
            here = w.wide + (row * matrix.n + head * s.dim) * 4
            turn_unit(s, layer, layer.k_norm, here, places[row])
            write_key(s, i, keys[row], rooms[row], places[row], head, here)
            copy(
                here + s.num_kv_heads * s.dim * 4,
                value_at(s, i, values[row], rooms[row], places[row], head),
                s.dim,
            )
        barrier(w.sync, s.threads)


@piece
def _run(part, b, r, s, w):  # type: ignore[no-untyped-def]
    tokens = carray(int_pointer(r.tokens), r.num)
    for row in range(part, r.num, s.threads):
        embed_row(s, tokens[row], w.h + row * s.hidden * 4)
    for i in range(s.num_layers):
        layer = layer_of(s.layers, i)
        for row in range(part, r.num, s.threads):
            put_normed(s, w, w.h + row * s.hidden * 4, layer.input_norm, row, r.num)
        keep_layer(part, r, s, layer, i, w)
        barrier(w.sync, s.threads)
        attend_blocks(part, b, r, s, layer, i, w)
        barrier(w.sync, s.threads)
        leave_layer(part, r, s, layer, w)
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
def _part(part, c, r, b, s, w):  # type: ignore[no-untyped-def]
    if part == 0:
        write_context(c, b)
        write_rows(r, b)
    _take_in(part, c, s, w)
    if b.steps == 0:
        return
    _run(part, b, r, s, w)
    _speak(part, b, s, w)
    if b.is_guessing:
        guess_words(part, b, s, w)


@kernel(parallel=True)
def draft_blocks(at, threads):  # type: ignore[no-untyped-def]
    """at: of what `call_of` made."""
    for part in prange(threads):
        c, r, b = context_at(at + 8 * CONTEXT), rows_at(at + 8 * ROWS), block_at(at + 8 * BLOCK)
        _part(np.int64(part), c, r, b, shape_at(at + 8 * SHAPE), work_at(at + 8 * WORK))
