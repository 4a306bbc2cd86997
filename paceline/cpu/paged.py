"""Attention over a paged KV cache under token trees.

A row sees its request's cached prefix, its ancestors in this pass and itself, in position order, whatever else is in the pass.
Invariant: scores, softmax and weighted sum of one (row, head) are fixed chains over that context, so its bits depend on the context
alone; tiles of positions and heads only decide which chains run side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
from numba import carray, prange, types
from numba.extending import intrinsic

from paceline.cpu.compile import kernel, piece, unrolled
from paceline.cpu.lanes import FLOAT, INT64, LANES, Emitter, address, floats, int_pointer
from paceline.cpu.rows import place

if TYPE_CHECKING:
    import torch

    from paceline.models.attention import Heads
    from paceline.types import Batch

WIDTH = 4  # lanes of a dot product
SPAN = 4  # positions scored side by side, at most WIDTH
LOWEST = np.float32(-3e38)  # its exponential is 1e-38, which a sum with a 1 in it does not notice
MAX_HEADS = 3  # query heads of one KV head side by side: that makes 12 chains, enough to hide the latency of a multiply-add


@intrinsic(prefer_literal=True)
def score_tile(
    _context: Any, heads: Any, q: Any, keys: Any, slots: Any, slot_bytes: Any, last: Any, dim: Any, out: Any, out_stride: Any
) -> Any:
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


@intrinsic(prefer_literal=True)
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


@piece
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


@intrinsic
def softmax_lanes(_context: Any, scores: Any, turns: Any, scale: Any) -> Any:
    """exp(scale * (s - max)) in place over 4 * turns floats; returns their sum, lane by lane and then across lanes."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, turns, scale = arguments
        emit = Emitter(builder)
        top, total = emit.variable(emit.load(scores, floats(WIDTH))), emit.variable(emit.zeros(WIDTH))
        with emit.loop(turns) as turn:
            score, best = emit.load(emit.offset(scores, emit.times(turn, 4 * WIDTH)), floats(WIDTH)), builder.load(top)
            builder.store(builder.select(builder.fcmp_ordered(">", score, best), score, best), top)
        largest, factor = emit.broadcast(emit.largest(builder.load(top)), WIDTH), emit.broadcast(scale, WIDTH)
        with emit.loop(turns) as turn:
            here = emit.offset(scores, emit.times(turn, 4 * WIDTH))
            value = emit.exponential(builder.fmul(builder.fsub(emit.load(here, floats(WIDTH)), largest), factor))
            emit.store(value, here)
            builder.store(builder.fadd(builder.load(total), value), total)
        return emit.total(builder.load(total))

    return types.float32(types.int64, types.int64, types.float32), generate


@piece
def _softmax(scores, start, count, scale):  # type: ignore[no-untyped-def]
    """Softmax of scale * scores[start : start + count], in place; the caller left room to fill up the last lanes."""
    turns = (count + WIDTH - 1) // WIDTH
    for i in range(start + count, start + turns * WIDTH):
        scores[i] = LOWEST
    shrink = np.float32(1) / softmax_lanes(address(scores) + start * 4, turns, scale)
    for i in range(start, start + count):
        scores[i] *= shrink


@unrolled
def _some_heads(heads, q, keys, values, slot_bytes, context, count, scores, scale, dim, out):  # type: ignore[no-untyped-def]
    """Attention of `heads` query heads (a compile-time constant) of one row over one KV head."""
    room = scores.size // MAX_HEADS  # floats a head
    at, slots = address(scores), address(context)
    for p in range(0, count, SPAN):
        score_tile(heads, q, keys, slots + p * 8, slot_bytes, count - 1 - p, dim, at + p * 4, room * 4)
    for h in range(heads):
        _softmax(scores, h * room, count, scale)
    for d in range(0, dim, LANES):
        mix_tile(heads, at, room * 4, values + d * 4, slots, slot_bytes, count, dim, out + d * 4)


@unrolled
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


@kernel(parallel=True)
def _attend(  # type: ignore[no-untyped-def]
    q_at, keys, values, out, rows, heads, kv_heads, dim, window, scale,
    parents_at, slots_at, requests_at, tables_at, prefixes_at, num_requests, max_blocks, block_size, longest, threads,
):  # fmt: skip
    parents, slots = carray(int_pointer(parents_at), rows), carray(int_pointer(slots_at), rows)
    requests, prefixes = carray(int_pointer(requests_at), rows), carray(int_pointer(prefixes_at), num_requests)
    tables = carray(int_pointer(tables_at), (num_requests, max_blocks))
    slot_bytes, q_stride = kv_heads * dim * 4, (heads + 2 * kv_heads) * dim * 4
    # query heads of a KV head share its loads, unless that leaves a thread without work
    group = heads // kv_heads if rows * kv_heads >= threads else 1
    items = rows * heads // group
    for part in prange(threads):
        context, scores = np.empty(longest, np.int64), np.empty(MAX_HEADS * (longest + WIDTH), np.float32)
        for item in range(part, items, threads):  # interleaved: later rows of a prompt see more
            row, head = item * group // heads, item * group % heads
            request, skip = requests[row], head // (heads // kv_heads) * dim * 4
            count = _context(row, parents, slots, tables[request], block_size, prefixes[request], window, context)
            _group(
                q_at + row * q_stride + head * dim * 4, keys + skip, values + skip, slot_bytes, context, count, scores,
                np.float32(scale), group, dim, out + (row * heads + head) * dim * 4,
            )  # fmt: skip


