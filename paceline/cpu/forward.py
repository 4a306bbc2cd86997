"""A whole pass in one compiled call: embedding, all layers, head. Each thread runs all of it on its share of
every step.

Invariant: a step reads only what was finished before the last barrier, or by the same thread since. Rows of
the residual stream belong to one thread for the whole pass; tiles of a product, positions of a context and
groups of columns are shared out anew in each step. Three kernels for three kinds of weights; what differs
between them is handed in as `product`, `put` and `embed`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.attend import attend, place
from paceline.cpu.compile import kernel, piece, unrolled
from paceline.cpu.lanes import double_pointer, int_pointer
from paceline.cpu.matmul import Activations, Matrix, product_4, product_8, product_32
from paceline.cpu.paged import expand_tables, trace_paths
from paceline.cpu.rows import add, copy, embed_8, embed_32, fill, gate, normalize, put_4, put_8, put_32
from paceline.cpu.sync import barrier
from paceline.cpu.top import choose, first_largest

COLUMNS = 64  # columns a thread takes at a time: a multiple of every group


class Model(NamedTuple):
    """What is the same in all layers."""

    ends: int  # address of [2, 4] int64: the fields of the embedding's Matrix and of the head's
    norm: int  # address
    layers: int  # address of [num_layers, len(Layer fields)] int64
    num_layers: int
    hidden: int
    inner: int  # width of the MLP
    num_heads: int
    num_kv_heads: int
    dim: int
    eps: float
    scale: float
    embed_scale: float
    is_gelu: bool
    vocab: int  # outputs of the head but for what fills up its last tile
    key_bytes: (
        int  # of a head of a query or of a cached key: its floats, or fewer if both and values are rounded
    )


class LayerRow(NamedTuple):
    """A row of the table of layers: addresses, 0 for what is not there."""

    attention_norm: int
    qkv: Matrix
    q_norm: int
    k_norm: int
    cos: int
    sin: int
    window: int
    out: Matrix
    after_attention: int
    mlp_norm: int
    gate_up: Matrix
    down: Matrix
    after_mlp: int


NUM_FIELDS = len(LayerRow._fields) + 4 * (len(Matrix._fields) - 1)


class Pass(NamedTuple):
    """Where the batch lies: addresses of its int64 tensors, and their sizes."""

    rows: int
    input_ids: int
    positions: int
    slots: int
    parents: int
    request_of: int
    block_tables: int
    prefix_lens: int
    num_requests: int
    max_blocks: int
    block_size: int
    span: int  # a row's scores in memory: no context has more positions
    caches: int  # address of [num_layers, 2] addresses: keys and values
    outputs: int  # rows whose logits are wanted
    num_outputs: int
    # address of [num_layers + 1] addresses: where to copy the residual stream before each layer, or 0
    taps: int
    depth: int  # layers to run
    threads: int
    # address of [num_outputs]: gets the first largest of each row of logits, -1 where it is not finite; 0:
    # not wanted
    picked: int


class Work(NamedTuple):
    """Memory of a pass, one address each; sizes in decoder.py."""

    sync: int
    h: int  # [rows, hidden] the residual stream
    ready: int  # [rows, widest] what becomes the input of a product, rows filled up to whole groups
    wide: int  # [rows, widest output]
    narrow: int  # [rows, output of out and down]
    values: int
    scales: int
    sums: int
    paths: int  # [rows, rows + 1, 2]
    places: int  # [requests, room for the longest prefix, 2]
    queries: int  # [KV heads, rows, query heads of one, key_bytes]
    # [KV heads, rows, query heads of one, span]; for many rows this and the next three are [threads, a few
    # rows, ...]
    scores: int
    value_scales: int  # [KV heads, rows, span], or [threads, a few rows, span]
    mixed: int  # [KV heads, rows, query heads of one, dim], of rounded values [..., 2, dim]
    totals: int  # [KV heads, rows, query heads of one]
    largest: int  # [num_outputs, threads] int64: where each thread found the largest in its part of a row
    widest: int  # columns of ready


@piece
def _end(ends_at, i):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(ends_at), (2, 4))
    return Matrix(f[i, 0], f[i, 1], f[i, 2], f[i, 3])


@piece
def _layer(layers_at, i):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(layers_at + i * NUM_FIELDS * 8), NUM_FIELDS)
    qkv, out = Matrix(f[1], f[2], f[3], f[4]), Matrix(f[10], f[11], f[12], f[13])
    gate_up, down = Matrix(f[16], f[17], f[18], f[19]), Matrix(f[20], f[21], f[22], f[23])
    return LayerRow(f[0], qkv, f[5], f[6], f[7], f[8], f[9], out, f[14], f[15], gate_up, down, f[24])


@unrolled
def _put_norm(put, source, weight, w, x, m, row, rows):  # type: ignore[no-untyped-def]
    """norm(source) becomes row `row` of the next product's input."""
    ready = w.ready + row * w.widest * 4
    padded = (m.hidden + COLUMNS - 1) // COLUMNS * COLUMNS
    normalize(source, weight, ready, m.hidden, m.eps)
    fill(ready, m.hidden, padded)
    put(ready, m.hidden, 0, padded, x, row, rows)


