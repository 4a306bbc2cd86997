"""What a drafting head says next, from its logits: the likeliest token, or with a seed the one that wins with
the target's own noise.

The noise is core/noise.py's (Philox 4x32-10, purpose TARGET), made for the few tokens that can win. A guess
that differs from what numpy would compute in the last bit costs a draft now and then and never changes the
text: the target chooses by itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, types

from paceline.core import noise
from paceline.cpu.compile import piece
from paceline.cpu.lanes import LANES, LOG2_E, Emitter, float_pointer, floats, instruction, int_pointer
from paceline.cpu.tiles import LEAST, LOWEST, power_of_two
from paceline.cpu.top import choose, first_largest

FIRST, SECOND = noise._MULTIPLIERS
WEYL_FIRST, WEYL_SECOND = (np.uint64(number) for number in noise._WEYL)
MASK, HALF, FOUR, ZERO = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(4), np.uint64(0)
FAR = 8.0  # tokens so far behind the best, in nats, are not guessed: noise seldom makes them win


@instruction(types.float32)
def sum_exponentials(emit: Emitter, at: Any, turns: Any, top: Any) -> Any:
    """The sum of exp(x - top) over 16 * turns floats, none above the top."""
    builder, kind, total = emit.builder, floats(LANES), emit.variable(emit.zeros(LANES))
    factor, largest = emit.constant(LOG2_E, LANES), emit.broadcast(top, LANES)
    with emit.loop(turns) as step:
        value = emit.load(emit.offset(at, emit.times(step, 4 * LANES)), kind)
        below = builder.fmul(builder.fsub(value, largest), factor)
        below = emit.call(f"llvm.maxnum.v{LANES}f32", kind, [below, emit.constant(LEAST, LANES)])
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
    for i in range(count):
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
