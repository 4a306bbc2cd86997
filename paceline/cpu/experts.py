"""An ffn of experts in the compiled pass: a layer's second half, in place of the dense one of layer.py, which
calls it by its entry.

Rows are grouped by expert: matrices of an expert that any row wakes are read once a pass, and all its rows
multiplied together, each thread taking its share of the tiles; of several ranks all, or the one that has the
expert. An expert that every row wakes is one behind the others. Invariant: what a row gets is added up in the
order of its own choice, so its bits do not depend on the other rows; those of products do not either
(matmul.py).
"""

from __future__ import annotations

from typing import Any

from numba import carray

from paceline.cpu.compile import kernel, piece, piece_named, size_of, struct, unrolled
from paceline.cpu.lanes import float_pointer, int_pointer
from paceline.cpu.layer import COLUMNS, ExpertRow, Work, layer_at, leave_row, model_at, work_at
from paceline.cpu.matmul import product_4, product_8, product_32
from paceline.cpu.routing import route
from paceline.cpu.rows import add, fill, gate, normalize, put_4, put_8, put_32
from paceline.cpu.sync import Share, barrier, in_row
from paceline.models.quantize import GROUP

EXPERT_BYTES = 8 * size_of(ExpertRow)
expert_at = struct(ExpertRow)


@piece
def num_experts(m):  # type: ignore[no-untyped-def]
    """With the shared one."""
    return m.routing.num_experts + m.routing.slots - m.routing.per_token


@piece
def _padded(m):  # type: ignore[no-untyped-def]
    return (m.hidden + COLUMNS - 1) // COLUMNS * COLUMNS


@piece
def _choose(share, rows, m, layer, w):  # type: ignore[no-untyped-def]
    """From the residual stream to every row's experts and shares; `ready` is its norm, and `narrow` that of
    the shared expert where it has one of its own."""
    r, n, has_norms, padded = m.routing, layer.router.n, layer.router_norm != 0, _padded(m)
    for row in range(share.part, rows, share.threads):
        ready, norm = w.ready + row * w.widest * 4, layer.router_norm if has_norms else layer.mlp_norm
        normalize(w.h + row * m.hidden * 4, norm, ready, m.hidden, m.eps)
        fill(ready, m.hidden, padded)
        put_32(ready, m.hidden, 0, m.hidden, w, row, rows)
    barrier(share)
    product_32(in_row(share), share.threads, layer.router, w, w.routed, rows)
    barrier(share)
    for row in range(share.part, rows, share.threads):
        logits, scores = w.routed + row * n * 4, w.routed + (rows + row) * n * 4
        chosen, shares = w.chosen + row * r.slots * 8, w.shares + row * r.slots * 4
        route(r, logits, scores, n, layer.correction, chosen, shares)
        if has_norms:
            h, shared = w.h + row * m.hidden * 4, w.narrow + row * padded * 4
            normalize(h, layer.mlp_norm, w.ready + row * w.widest * 4, m.hidden, m.eps)
            normalize(h, layer.shared_norm, shared, m.hidden, m.eps)
            fill(shared, m.hidden, padded)
    barrier(share)


@piece
def _group(rows, m, w):  # type: ignore[no-untyped-def]
    """Where each expert's rows begin, and the place of each row's choices among them. Experts that were woken
    are counted, but for the one that always is."""
    count, size = rows * m.routing.slots, num_experts(m)
    chosen, places = carray(int_pointer(w.chosen), count), carray(int_pointer(w.ranks), count)
    starts, woken = carray(int_pointer(w.starts), size + 1), carray(int_pointer(w.woken), 1)
    for e in range(size + 1):
        starts[e] = 0
    for i in range(count):
        starts[chosen[i] + 1] += 1
    for e in range(m.routing.num_experts):
        woken[0] += starts[e + 1] > 0
    for e in range(size):
        starts[e + 1] += starts[e]
    for i in range(count):  # starts move to their ends ..
        places[i] = starts[chosen[i]]
        starts[chosen[i]] += 1
    for e in range(size, 0, -1):  # .. which are the next ones' starts
        starts[e] = starts[e - 1]
    starts[0] = 0


@unrolled
def _gather(put, inputs_from, share, rows, m, layer, w):  # type: ignore[no-untyped-def]
    """Every row becomes an input of each of its experts."""
    slots, padded = m.routing.slots, _padded(m)
    chosen, places = carray(int_pointer(w.chosen), rows * slots), carray(int_pointer(w.ranks), rows * slots)
    starts, k = carray(int_pointer(w.starts), num_experts(m) + 1), expert_at(layer.experts).gate_up.k
    for i in range(share.part, rows * slots, share.threads):
        start, end = starts[chosen[i]], starts[chosen[i] + 1]
        ready, to = w.ready + i // slots * w.widest * 4, inputs_from(w, start, k)
        if layer.shared_norm != 0 and i % slots == m.routing.per_token:
            ready = w.narrow + i // slots * padded * 4
        put(ready, m.hidden, 0, padded, to, places[i] - start, end - start)


@piece
def _part_in(share, r, e):  # type: ignore[no-untyped-def]
    """Of the work on an expert: this thread's number and how many there are; none, where it belongs to
    another rank. The shared expert is every rank's."""
    if not r.is_by_rank or e == r.num_experts:
        return in_row(share), share.threads
    rank, ranks, count = share.part % share.ranks, share.ranks, r.num_experts
    is_own = count * rank // ranks <= e < count * (rank + 1) // ranks
    return share.part // ranks, share.threads // ranks if is_own else 0


