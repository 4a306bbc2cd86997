"""What the decoder's layer and those of drafting heads share: the steps between their products.

`put` and `product` are of the kind of weights, `m` is a Model, `w` the memory of the pass. Invariant: a step
reads only what was finished before the last barrier, or by the same thread since. Rows of the residual stream
belong to one thread for the whole pass; tiles of a product and groups of columns to one for a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from paceline.cpu.compile import invoke, piece, size_of, struct, unrolled
from paceline.cpu.lanes import float_pointer, fma
from paceline.cpu.matmul import Matrix
from paceline.cpu.routing import Routing
from paceline.cpu.rows import add, copy, fill, gate, normalize, open_gates, times
from paceline.cpu.sync import barrier, in_row, range_of, wanted_by
from paceline.models.quantize import DOT_ROWS

COLUMNS = 64  # columns a thread takes at a time: a multiple of every group


class Model(NamedTuple):
    """What is the same in all layers, of the decoder or of a drafting head."""

    embedding: Matrix
    is_float_embedding: bool
    head: Matrix  # the output layer
    norm: int  # address; 0: none
    layers: int  # address of [num_layers] LayerRow
    num_layers: int
    hidden: int
    inner: int  # width of the MLP
    num_heads: int
    num_kv_heads: int
    dim: int
    eps: float
    scale: float
    embed_scale: float
    activation: int  # its number (rows.py)
    vocab: int  # outputs of the head but for what fills up its last tile
    is_rounded: bool  # queries, keys and values are integers with scales
    key_bytes: int  # of a head of a query or a cached key
    value_bytes: int  # of a head of a cached value
    rotary: int  # numbers of a head that turn, its first
    is_norm_over_heads: bool  # one norm of a row's queries, one of its keys; else one for each head
    query_scales: int  # address of [max_context] floats that queries are multiplied by; 0: none
    residual_scale: float  # of what attention and the ffn add
    routing: Routing
    cap: float = 0.0  # logits are cap * tanh(logits / cap); 0: as they are
    num_kinds: int = 1  # of layers, by their heads: as many Models follow each other, alike but for these
    # of a rank of a parallel model, which attends with num_heads and num_kv_heads of them:
    first_kv_head: int = 0
    all_heads: int = 0
    all_kv_heads: int = 0


class ExpertRow(NamedTuple):
    """An expert in memory."""

    gate_up: Matrix
    down: Matrix


class LayerRow(NamedTuple):
    """A layer in memory: addresses, 0 for what is not there."""

    input_norm: int
    hidden_norm: int  # of the feature that EAGLE-3 reads beside the token
    qkv: Matrix
    q_norm: int
    k_norm: int
    cos: int
    sin: int
    window: int  # positions that a row sees; 0: all
    out: Matrix
    after_attention: int
    mlp_norm: int
    gate_up: Matrix
    down: Matrix
    after_mlp: int
    sinks: int = 0  # [num_heads] scores that weigh and have no value
    width: int = 0  # of what `out` reads; 0: that of all heads
    gates: int = 0  # the column of `wide` from which what was attended is gated; 0: it is not
    recurrent: int = 0  # address of a recurrent.Recurrent; 0: the layer attends
    experts: int = 0  # address of [num_experts] ExpertRow, in place of gate_up and down
    router: Matrix = Matrix(0, 0, 0, 0)  # of floats
    correction: int = 0  # [num_experts] of what experts are chosen by; without a sigmoid, scales of shares
    kind: int = 0  # which Model has its heads
    v_norm: int = 0
    scalar: float = 1.0  # the residual stream after the layer is multiplied by it
    # of experts that have norms of their own (models/experts.py); else all read that of `mlp_norm`
    router_norm: int = 0
    shared_norm: int = 0
    after_experts_norm: int = 0
    after_shared_norm: int = 0


class Work(NamedTuple):
    """Memory of a pass, one address each: the decoder's; a drafting head's ends with `longest`."""

    sync: int
    h: int  # [rows, hidden] the residual stream
    ready: int  # [rows, widest] what becomes the input of a product, rows filled up to whole groups
    wide: int  # [rows, widest output]
    narrow: int  # [rows, output of out and down]
    values: int
    scales: int
    sums: int
    # [KV heads, rows, query heads of one, span]; of many rows this, value_scales, mixed and totals are
    # [threads, TOGETHER, ..]; of a head: [threads, queries that take turns, longest]
    scores: int
    widest: int  # columns of ready
    longest: int = 0
    paths: int = 0  # [kinds of layers, rows, rows + 1, 2]
    places: int = 0  # [kinds of layers, requests, room for the longest prefix, 2]
    queries: int = 0  # [KV heads, rows, query heads of one, key_bytes]
    value_scales: int = 0  # [KV heads, rows, span]
    mixed: int = 0  # [KV heads, rows, query heads of one, 2, dim]
    totals: int = 0  # [KV heads, rows, query heads of one]
    largest: int = 0  # [num_outputs, threads] int64: where each thread found the largest in its part of a row
    found: int = 0  # of draw.py, for each of a few rows: [threads, 2] a float64 score and a token, or a count
    near: int = 0  # [vocab] int32: tokens near the best
    masses: int = 0  # [PIECES] float64: sums of probabilities
    state: int = 0  # of a recurrent layer, after a row that leaves none
    tail: int = 0
    # of experts.py, where `slots` experts work for a row:
    routed: int = 0  # [2, rows, router's outputs]
    chosen: int = 0  # [rows, slots] int64: experts
    shares: int = 0  # [rows, slots]
    ranks: int = 0  # [rows, slots] int64: places among all experts' rows, grouped by expert
    starts: int = 0  # [experts + 1] int64: where those of an expert begin
    gated: int = 0  # [threads, COLUMNS]
    woken: int = 0  # int64: experts that were woken in all layers since it was zero
    attended: int = 0  # ready from the first column of this rank's heads on
    group: int = 0  # address of the memory of a group of ranks; 0: there is none
    rank: int = 0
    num_ranks: int = 1
    common: int = 0  # address of the addresses of what ranks share of all this


LAYER_BYTES, MODEL_BYTES = 8 * size_of(LayerRow), 8 * size_of(Model)
layer_at, matrix_at, model_at, work_at = struct(LayerRow), struct(Matrix), struct(Model), struct(Work)


@piece
def layer_of(layers, i):  # type: ignore[no-untyped-def]
    """Layer i of those that lie at an address."""
    return layer_at(layers + i * LAYER_BYTES)


@unrolled
def put_row(put, ready, width, w, row, rows):  # type: ignore[no-untyped-def]
    """A whole row of `ready` becomes a row of the next product's input."""
    padded = (width + COLUMNS - 1) // COLUMNS * COLUMNS
    fill(ready, width, padded)
    put(ready, width, 0, padded, w, row, rows)