class Pass(NamedTuple):
    """Where the batch of a pass lies: addresses of its int64 tensors, and their sizes."""

    rows: int
    positions: int
    slots: int
    parents: int
    request_of: int
    block_tables: int
    prefix_lens: int
    num_requests: int
    max_blocks: int
    block_size: int
    longest: int  # no row's context is longer
    threads: int


class HeadSpec(NamedTuple):
    """Attention of a layer, as the kernels read it."""

    cos: int
    sin: int
    num_positions: int
    q_norm: int  # 0: no norm
    k_norm: int
    window: int  # 0: no window
    num_heads: int
    num_kv_heads: int
    dim: int
    eps: float
    scale: float


@kernel
def place_and_attend(b, h, qkv, keys, values, num_slots, out):  # type: ignore[no-untyped-def]
    """b is a Pass, h a HeadSpec. qkv [T, (heads + 2 * kv_heads) * dim] is changed in place; out is [T, heads * dim]."""
    place(
        0, b.rows, qkv, b.positions, b.slots, h.cos, h.sin, h.q_norm, h.k_norm, keys, values,
        h.num_heads, h.num_kv_heads, h.dim, h.num_positions, num_slots, h.eps,
    )  # fmt: skip
    _attend(
        qkv, keys, values, out, b.rows, h.num_heads, h.num_kv_heads, h.dim, h.window, h.scale, b.parents, b.slots, b.request_of,
        b.block_tables, b.prefix_lens, b.num_requests, b.max_blocks, b.block_size, b.longest, b.threads,
    )  # fmt: skip


def head_spec(heads: Heads, num_heads: int, num_kv_heads: int, dim: int) -> HeadSpec:
    cos, sin = heads.tables
    assert cos.is_contiguous() & sin.is_contiguous() & (cos.shape[1] * 2 == dim), "tables fit the heads"
    q_norm, k_norm = (weight.data_ptr() for weight in heads.norms) if heads.norms else (0, 0)
    window = heads.window or 0
    return HeadSpec(
        cos.data_ptr(), sin.data_ptr(), cos.shape[0], q_norm, k_norm, window, num_heads, num_kv_heads, dim, heads.eps, heads.scale
    )


class Attention:
    """The attention of one pass, called once a layer."""

    def __init__(self, batch: Batch) -> None:
        import torch

        ints = (batch.positions, batch.slots, batch.parents, batch.request_of, batch.block_tables, batch.prefix_lens)
        assert all(t.dtype is torch.int64 and t.is_contiguous() for t in ints), "batches hold contiguous int64"
        num_rows, (num_requests, max_blocks) = batch.slots.shape[0], batch.block_tables.shape
        longest_prefix = int(batch.prefix_lens.max())
        assert longest_prefix <= max_blocks * batch.block_size, "a prefix longer than its blocks"
        self.batch = batch  # keeps the memory alive
        self.last_position, self.last_slot = int(batch.positions.max()), int(batch.slots.max())
        sizes = (num_requests, max_blocks, batch.block_size, longest_prefix + num_rows, numba.get_num_threads())
        self.spec = Pass._make((num_rows, *(t.data_ptr() for t in ints), *sizes))

        self._workspace = torch.empty(0)

    def workspace(self, floats_a_row: int) -> torch.Tensor:
        """Memory for what lives no longer than a layer, the same for all layers of the pass."""
        needed = self.spec.rows * floats_a_row
        if self._workspace.numel() < needed:
            self._workspace = self._workspace.new_empty(needed)
        return self._workspace

    def check(self, cache: tuple[torch.Tensor, torch.Tensor], spec: HeadSpec) -> None:
        """The kernels write where they are told: nothing may lie outside the tables and the cache."""
        keys, values = cache
        assert self.last_position < spec.num_positions, "a position beyond the rotary tables"
        assert self.last_slot < keys.shape[0], "a slot beyond the cache"
        assert keys.is_contiguous() & values.is_contiguous(), "the kernels read contiguous float32"
        assert keys.dtype == values.dtype == self._workspace.dtype, "the kernels read contiguous float32"
        assert keys.shape[1:] == values.shape[1:] == (spec.num_kv_heads, spec.dim), "a cache of another model"

    def __call__(self, qkv: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], heads: Heads) -> torch.Tensor:
        """qkv [T, (heads + 2 * kv_heads) * dim], changed in place -> [T, heads * dim]; keys and values go to the batch's slots."""
        import torch

        keys, values = cache  # [num_slots, kv_heads, dim]
        num_slots, kv_heads, dim = keys.shape
        spec = head_spec(heads, qkv.shape[1] // dim - 2 * kv_heads, kv_heads, dim)
        self.check(cache, spec)
        out = torch.empty((self.spec.rows, spec.num_heads * dim))
        place_and_attend(self.spec, spec, qkv.data_ptr(), keys.data_ptr(), values.data_ptr(), num_slots, out.data_ptr())
        return out
