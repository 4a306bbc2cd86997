"""A whole pass in one compiled call: embedding, all layers, head. Each thread runs all of it on its share of every step.

Invariant: a step reads only what was finished before the last barrier, or by the same thread since. Rows of the residual stream
belong to one thread for the whole pass; tiles of a product, chunks of a context and groups of columns are shared out anew in each step.
Three kernels for three kinds of weights; what differs between them is handed in as `product`, `put` and `embed`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.compile import kernel, piece, unrolled
from paceline.cpu.lanes import int_pointer
from paceline.cpu.matmul import Activations, Matrix, product_4, product_8, product_32
from paceline.cpu.paged import CHUNK, EXTRA, attend_chunk, expand_tables, finish, length_of, merge, trace_paths
from paceline.cpu.rows import add, copy, embed_8, embed_32, fill, gate, normalize, put_4, put_8, put_32, turn
from paceline.cpu.sync import barrier

FEW_ROWS = 16  # up to so many, the chunks of a context are shared out; with more, the rows are
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
    num_chunks: int  # no row's context has more
    caches: int  # address of [num_layers, 2] addresses: keys and values
    outputs: int  # rows whose logits are wanted
    num_outputs: int
    taps: int  # address of [num_layers + 1] addresses: where to copy the residual stream before each layer, or 0
    depth: int  # layers to run
    threads: int


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
    paths: int  # [rows, rows + 1]
    places: int  # [requests, room for the longest prefix]
    partials: int  # [rows, chunks, heads, dim + EXTRA], or for many rows [threads, 2, heads, dim + EXTRA]
    scratch: int  # a thread each
    scratch_bytes: int
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


@piece
def _place(part, b, m, layer, qkv, keys, values):  # type: ignore[no-untyped-def]
    """Norm and rotate queries in place, keys into the cache; values into the cache."""
    positions, slots = carray(int_pointer(b.positions), b.rows), carray(int_pointer(b.slots), b.rows)
    units, dim = m.num_heads + 2 * m.num_kv_heads, m.dim
    for item in range(b.rows * units * part // b.threads, b.rows * units * (part + 1) // b.threads):
        row, unit = item // units, item % units
        here, angle = qkv + (row * layer.qkv.n + unit * dim) * 4, positions[row] * (dim // 2) * 4
        slot = slots[row] * m.num_kv_heads * dim * 4
        if unit < m.num_heads:
            if layer.q_norm != 0:
                normalize(here, layer.q_norm, here, dim, m.eps)
            turn(here, here, layer.cos + angle, layer.sin + angle, dim)
        elif unit < m.num_heads + m.num_kv_heads:
            if layer.k_norm != 0:
                normalize(here, layer.k_norm, here, dim, m.eps)
            turn(here, keys + slot + (unit - m.num_heads) * dim * 4, layer.cos + angle, layer.sin + angle, dim)
        else:
            copy(here, values + slot + (unit - m.num_heads - m.num_kv_heads) * dim * 4, dim)


@piece
def _attend_by_chunk(part, b, m, layer, w, qkv, keys, values):  # type: ignore[no-untyped-def]
    """Few rows: a thread takes a chunk of a KV head for all rows, whose keys and values then lie in its cache."""
    stride, group, scratch = (m.dim + EXTRA) * 4, m.num_heads // m.num_kv_heads, w.scratch + part * w.scratch_bytes
    requests = carray(int_pointer(b.request_of), b.rows)
    for item in range(part, b.num_chunks * m.num_kv_heads, b.threads):
        chunk, kv_head, last_request = item // m.num_kv_heads, item % m.num_kv_heads, -1
        for row in range(b.rows):
            length = length_of(b, w.paths, row)
            first = max(chunk * CHUNK, length - layer.window if layer.window > 0 else 0)
            last = min((chunk + 1) * CHUNK, length)
            if first < last:
                q = qkv + (row * layer.qkv.n + kv_head * group * m.dim) * 4
                to = w.partials + ((row * b.num_chunks + chunk) * m.num_heads + kv_head * group) * stride
                attend_chunk(b, m, w, row, requests[row] != last_request, kv_head, first, last, q, keys, values, scratch, to)
                last_request = requests[row]


@piece
def _first_chunk(window, length):  # type: ignore[no-untyped-def]
    return max(0, length - window) // CHUNK if window > 0 else 0


@piece
def _merge_chunks(part, b, m, layer, w):  # type: ignore[no-untyped-def]
    """What `_attend_by_chunk` left: a thread takes a head of a row."""
    stride = (m.dim + EXTRA) * 4
    for item in range(part, b.rows * m.num_heads, b.threads):
        row, head = item // m.num_heads, item % m.num_heads
        length = length_of(b, w.paths, row)
        first, last = _first_chunk(layer.window, length), (length + CHUNK - 1) // CHUNK
        at = w.partials + (row * b.num_chunks * m.num_heads + head) * stride
        total = at + first * m.num_heads * stride
        for chunk in range(first + 1, last):
            merge(total, at + chunk * m.num_heads * stride, m.dim)
        finish(total, w.ready + (row * w.widest + head * m.dim) * 4, m.dim)


@piece
def _attend_by_row(part, b, m, layer, w, qkv, keys, values):  # type: ignore[no-untyped-def]
    """Many rows: a thread takes a row and merges its chunks as they come."""
    stride, group = (m.dim + EXTRA) * 4, m.num_heads // m.num_kv_heads
    total = w.partials + part * 2 * group * stride
    here, scratch = total + group * stride, w.scratch + part * w.scratch_bytes
    for row in range(part, b.rows, b.threads):  # interleaved: later rows of a prompt see more
        length = length_of(b, w.paths, row)
        first_chunk = _first_chunk(layer.window, length)
        for kv_head in range(m.num_kv_heads):
            q = qkv + (row * layer.qkv.n + kv_head * group * m.dim) * 4
            for chunk in range(first_chunk, (length + CHUNK - 1) // CHUNK):
                first = max(chunk * CHUNK, length - layer.window if layer.window > 0 else 0)
                to = total if chunk == first_chunk else here
                last = min((chunk + 1) * CHUNK, length)
                attend_chunk(b, m, w, row, True, kv_head, first, last, q, keys, values, scratch, to)
                if chunk > first_chunk:
                    for head in range(group):
                        merge(total + head * stride, here + head * stride, m.dim)
            for head in range(group):
                finish(total + head * stride, w.ready + (row * w.widest + (kv_head * group + head) * m.dim) * 4, m.dim)


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
        for first in range(blocks * part // b.threads * COLUMNS, blocks * (part + 1) // b.threads * COLUMNS, COLUMNS):
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
    _place(part, b, m, layer, w.wide, keys, values)
    barrier(w.sync, b.threads)
    if b.rows <= FEW_ROWS:
        _attend_by_chunk(part, b, m, layer, w, w.wide, keys, values)
        barrier(w.sync, b.threads)
        _merge_chunks(part, b, m, layer, w)
    else:
        _attend_by_row(part, b, m, layer, w, w.wide, keys, values)
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


@unrolled
def _run(part, product, put, head_product, head_put, embed, b, m, w, logits):  # type: ignore[no-untyped-def]
    taps, caches = carray(int_pointer(b.taps), m.num_layers + 1), carray(int_pointer(b.caches), (m.num_layers, 2))
    ids, outputs = carray(int_pointer(b.input_ids), b.rows), carray(int_pointer(b.outputs), b.num_outputs)
    if part == 0:
        trace_paths(b, w.paths)
    expand_tables(b, part, w.places)
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
    head_product(part, b.threads, _end(m.ends, 1), x, logits, b.num_outputs)


@piece
def _part_32(part, b, m, w, logits):  # type: ignore[no-untyped-def]
    _run(part, product_32, put_32, product_32, put_32, embed_32, b, m, w, logits)


@piece
def _part_8(part, b, m, w, logits):  # type: ignore[no-untyped-def]
    _run(part, product_8, put_8, product_8, put_8, embed_8, b, m, w, logits)


@piece
def _part_4(part, b, m, w, logits):  # type: ignore[no-untyped-def]
    _run(part, product_4, put_4, product_8, put_8, embed_8, b, m, w, logits)


@kernel(parallel=True)
def forward_32(b, m, w, logits):  # type: ignore[no-untyped-def]
    for part in prange(b.threads):
        _part_32(np.int64(part), b, m, w, logits)


@kernel(parallel=True)
def forward_8(b, m, w, logits):  # type: ignore[no-untyped-def]
    for part in prange(b.threads):
        _part_8(np.int64(part), b, m, w, logits)


@kernel(parallel=True)
def forward_4(b, m, w, logits):  # type: ignore[no-untyped-def]
    for part in prange(b.threads):
        _part_4(np.int64(part), b, m, w, logits)


FORWARD = {32: forward_32, 8: forward_8, 4: forward_4}
