"""A whole pass in one compiled call: embedding, all layers, head. Each thread runs all of it on its share of
every step (layer.py, attend.py). Three kernels for three kinds of weights; what differs between them is
handed in as `product`, `put` and `embed`.

Invariant: bits of a row depend on its own tokens alone, not on the other rows, the threads or the split into
passes: every step is made of chains whose order is fixed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import carray

from paceline.cpu.attend import attend, expand_tables, kept_of, place, trace_paths
from paceline.cpu.compile import invoke, kernel, piece, piece_named, struct
from paceline.cpu.lanes import int_pointer
from paceline.cpu.layer import (
    MODEL_BYTES,
    ask,
    call_experts,
    dense_ffn,
    layer_of,
    leave_attention,
    model_at,
    multiply,
    put_norm,
    put_norms,
    work_at,
)
from paceline.cpu.matmul import SIZES, product_4, product_8, product_32
from paceline.cpu.rows import copy, embed_8, embed_32, put_4, put_8, put_32, soften
from paceline.cpu.sync import Share, barrier, in_region, order, range_of
from paceline.cpu.top import choose, first_largest
from paceline.models.quantize import DOT_ROWS, head_bits


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
    taps: int  # address of [num_layers + 1] addresses: copies of the residual stream before each layer, or 0
    depth: int  # layers to run
    picked: int  # address of [num_outputs]: the token chosen, -1 where logits are not finite; 0: not wanted
    draw: int  # entry of draw.py's kernel; 0: all are greedy
    choices: int  # address of [num_outputs] Pick
    states_in: int = 0  # of models with recurrent layers
    states_out: int = 0
    source: int = 0  # of a stage behind the first: address of [rows, hidden], what enters its first layer


pass_at = struct(Pass)


@piece
def _tap(share, b, m, w, i):  # type: ignore[no-untyped-def]
    to = carray(int_pointer(b.taps), m.num_layers + 1)[i]
    if to != 0:
        for row in range(share.part, b.rows, share.threads):
            copy(w.h + row * m.hidden * 4, to + row * m.hidden * 4, m.hidden)


@piece
def _pick(share, b, m, w, logits):  # type: ignore[no-untyped-def]
    """While logits are in the caches: each thread looks through about what it has just computed of a row."""
    largest = carray(int_pointer(w.largest), (b.num_outputs, share.threads))
    picked, stride = carray(int_pointer(b.picked), b.num_outputs), m.head.n * 4
    for row in range(b.num_outputs):
        first, last = m.vocab * share.part // share.threads, m.vocab * (share.part + 1) // share.threads
        largest[row, share.part] = first_largest(logits + row * stride, first, last)
    barrier(share)
    if b.draw == 0:
        for row in range(share.part, b.num_outputs, share.threads):
            picked[row] = choose(logits + row * stride, largest[row])


@piece
def _cap(share, b, m, logits):  # type: ignore[no-untyped-def]
    """Of models whose logits have a limit, which they approach softly."""
    if m.cap != 0.0:
        first, last = range_of(share, b.num_outputs * m.head.n // DOT_ROWS)
        soften(logits + first * DOT_ROWS * 4, (last - first) * DOT_ROWS, m.cap)
        barrier(share)


def _pass_of(bits: int, product: Any, put: Any, head_product: Any, head_put: Any, embed: Any) -> Any:
    """What each thread does: of kernels that differ in the kind of weights."""
    size, head_size = SIZES[bits], SIZES[head_bits(bits)]

    @piece_named(f"run_{bits}")
    def run(own, given):  # type: ignore[no-untyped-def]
        """own: the share among the threads of this process; `share` is that among all ranks' threads."""
        b, m, w, logits = pass_at(given[0]), model_at(given[1]), work_at(given[2]), given[3]
        ids, caches = carray(int_pointer(b.input_ids), b.rows), carray(int_pointer(b.caches), (b.depth, 2))
        outputs = carray(int_pointer(b.outputs), b.num_outputs)
        for kind in range(m.num_kinds):
            paths, places = kept_of(b, w, kind)
            if own.part == 0:
                trace_paths(b, model_at(given[1] + kind * MODEL_BYTES), paths)
            expand_tables(own, b, model_at(given[1] + kind * MODEL_BYTES), places)
        ranks = w.num_ranks
        share = Share(own.part * ranks + w.rank, own.threads * ranks, own.sync, w.group, ranks)
        for row in range(share.part, b.rows, share.threads):
            to = row * m.hidden * 4
            if b.source != 0:
                copy(b.source + to, w.h + to, m.hidden)
            else:
                embed(m.embedding, ids[row], w.h + to, m.hidden, m.embed_scale)
        for i in range(b.depth):
            layer, keys, values = layer_of(m.layers, i), caches[i, 0], caches[i, 1]
            _tap(share, b, m, w, i)
            ask(share, layer.qkv, size)
            put_norms(put, share, b.rows, m, w, layer.input_norm)
            multiply(product, share, layer.qkv, w, w.wide, b.rows)
            ask(share, layer.out, size)
            if layer.recurrent != 0:  # by its entry, which comes first in what lies there
                entry = carray(int_pointer(layer.recurrent), 1)[0]
                numbers = share.part, share.threads, given[0], given[2], layer.recurrent, keys, values
                invoke(entry, numbers)
            else:
                heads = model_at(given[1] + layer.kind * MODEL_BYTES)
                place(share, own, b, heads, layer, w, keys, values)
                barrier(own)
                attend(own, b, heads, layer, w, keys, values)
            leave_attention(product, put, size, share, b.rows, m, layer, w)
            if layer.experts == 0:
                dense_ffn(product, put, size, share, b.rows, m, layer, w)
            else:
                call_experts(share, b.rows, w, given[1], i, given[2])
        _tap(share, b, m, w, b.depth)
        ask(share, m.head, head_size)
        barrier(share)
        if m.head.n != 0:
            for i in range(share.part, b.num_outputs, share.threads):
                put_norm(head_put, w.h + outputs[i] * m.hidden * 4, m.norm, m, w, i, b.num_outputs)
            multiply(head_product, share, m.head, w, logits, b.num_outputs)
            _cap(share, b, m, logits)
        if b.picked != 0 and w.rank == 0:
            _pick(own, b, m, w, logits)
            if b.draw != 0:  # by its entry: it is compiled once for all kinds of weights
                invoke(b.draw, (own.part, own.threads, own.sync, given[0], given[1], given[2], logits))

    return run