@unrolled
def _put_heads(put, part, b, m, w, x):  # type: ignore[no-untyped-def]
    width = m.num_heads * m.dim
    blocks = (width + COLUMNS - 1) // COLUMNS
    for item in range(part, b.rows * blocks, b.threads):
        row, first = item // blocks, item % blocks * COLUMNS
        ready = w.ready + row * w.widest * 4
        fill(ready, max(first, width), first + COLUMNS)
        put(ready, width, first, first + COLUMNS, x, row, b.rows)


@unrolled
def _put_gate(put, part, b, m, w, x, stride):  # type: ignore[no-untyped-def]
    """Each thread takes the columns that it has just computed (the order of the rows: loaders/packed.py)."""
    blocks = (m.inner + COLUMNS - 1) // COLUMNS
    for row in range(b.rows):
        ready, source = w.ready + row * w.widest * 4, w.wide + row * stride * 4
        for first in range(
            blocks * part // b.threads * COLUMNS, blocks * (part + 1) // b.threads * COLUMNS, COLUMNS
        ):
            size = min(COLUMNS, m.inner - first)
            gate(m.is_gelu, source + 2 * first * 4, source + (2 * first + size) * 4, ready + first * 4, size)
            fill(ready, first + size, first + COLUMNS)
            put(ready, m.inner, first, first + COLUMNS, x, row, b.rows)


@piece
def _add_block(part, b, m, w, after, stride):  # type: ignore[no-untyped-def]
    """h += narrow, or its norm where there is a weight."""
    for row in range(part, b.rows, b.threads):
        added = w.narrow + row * stride * 4
        if after != 0:
            normalize(added, after, added, m.hidden, m.eps)
        add(w.h + row * m.hidden * 4, added, m.hidden)


@unrolled
def _run_layer(product, put, part, b, m, layer, w, keys, values):  # type: ignore[no-untyped-def]
    x = Activations(w.values, w.scales, w.sums)
    for row in range(part, b.rows, b.threads):
        _put_norm(put, w.h + row * m.hidden * 4, layer.attention_norm, w, x, m, row, b.rows)
    barrier(w.sync, b.threads)
    product(part, b.threads, layer.qkv, x, w.wide, b.rows)
    barrier(w.sync, b.threads)
    place(part, b, m, layer, w, keys, values)
    barrier(w.sync, b.threads)
    attend(part, b, m, layer, w, keys, values)
    barrier(w.sync, b.threads)
    _put_heads(put, part, b, m, w, x)
    barrier(w.sync, b.threads)
    product(part, b.threads, layer.out, x, w.narrow, b.rows)
    barrier(w.sync, b.threads)
    _add_block(part, b, m, w, layer.after_attention, layer.out.n)
    for row in range(part, b.rows, b.threads):
        _put_norm(put, w.h + row * m.hidden * 4, layer.mlp_norm, w, x, m, row, b.rows)
    barrier(w.sync, b.threads)
    product(part, b.threads, layer.gate_up, x, w.wide, b.rows)
    barrier(w.sync, b.threads)
    _put_gate(put, part, b, m, w, x, layer.gate_up.n)
    barrier(w.sync, b.threads)
    product(part, b.threads, layer.down, x, w.narrow, b.rows)
    barrier(w.sync, b.threads)
    _add_block(part, b, m, w, layer.after_mlp, layer.down.n)


@piece
def _tap(part, b, m, w, taps, i):  # type: ignore[no-untyped-def]
    if taps[i] != 0:
        for row in range(part, b.rows, b.threads):
            copy(w.h + row * m.hidden * 4, taps[i] + row * m.hidden * 4, m.hidden)