@unrolled
def put_norm(put, source, weight, m, w, row, rows):  # type: ignore[no-untyped-def]
    """norm(source), or what it is where there is no weight, becomes a row of the next product's input."""
    ready = w.ready + row * w.widest * 4
    if weight != 0:
        normalize(source, weight, ready, m.hidden, m.eps)
    else:
        copy(source, ready, m.hidden)
    put_row(put, ready, m.hidden, w, row, rows)


@unrolled
def put_norms(put, share, rows, m, w, weight):  # type: ignore[no-untyped-def]
    """The same for all rows of the residual stream."""
    for row in range(share.part, rows, share.threads):
        put_norm(put, w.h + row * m.hidden * 4, weight, m, w, row, rows)


@piece
def turn_head(m, layer, norm, here, position):  # type: ignore[no-untyped-def]
    """Norm, where there is a weight, and rotate a head in place; pairs are (i, i + half) of what turns."""
    half = m.rotary // 2
    if norm != 0:
        normalize(here, norm, here, m.dim, m.eps)
    x, cos = carray(float_pointer(here), m.dim), carray(float_pointer(layer.cos + position * half * 4), half)
    sin = carray(float_pointer(layer.sin + position * half * 4), half)
    for i in range(half):
        left, right = x[i], x[half + i]
        x[i] = fma(left, cos[i], -(right * sin[i]))
        x[half + i] = fma(right, cos[i], left * sin[i])


