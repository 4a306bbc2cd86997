"""What the compiled drafting heads share: how their calls are described, and the pass of heads with layers,
which are the decoder's (layer.py) in int8 over sequences of their own (head_attention.py).

The host names requests; the first thread works out the rows of a pass from them. A head only guesses, so
nothing here has to be the same for every shape of a pass; it is, as it happens.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import carray

from paceline.cpu.compile import piece, struct
from paceline.cpu.head_attention import ROW_SIZE, PlacedRow, Rows, attend_rows, first_block, row_of, write_key
from paceline.cpu.head_call import (
    EAGLE_1,
    EAGLE_3,
    MODEL_AT,
    REQUEST_SIZE,
    WORK_AT,
    Block,
    CallMemory,
    Entry,
    HeadRequest,
    Turn,
)
from paceline.cpu.lanes import double_pointer, float_pointer, int_pointer
from paceline.cpu.layer import (
    Model,
    Work,
    call_experts,
    dense_ffn,
    layer_of,
    leave_attention,
    multiply,
    put_norm,
    put_row,
    turn_head,
)
from paceline.cpu.matmul import SIZE_8, outputs_of, product_8
from paceline.cpu.rows import copy, embed_8, embed_32, normalize, put_8
from paceline.cpu.sync import barrier, range_of


class Call(NamedTuple):
    """What the kernels of heads with layers are given the address of."""

    turn: Turn
    work: Work
    memory: CallMemory
    model: Model
    entry: Entry
    block: Block


call_at, request_at = struct(Call), struct(HeadRequest)


@piece
def request_of(c, i):  # type: ignore[no-untyped-def]
    return request_at(c.memory.requests + i * REQUEST_SIZE * 8)


@piece
def rows_of(c, num):  # type: ignore[no-untyped-def]
    """The first rows of a call's table."""
    return Rows(num, c.memory.tokens, c.memory.table, c.memory.others, c.memory.most_others)


@piece
def write_row(table, row, one, ahead, seen):  # type: ignore[no-untyped-def]
    """Into the table: a request's row, `ahead` of its first new one."""
    where = one.keys, one.values, one.room, one.start + ahead, one.position + ahead
    at = PlacedRow(*where, seen, one.num_others)
    for i in range(ROW_SIZE):
        table[row, i] = at[i]


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
def multiply_8(share, matrix, w, y, rows):  # type: ignore[no-untyped-def]
    multiply(product_8, share, matrix, w, y, rows)


@piece
def put_features(e, sources, norm, first, m, w, row, rows):  # type: ignore[no-untyped-def]
    """Hidden states of a row, from column `first` of `ready` on, as the input of the product that fuses them.
    norm: address, 0: they are taken as they are."""
    ready, width = w.ready + row * w.widest * 4, first + e.num_sources * m.hidden
    for i in range(e.num_sources):
        to = ready + (first + i * m.hidden) * 4
        if norm != 0:
            normalize(sources[i], norm, to, m.hidden, m.eps)
        else:
            copy(sources[i], to, m.hidden)
        if e.source_norm != 0:
            normalize(to, e.source_norm, to, m.hidden, m.eps)
    x, factors = carray(float_pointer(ready), width), carray(float_pointer(e.balance), width)
    for i in range(width):
        x[i] *= factors[i]
    put_8_row(ready, width, w, row, rows)


@piece
def _enter(share, c, r, is_fused):  # type: ignore[no-untyped-def]
    """The residual stream before the first layer."""
    m, e, w, tokens = c.model, c.entry, c.work, carray(int_pointer(r.tokens), r.num)
    sources = carray(int_pointer(c.memory.sources), (r.num, e.num_sources))
    has_product = e.kind == EAGLE_1 or (e.kind == EAGLE_3 and is_fused)
    norm, first = e.feature_norm if is_fused else 0, m.hidden if e.kind == EAGLE_1 else 0
    for row in range(share.part, r.num, share.threads):
        if has_product:
            if first:
                ready = w.ready + row * w.widest * 4
                embed_row(m, tokens[row], ready)
                if e.embed_norm != 0:
                    normalize(ready, e.embed_norm, ready, m.hidden, m.eps)
            put_features(e, sources[row], norm, first, m, w, row, r.num)
        elif e.kind == EAGLE_3:
            copy(sources[row, 0], w.h + row * m.hidden * 4, m.hidden)
        else:
            embed_row(m, tokens[row], w.h + row * m.hidden * 4)
    if has_product:
        multiply_8(share, e.fuse, w, w.narrow, r.num)
        for row in range(share.part, r.num, share.threads):
            copy(w.narrow + row * e.fuse.n * 4, w.h + row * m.hidden * 4, m.hidden)


