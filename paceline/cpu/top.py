"""The k most likely tokens of each row of logits, best first; of equal ones the lower id, as sorting would.

Nearly all of a row lies below the k-th best so far, and a block of it is passed over with one comparison a
value, many at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types

from paceline.cpu.compile import kernel, piece
from paceline.cpu.lanes import LANES, Emitter, address, float_pointer, floats, instruction

BLOCK = 4 * LANES
MAX_K = 64  # beyond it, inserting one by one is no longer cheap


@piece
def insert(best, ids, k, value, token):  # type: ignore[no-untyped-def]
    """Into the ordered best, before the first that is smaller; what is not a number is the smallest."""
    if value != value:
        value = -np.inf
    at = k - 1
    while at > 0 and best[at - 1] < value:
        best[at], ids[at] = best[at - 1], ids[at - 1]
        at -= 1
    best[at], ids[at] = value, token


@instruction(types.boolean)
def has_larger(emit: Emitter, at: Any, limit: Any) -> Any:
    """Whether one of the BLOCK floats at this address is larger, or not a number."""
    found, limits = ir.VectorType(ir.IntType(1), LANES)([0] * LANES), emit.broadcast(limit, LANES)
    for step in range(BLOCK // LANES):
        values = emit.load(emit.offset(at, 4 * LANES * step), floats(LANES))
        found = emit.builder.or_(found, emit.builder.fcmp_unordered(">", values, limits))
    return emit.call(f"llvm.vector.reduce.or.v{LANES}i1", ir.IntType(1), [found])


@piece
def first_largest(at, begin, end):  # type: ignore[no-untyped-def]
    """Which of the floats [begin, end) is the first of the largest, or not a number; -1 if all are -inf."""
    row, best, place = carray(float_pointer(at), end), np.float32(-np.inf), -1
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        if stop - start < BLOCK or has_larger(at + 4 * start, best):
            for i in range(start, stop):
                if row[i] != row[i]:
                    return i
                if row[i] > best:
                    best, place = row[i], i
    return place


@piece
def choose(at, places):  # type: ignore[no-untyped-def]
    """Of what was found in the parts of a row, in order, the first of the largest; -1 if it is not finite."""
    row, best, largest = carray(float_pointer(at), max(places) + 1), -1, np.float32(-np.inf)
    for place in places:
        if place >= 0 and not row[place] <= largest:
            best, largest = place, row[place]
            if not largest < np.inf:
                return -1
    return best


@kernel
def _top(logits, ids, best):  # type: ignore[no-untyped-def]
    """logits [rows, n] float32, ids [rows, k] int64; best [k] float32 is scratch."""
    n, k = logits.shape[1], ids.shape[1]
    for r in range(len(logits)):
        row = logits[r]
        for i in range(k):
            insert(best, ids[r], i + 1, row[i], i)
        for start in range(k, n, BLOCK):
            stop = min(start + BLOCK, n)
            if stop - start < BLOCK or has_larger(address(row) + 4 * start, best[k - 1]):
                for i in range(start, stop):
                    if row[i] > best[k - 1]:
                        insert(best, ids[r], k, row[i], i)


def top(logits: torch.Tensor, k: int) -> torch.Tensor:
    """logits [rows, vocab] float32 on the CPU -> [rows, k] int64."""
    assert logits.dtype == torch.float32
    assert 1 <= k <= min(MAX_K, logits.shape[1])
    ids = np.empty((len(logits), k), np.int64)
    _top(logits.contiguous().numpy(), ids, np.empty(k, np.float32))
    return torch.from_numpy(ids)