run_32 = _pass_of(32, product_32, put_32, product_32, put_32, embed_32)
run_8 = _pass_of(8, product_8, put_8, product_8, put_8, embed_8)
run_4 = _pass_of(4, product_4, put_4, product_8, put_8, embed_8)


@piece
def _order(w, b, logits):  # type: ignore[no-untyped-def]
    if w.group != 0 and w.rank == 0:
        order(w.group, b, w.common, logits)


@kernel(parallel=True)
def forward_32(threads, b, m, w, logits):  # type: ignore[no-untyped-def]
    """b, m and w: addresses of the numbers of a Pass, a Model and a Work."""
    _order(work_at(w), b, logits)
    in_region(run_32, work_at(w).sync, threads, (b, m, w, logits))


@kernel(parallel=True)
def forward_8(threads, b, m, w, logits):  # type: ignore[no-untyped-def]
    _order(work_at(w), b, logits)
    in_region(run_8, work_at(w).sync, threads, (b, m, w, logits))


@kernel(parallel=True)
def forward_4(threads, b, m, w, logits):  # type: ignore[no-untyped-def]
    _order(work_at(w), b, logits)
    in_region(run_4, work_at(w).sync, threads, (b, m, w, logits))


FORWARD = {32: forward_32, 8: forward_8, 4: forward_4}
