"""What is best in a row of logits: the first of the largest, the k most likely tokens, and a drafting head's
guess: the likeliest token, or with a seed the one that wins with the target's own noise.

Nearly all of a row lies below the best so far, and a block of it is passed over with one comparison a value.
The noise is core/noise.py's (Philox 4x32-10, purpose TARGET), made for the few tokens that can win. A guess
that differs from numpy's in the last bit costs a draft now and then and never changes the text.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types

from paceline.core import noise
from paceline.cpu import lanes
from paceline.cpu.compile import kernel, piece
from paceline.cpu.lanes import LANES, LOG2_E, Emitter, float_pointer, floats, instruction, int_pointer
from paceline.cpu.tiles import LEAST, LOWEST, power_of_two

BLOCK = 4 * LANES
MAX_K = 64  # beyond it, inserting one by one is no longer cheap
FIRST, SECOND = noise._MULTIPLIERS
WEYL_FIRST, WEYL_SECOND = (np.uint64(number) for number in noise._WEYL)
MASK, HALF, FOUR, ZERO = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(4), np.uint64(0)
FAR = 8.0  # tokens so far behind the best, in nats, are not guessed: noise seldom makes them win


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


@instruction(types.float32)
def sum_exponentials(emit: Emitter, at: Any, turns: Any, top: Any) -> Any:
    """The sum of exp(x - top) over 16 * turns floats, none above the top."""
    builder, total = emit.builder, emit.variable(emit.constant(0.0, LANES))
    factor, largest = emit.constant(LOG2_E, LANES), emit.broadcast(top, LANES)
    with emit.loop(turns) as step:
        value = emit.load(emit.offset(at, emit.times(step, 4 * LANES)), floats(LANES))
        below = builder.fmul(builder.fsub(value, largest), factor)
        below = emit.math("maxnum", below, emit.constant(LEAST, LANES))
        builder.store(builder.fadd(builder.load(total), power_of_two(emit, below)), total)
    return emit.total(builder.load(total))


@piece
def gumbel(seed, position, token):  # type: ignore[no-untyped-def]
    """Noise of a token of the target's vocabulary at a position."""
    a, b, c, d = np.uint64(token) // FOUR, np.uint64(position) & MASK, ZERO, ZERO
    k, m = seed & MASK, seed >> HALF
    for _ in range(10):
        x, y = a * FIRST, c * SECOND
        a, b, c, d = (y >> HALF) ^ b ^ k, y & MASK, (x >> HALF) ^ d ^ m, x & MASK
        k, m = (k + WEYL_FIRST) & MASK, (m + WEYL_SECOND) & MASK
    lane = token % 4
    word = a if lane == 0 else b if lane == 1 else c if lane == 2 else d
    return -math.log(-math.log((np.float64(word) + 0.5) * 2.0**-32))


@piece
def guess(at, row, one, step):  # type: ignore[no-untyped-def]
    """(index, chance) of the best token of a row of logits, for a request's guess number `step`. at: a
    CallMemory, one: a HeadRequest."""
    seed, temperature, position = np.uint64(one.seed), one.temperature, one.first_guess + step
    count, size, ids = at.num_words, at.num_outputs, carray(int_pointer(at.ids), at.num_ids)
    logits_at = at.logits + row * size * 4
    logits, best = carray(float_pointer(logits_at), size), max(first_largest(logits_at, 0, count), 0)
    top = logits[best]
    if temperature == 0.0:
        chance = np.float32(1) / sum_exponentials(logits_at, size // LANES, top)
        return best, chance if chance == chance else np.float32(0)
    lead = top / temperature + gumbel(seed, position, ids[best] if len(ids) else best)
    edge, most, total = top - FAR * temperature, lead, 0.0
    for start in range(0, count, BLOCK):
        if count - start < BLOCK or has_larger(logits_at + 4 * start, edge):
            for i in range(start, min(start + BLOCK, count)):
                if logits[i] >= edge:
                    noisy = logits[i] / temperature + gumbel(seed, position, ids[i] if len(ids) else i)
                    total += math.exp((noisy - lead) * temperature)
                    if noisy > most:
                        most, best = noisy, i
    chance = np.float32(math.exp((most - lead) * temperature) / total) if total > 0.0 else np.float32(0)
    return best, chance if chance == chance else np.float32(0)


@piece
def look_through(logits_at, first, last, count):  # type: ignore[no-untyped-def]
    """Of the logits [first, last) of a row, multiples of 16: which of those below `count` is the first of the
    largest (-1: none), and the sum of the exponentials beside it."""
    place = first_largest(logits_at, first, min(last, count))
    top = carray(float_pointer(logits_at), count)[place] if place >= 0 else np.float32(LOWEST)
    return place, sum_exponentials(logits_at + first * 4, (last - first) // LANES, top)


@piece
def settle(logits_at, places, sums):  # type: ignore[no-untyped-def]
    """(index, chance) of the best, from what was found in the parts of a row."""
    best, total = choose(logits_at, places), 0.0
    if best < 0:
        return 0, np.float32(0)
    logits = carray(float_pointer(logits_at), max(places) + 1)
    for part in range(len(places)):
        if places[part] >= 0:
            total += sums[part] * math.exp(logits[places[part]] - logits[best])
    return best, np.float32(1.0 / total)


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
            if stop - start < BLOCK or has_larger(lanes.address(row) + 4 * start, best[k - 1]):
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