@piece
def _put_inputs(share, c, r, layer, has_pairs):  # type: ignore[no-untyped-def]
    """What a layer reads: the normed residual stream; for EAGLE-3 after the token's embedding, normed too."""
    m, w, tokens = c.model, c.work, carray(int_pointer(r.tokens), r.num)
    for row in range(share.part, r.num, share.threads):
        h, ready = w.h + row * m.hidden * 4, w.ready + row * w.widest * 4
        if not has_pairs:
            put_8_norm(h, layer.input_norm, m, w, row, r.num)
            continue
        embed_row(m, tokens[row], ready)
        normalize(ready, layer.input_norm, ready, m.hidden, m.eps)
        normalize(h, layer.hidden_norm, ready + m.hidden * 4, m.hidden, m.eps)
        if c.entry.is_normed_residual:
            copy(ready + m.hidden * 4, h, m.hidden)
        put_8_row(ready, 2 * m.hidden, w, row, r.num)


@piece
def keep_rows(share, r, m, layer, i, w, first):  # type: ignore[no-untyped-def]
    """From rows that are put as the input of qkv to their queries in `wide` and keys and values in their
    sequences; heads before `first` are not wanted. A thread takes about the columns that it has computed."""
    matrix = outputs_of(layer.qkv, first * m.dim, layer.qkv.n - first * m.dim)
    multiply_8(share, matrix, w, w.wide, r.num)
    begin, end = range_of(share, m.num_heads + 2 * m.num_kv_heads - first)
    for unit in range(begin + first, end + first):
        for row in range(r.num):
            one, here = row_of(r, row), w.wide + (row * matrix.n + (unit - first) * m.dim) * 4
            if unit < m.num_heads:
                turn_head(m, layer, layer.q_norm, here, one.position)
            elif unit < m.num_heads + m.num_kv_heads:
                turn_head(m, layer, layer.k_norm, here, one.position)
                write_key(m, i, one, unit - m.num_heads, here)
            else:
                at = first_block(m, i, one.room, unit - m.num_heads - m.num_kv_heads) + one.place * m.dim * 4
                copy(here, one.values + at, m.dim)


@piece
def _only(r, w, m, layer, row):  # type: ignore[no-untyped-def]
    """One of the rows, and the memory of a pass in which its residual stream and queries are the first."""
    table, others = r.table + row * ROW_SIZE * 8, r.others + row * r.most_others * 8
    h, wide = w.h + row * m.hidden * 4, w.wide + row * layer.qkv.n * 4
    return Rows(1, r.tokens + row * 8, table, others, r.most_others), Work(w.sync, h, w.ready, wide, *w[4:])


@piece
def run_rows(share, c, r, size, is_fused):  # type: ignore[no-untyped-def]
    """From tokens and features to outputs and logits of the rows that speak. size: of groups of rows that see
    the same. Of rows that do not speak only keys and values are wanted: where one row speaks, it alone goes
    through the rest of the last layer."""
    m, e, count, last = c.model, c.entry, c.turn.num_speaking, c.model.num_layers - 1
    speaking = carray(int_pointer(c.memory.speaking), count)
    _enter(share, c, r, is_fused)
    for i in range(m.num_layers):
        layer, own, w, group = layer_of(m.layers, i), r, c.work, size
        _put_inputs(share, c, r, layer, i == 0 and e.kind == EAGLE_3)
        keep_rows(share, r, m, layer, i, w, 0)
        barrier(share)
        if i == last and count == 1:
            (own, w), group = _only(r, w, m, layer, speaking[0]), 1
        if i < last or count:
            attend_rows(share, own, group, m, layer, i, w)
            leave_attention(product_8, put_8, SIZE_8, share, own.num, m, layer, w)
            if layer.experts == 0:
                dense_ffn(product_8, put_8, SIZE_8, share, own.num, m, layer, w)
            else:
                call_experts(share, own.num, w, c.memory.call + MODEL_AT, i, c.memory.call + WORK_AT)
    barrier(share)
    w = c.work
    for i in range(share.part, count, share.threads):
        h, to = w.h + speaking[i] * m.hidden * 4, c.memory.outputs + i * m.hidden * 4
        put_8_norm(h, m.norm, m, w, i, count)
        copy(w.ready + i * w.widest * 4 if e.is_normed_output else h, to, m.hidden)
    if c.turn.has_logits:
        multiply_8(share, m.head, w, c.memory.logits, count)


@piece
def write_guess(c, step, i, best, chance, is_path):  # type: ignore[no-untyped-def]
    """Request i's token of a step, and its chance; of the whole path to it where `is_path`."""
    at, shape = c.memory, (c.turn.steps, c.turn.num_requests)
    ids, chances = carray(int_pointer(at.ids), at.num_ids), carray(double_pointer(at.chances), shape)
    carray(int_pointer(at.guesses), shape)[step, i] = ids[best] if at.num_ids else best
    chances[step, i] = chance * (chances[step - 1, i] if is_path and step else 1.0)