@unrolled
def _multiply(product, inputs_from, share, m, layer, w, is_down):  # type: ignore[no-untyped-def]
    """Each expert's rows, all together, with one of its matrices; between barriers."""
    starts, usual = carray(int_pointer(w.starts), num_experts(m) + 1), expert_at(layer.experts)
    barrier(share)
    for e in range(num_experts(m)):
        start, count = starts[e], starts[e + 1] - starts[e]
        part, threads = _part_in(share, m.routing, e)
        if count > 0 and threads > 0:
            own = expert_at(layer.experts + e * EXPERT_BYTES)
            matrix = own.down if is_down else own.gate_up
            first, y = (usual.down, w.narrow) if is_down else (usual.gate_up, w.wide)
            inputs = inputs_from(w, start, first.k)
            product(part, threads, matrix, inputs, y + start * first.n * 4, count)
    barrier(share)


@unrolled
def _gate(put, inputs_from, share, m, layer, w):  # type: ignore[no-untyped-def]
    """A thread takes about the columns that it has just computed (their order: loaders/packed.py)."""
    starts, usual = carray(int_pointer(w.starts), num_experts(m) + 1), expert_at(layer.experts)
    gated = w.gated + share.part * COLUMNS * 4
    for e in range(num_experts(m)):
        start, count = starts[e], starts[e + 1] - starts[e]
        n, to = expert_at(layer.experts + e * EXPERT_BYTES).gate_up.n, inputs_from(w, start, usual.down.k)
        (part, threads), pieces = _part_in(share, m.routing, e), (n // 2 + COLUMNS - 1) // COLUMNS
        if threads == 0:
            continue
        begin, end = pieces * part // threads, pieces * (part + 1) // threads
        for row in range(count):
            source = w.wide + (start * usual.gate_up.n + row * n) * 4
            for first in range(begin * COLUMNS, end * COLUMNS, COLUMNS):
                width, gates = min(COLUMNS, n // 2 - first), source + 2 * first * 4
                gate(m.activation, gates, gates + width * 4, gated, width)
                fill(gated, width, COLUMNS)
                put(gated - first * 4, n // 2, first, first + COLUMNS, to, row, count)


@piece
def _add_shares(share, rows, m, layer, w):  # type: ignore[no-untyped-def]
    """h += the sum of what a row's experts found, each times its share; with the norms that there are."""
    slots, count = m.routing.slots, rows * m.routing.slots
    places, shares = carray(int_pointer(w.ranks), count), carray(float_pointer(w.shares), count)
    for row in range(share.part, rows, share.threads):
        total = w.ready + row * w.widest * 4
        fill(total, 0, m.hidden)
        for i in range(row * slots, (row + 1) * slots):
            found = w.narrow + places[i] * m.hidden * 4
            if layer.after_shared_norm != 0 and i % slots == m.routing.per_token:
                normalize(total, layer.after_experts_norm, total, m.hidden, m.eps)
                normalize(found, layer.after_shared_norm, found, m.hidden, m.eps)
            add(total, found, m.hidden, shares[i])
        if layer.after_mlp != 0:
            normalize(total, layer.after_mlp, total, m.hidden, m.eps)
        leave_row(w.h + row * m.hidden * 4, total, m, layer.scalar)


def _mix_of(bits: int, product: Any, put: Any) -> Any:
    """What each thread does, with one kind of weights."""
    value_bytes, group = 4 if bits == 32 else 1, GROUP.get(bits, 1)

    @piece_named(f"inputs_from_{bits}")
    def inputs_from(w, start, k):  # type: ignore[no-untyped-def]
        """The memory of a pass in which row `start` of the inputs of a product, k wide, is the first. Behind
        them lie those of the shared expert, which may be wider."""
        values, factors = w.values + start * k * value_bytes, start * (k // group) * 4
        return Work(*w[:5], values, w.scales + factors, w.sums + factors, *w[8:])

    @piece_named(f"mix_{bits}")
    def mix(share, rows, h, m, layer, w):  # type: ignore[no-untyped-def]
        w = Work(w.sync, h, *w[2:])
        _choose(share, rows, m, layer, w)
        if share.part == 0:
            _group(rows, m, w)
        barrier(share)
        _gather(put, inputs_from, share, rows, m, layer, w)
        _multiply(product, inputs_from, share, m, layer, w, False)
        _gate(put, inputs_from, share, m, layer, w)
        _multiply(product, inputs_from, share, m, layer, w, True)
        _add_shares(share, rows, m, layer, w)

    return mix


_mix_32, _mix_8 = _mix_of(32, product_32, put_32), _mix_of(8, product_8, put_8)
_mix_4 = _mix_of(4, product_4, put_4)


@kernel
def mix_32(part, threads, sync, group, ranks, rows, h, m, layer, w):  # type: ignore[no-untyped-def]
    """A thread's part, of which the first five say what it is. h: where the residual stream of the rows lies;
    m, layer, w: addresses of a Model, a LayerRow, a Work."""
    _mix_32(Share(part, threads, sync, group, ranks), rows, h, model_at(m), layer_at(layer), work_at(w))


@kernel
def mix_8(part, threads, sync, group, ranks, rows, h, m, layer, w):  # type: ignore[no-untyped-def]
    _mix_8(Share(part, threads, sync, group, ranks), rows, h, model_at(m), layer_at(layer), work_at(w))


@kernel
def mix_4(part, threads, sync, group, ranks, rows, h, m, layer, w):  # type: ignore[no-untyped-def]
    _mix_4(Share(part, threads, sync, group, ranks), rows, h, model_at(m), layer_at(layer), work_at(w))


MIX = {32: mix_32, 8: mix_8, 4: mix_4}
