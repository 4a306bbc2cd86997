"""Attention over a paged KV cache under token trees.

A row sees its request's cached prefix, its ancestors in this pass and itself, in position order, whatever else is in the pass.
Invariant: scores, softmax and weighted sum of one (row, head) are fixed chains over that context, so its bits depend on the context
alone; tiles of positions and heads only decide which chains run side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba import carray, prange, types
from numba.extending import intrinsic

from paceline.cpu.lanes import FLOAT, INT64, LANES, Emitter, address, float_pointer, floats, int_pointer
from paceline.cpu.rows import exponential

if TYPE_CHECKING:
    import torch

    from paceline.types import Batch

WIDTH = 8  # lanes of a dot product
SPAN = 4  # positions scored side by side
MAX_HEADS = 3  # query heads of one KV head side by side: 3 * 4 * 8 floats are 24 NEON registers


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_tile(_context: Any, heads: Any, q: Any, keys: Any, slots: Any, slot_bytes: Any, last: Any, dim: Any, out: Any, out_stride: Any) -> Any:
    """out[h, p] = q[h] · keys[slots[p]] for SPAN positions; those after `last` repeat it (the caller overwrites or ignores them)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q, keys, slots, slot_bytes, last, dim, out, out_stride = arguments[1:]
        emit, num_heads = Emitter(builder), heads.literal_value
        inside = [builder.select(builder.icmp_signed("<", emit.const(p), last), emit.const(p), last) for p in range(SPAN)]
        rows = [emit.offset(keys, emit.times(emit.load(emit.offset(slots, emit.times(p, 8)), INT64), slot_bytes)) for p in inside]
        sums = [[emit.variable(emit.zeros(WIDTH)) for _ in rows] for _ in range(num_heads)]
        with emit.loop(builder.sdiv(dim, emit.const(WIDTH))) as turn:
            step = emit.times(turn, 4 * WIDTH)
            queries = [emit.load(emit.offset(q, emit.times(dim, 4 * h), step), floats(WIDTH)) for h in range(num_heads)]
            for p, row in enumerate(rows):
                key = emit.load(emit.offset(row, step), floats(WIDTH))
                for h, query in enumerate(queries):
                    emit.accumulate(sums[h][p], query, key)
        for h, row_sums in enumerate(sums):
            for p, total in enumerate(row_sums):
                emit.store(emit.total(builder.load(total)), emit.offset(out, emit.times(out_stride, h), 4 * p))
        return context.get_dummy_value()

    return types.void(heads, *[types.int64] * 8), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def mix_tile(
    _context: Any, heads: Any, weights: Any, weight_stride: Any, values: Any, slots: Any, slot_bytes: Any, count: Any, dim: Any, out: Any
) -> Any:
    """out[h, :16] = sum over positions of weights[h, p] * values[slots[p], :16], in order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, weight_stride, values, slots, slot_bytes, count, dim, out = arguments[1:]
        emit, num_heads = Emitter(builder), heads.literal_value
        sums = [emit.variable(emit.zeros(LANES)) for _ in range(num_heads)]
        with emit.loop(count) as p:
            slot = emit.load(emit.offset(slots, emit.times(p, 8)), INT64)
            value = emit.load(emit.offset(values, emit.times(slot, slot_bytes)), floats(LANES))
            for h, total in enumerate(sums):
                weight = emit.load(emit.offset(weights, emit.times(weight_stride, h), emit.times(p, 4)), FLOAT)
                emit.accumulate(total, emit.broadcast(weight, LANES), value)
        for h, total in enumerate(sums):
            emit.store(builder.load(total), emit.offset(out, emit.times(dim, 4 * h)))
        return context.get_dummy_value()

    return types.void(heads, *[types.int64] * 8), generate


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _context(row, parents, slots, table, block_size, prefix, window, context):  # type: ignore[no-untyped-def]
    """Write the slots row `row` sees, oldest first, into `context`; return how many."""
    depth, node = 0, row
    while node >= 0:
        depth += 1
        node = parents[node]
    length = prefix + depth
    first = max(0, length - window) if window > 0 else 0
    for position in range(first, prefix):
        context[position - first] = table[position // block_size] * block_size + position % block_size
    node = row
    for position in range(length - 1, max(first, prefix) - 1, -1):
        context[position - first] = slots[node]
        node = parents[node]
    return length - first


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _softmax(scores, scale):  # type: ignore[no-untyped-def]
    """exp(scale * (s - max)) in place; returns 1 / sum."""
    count = scores.size
    top = scores[0]
    for i in range(count):
        top = max(top, scores[i])
    for i in range(count):
        scores[i] = exponential((scores[i] - top) * scale)
    a = b = c = d = np.float32(0)
    whole = count // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, d = a + scores[i], b + scores[i + 1], c + scores[i + 2], d + scores[i + 3]
    for i in range(whole, count):
        a += scores[i]
    return np.float32(1) / ((a + b) + (c + d))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _some_heads(heads, q, keys, values, slot_bytes, context, count, scores, scale, dim, out):  # type: ignore[no-untyped-def]
    """Attention of `heads` query heads (a compile-time constant) of one row over one KV head."""
    at, stride, slots = address(scores), scores.shape[1] * 4, address(context)
    for p in range(0, count, SPAN):
        score_tile(heads, q, keys, slots + p * 8, slot_bytes, count - 1 - p, dim, at + p * 4, stride)
    for h in range(heads):
        shrink = _softmax(scores[h, :count], scale)
        for p in range(count):
            scores[h, p] *= shrink
    for d in range(0, dim, LANES):
        mix_tile(heads, at, stride, values + d * 4, slots, slot_bytes, count, dim, out + d * 4)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _group(q, keys, values, slot_bytes, context, count, scores, scale, group, dim, out):  # type: ignore[no-untyped-def]
    """All query heads of one KV head, at most MAX_HEADS side by side."""
    head = 0
    while head < group:
        parts = (group - head + MAX_HEADS - 1) // MAX_HEADS
        heads = (group - head + parts - 1) // parts
        skip = head * dim * 4
        if heads == 1:
            _some_heads(1, q + skip, keys, values, slot_bytes, context, count, scores, scale, dim, out + skip)
        elif heads == 2:
            _some_heads(2, q + skip, keys, values, slot_bytes, context, count, scores, scale, dim, out + skip)
        else:
            _some_heads(3, q + skip, keys, values, slot_bytes, context, count, scores, scale, dim, out + skip)
        head += heads


@numba.njit(parallel=True, nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q_at, q_stride, keys, values, out, parents_at, slots_at, requests_at, tables_at, prefixes_at,
    rows, num_requests, max_blocks, block_size, kv_heads, group, dim, longest, window, scale, threads,
):  # fmt: skip
    parents, slots = carray(int_pointer(parents_at), rows), carray(int_pointer(slots_at), rows)
    requests, prefixes = carray(int_pointer(requests_at), rows), carray(int_pointer(prefixes_at), num_requests)
    tables = carray(int_pointer(tables_at), (num_requests, max_blocks))
    slot_bytes, out_stride = kv_heads * dim * 4, kv_heads * group * dim * 4
    for part in prange(threads):
        context, scores = np.empty(longest, np.int64), np.empty((MAX_HEADS, longest + SPAN), np.float32)
        for item in range(part, rows * kv_heads, threads):  # interleaved: later rows of a prompt see more
            row, head = item // kv_heads, item % kv_heads
            request = requests[row]
            count = _context(row, parents, slots, tables[request], block_size, prefixes[request], window, context)
            skip = head * dim * 4
            _group(
                q_at + row * q_stride + skip * group, keys + skip, values + skip, slot_bytes, context, count, scores,
                np.float32(scale), group, dim, out + row * out_stride + skip * group,
            )  # fmt: skip


def attend(
    qkv: torch.Tensor,  # [T, (heads + 2 * kv_heads) * dim], queries first
    cache: tuple[torch.Tensor, torch.Tensor],  # [num_slots, kv_heads, dim]
    batch: Batch,
    longest: int,  # no row's context is longer
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """-> [T, heads * dim]. Keys and values of this pass are in the cache already."""
    keys, values = cache
    kv_heads, dim = keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    out = qkv.new_empty(len(qkv), heads * dim)
    _attend(
        qkv.data_ptr(), qkv.shape[1] * 4, keys.data_ptr(), values.data_ptr(), out.data_ptr(), batch.parents.data_ptr(),
        batch.slots.data_ptr(), batch.request_of.data_ptr(), batch.block_tables.data_ptr(), batch.prefix_lens.data_ptr(),
        len(qkv), len(batch.prefix_lens), batch.block_tables.shape[1], batch.block_size, kv_heads, heads // kv_heads, dim, longest,
        window or 0, scale, numba.get_num_threads(),
    )  # fmt: skip
    return out