@unrolled
def multiply(product, share, matrix, w, y, rows):  # type: ignore[no-untyped-def]
    """Between barriers: before, all rows are put; after, all of y is there."""
    barrier(share)
    product(in_row(share), share.threads, matrix, w, y, rows)
    barrier(share)


@piece
def ask(share, matrix, size):  # type: ignore[no-untyped-def]
    """While it waits, a thread asks for its share of the next product's weights; size: matmul.SIZES."""
    (first, last), wanted = range_of(share, matrix.n // DOT_ROWS), wanted_by(share)
    tile_bytes = matrix.k * DOT_ROWS * size // 32
    wanted[0], wanted[1] = matrix.weight + first * tile_bytes, matrix.weight + last * tile_bytes


@piece
def _add_block(share, rows, m, w, after, stride, scalar):  # type: ignore[no-untyped-def]
    """h += narrow, or its norm where there is a weight, times a scale; then h is multiplied by a scalar."""
    for row in range(share.part, rows, share.threads):
        added = w.narrow + row * stride * 4
        if after != 0:
            normalize(added, after, added, m.hidden, m.eps)
        leave_row(w.h + row * m.hidden * 4, added, m, scalar)


@piece
def leave_row(h, added, m, scalar):  # type: ignore[no-untyped-def]
    add(h, added, m.hidden, m.residual_scale)
    if scalar != 1.0:
        times(h, m.hidden, np.float32(scalar))


@unrolled
def leave_attention(product, put, size, share, rows, m, layer, w):  # type: ignore[no-untyped-def]
    """From `ready`, which is what attention found, to the residual stream before the ffn. size: SIZES of
    the product."""
    width = m.num_heads * m.dim if layer.width == 0 else layer.width
    blocks = (width + COLUMNS - 1) // COLUMNS
    barrier(share)
    for item in range(share.part, rows * blocks, share.threads):
        row, first = item // blocks, item % blocks * COLUMNS
        ready = w.ready + row * w.widest * 4
        if layer.gates != 0:
            gates = w.wide + (row * layer.qkv.n + layer.gates + first) * 4
            open_gates(ready + first * 4, gates, min(COLUMNS, width - first))
        fill(ready, max(first, width), first + COLUMNS)
        put(ready, width, first, first + COLUMNS, w, row, rows)
    multiply(product, share, layer.out, w, w.narrow, rows)
    ask(share, layer.gate_up, size)
    _add_block(share, rows, m, w, layer.after_attention, layer.out.n, 1.0)


@unrolled
def dense_ffn(product, put, size, share, rows, m, layer, w):  # type: ignore[no-untyped-def]
    """From there to the residual stream after the layer."""
    put_norms(put, share, rows, m, w, layer.mlp_norm)
    multiply(product, share, layer.gate_up, w, w.wide, rows)
    ask(share, layer.down, size)
    # a thread takes the columns that it has just computed (the order of the rows: loaders/packed.py)
    begin, end = range_of(share, (m.inner + COLUMNS - 1) // COLUMNS)
    for row in range(rows):
        ready, source = w.ready + row * w.widest * 4, w.wide + row * layer.gate_up.n * 4
        for first in range(begin * COLUMNS, end * COLUMNS, COLUMNS):
            size = min(COLUMNS, m.inner - first)
            gates = source + 2 * first * 4
            gate(m.activation, gates, gates + size * 4, ready + first * 4, size)
            fill(ready, first + size, first + COLUMNS)
            put(ready, m.inner, first, first + COLUMNS, w, row, rows)
    multiply(product, share, layer.down, w, w.narrow, rows)
    _add_block(share, rows, m, w, layer.after_mlp, layer.down.n, layer.scalar)


@piece
def call_experts(share, rows, w, model, i, work):  # type: ignore[no-untyped-def]
    """The same with experts of layer i (experts.py). model, work: addresses; the residual stream is w's."""
    m = model_at(model)
    share_of = share.part, share.threads, share.sync, share.group, share.ranks
    invoke(m.routing.entry, (*share_of, rows, w.h, model, m.layers + i * LAYER_BYTES, work))