@piece
def _pick(part, b, m, w, logits, stride):  # type: ignore[no-untyped-def]
    """While the logits are in the caches: each thread looks through about what it has just computed of every
    row.
    """
    largest, picked = (
        carray(int_pointer(w.largest), (b.num_outputs, b.threads)),
        carray(int_pointer(b.picked), b.num_outputs),
    )
    barrier(w.sync, b.threads)
    for row in range(b.num_outputs):
        largest[row, part] = first_largest(
            logits + row * stride, m.vocab * part // b.threads, m.vocab * (part + 1) // b.threads
        )
    barrier(w.sync, b.threads)
    for row in range(part, b.num_outputs, b.threads):
        picked[row] = choose(logits + row * stride, largest[row])


@unrolled
def _run(part, product, put, head_product, head_put, embed, b, m, w, logits):  # type: ignore[no-untyped-def]
    taps, caches = (
        carray(int_pointer(b.taps), m.num_layers + 1),
        carray(int_pointer(b.caches), (m.num_layers, 2)),
    )
    ids, outputs = carray(int_pointer(b.input_ids), b.rows), carray(int_pointer(b.outputs), b.num_outputs)
    if part == 0:
        trace_paths(b, m, w.paths)
    expand_tables(b, part, m, w.places)
    for row in range(part, b.rows, b.threads):
        embed(_end(m.ends, 0), ids[row], w.h + row * m.hidden * 4, m.hidden, m.embed_scale)
    for i in range(b.depth):
        _tap(part, b, m, w, taps, i)
        _run_layer(product, put, part, b, m, _layer(m.layers, i), w, caches[i, 0], caches[i, 1])
    _tap(part, b, m, w, taps, b.depth)
    barrier(w.sync, b.threads)
    x = Activations(w.values, w.scales, w.sums)
    for i in range(part, b.num_outputs, b.threads):
        _put_norm(head_put, w.h + outputs[i] * m.hidden * 4, m.norm, w, x, m, i, b.num_outputs)
    barrier(w.sync, b.threads)
    head = _end(m.ends, 1)
    head_product(part, b.threads, head, x, logits, b.num_outputs)
    if b.picked != 0:
        _pick(part, b, m, w, logits, head.n * 4)


@piece
def _part_32(part, b, m, w, logits):  # type: ignore[no-untyped-def]
    _run(part, product_32, put_32, product_32, put_32, embed_32, b, m, w, logits)


@piece
def _part_8(part, b, m, w, logits):  # type: ignore[no-untyped-def]
    _run(part, product_8, put_8, product_8, put_8, embed_8, b, m, w, logits)


@piece
def _part_4(part, b, m, w, logits):  # type: ignore[no-untyped-def]
    _run(part, product_4, put_4, product_8, put_8, embed_8, b, m, w, logits)


@piece
def _pass_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 19)
    return Pass(
        f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14], f[15], f[16], f[17], f[18]
    )  # fmt: skip


@piece
def _model_at(at):  # type: ignore[no-untyped-def]
    f, x = carray(int_pointer(at), 15), carray(double_pointer(at), 15)
    return Model(
        f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], x[9], x[10], x[11], f[12] != 0, f[13], f[14]
    )


@piece
def _work_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 17)
    return Work(
        f[0],
        f[1],
        f[2],
        f[3],
        f[4],
        f[5],
        f[6],
        f[7],
        f[8],
        f[9],
        f[10],
        f[11],
        f[12],
        f[13],
        f[14],
        f[15],
        f[16],
    )


@kernel(parallel=True)
def forward_32(threads, b, m, w, logits):  # type: ignore[no-untyped-def]
    """b, m and w: addresses of the numbers of a Pass, a Model and a Work."""
    for part in prange(threads):
        _part_32(np.int64(part), _pass_at(b), _model_at(m), _work_at(w), logits)


@kernel(parallel=True)
def forward_8(threads, b, m, w, logits):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        _part_8(np.int64(part), _pass_at(b), _model_at(m), _work_at(w), logits)


@kernel(parallel=True)
def forward_4(threads, b, m, w, logits):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        _part_4(np.int64(part), _pass_at(b), _model_at(m), _work_at(w), logits)


FORWARD = {32: forward_32, 8: forward_8, 4: forward_4}
