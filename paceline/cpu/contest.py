"""A draw from a row of logits without a logarithm for most of its tokens.

A token behind the lead by d nats wins only if -log(u) < exp(-d), and -log(u) is at least 1 - u: tokens are
passed over by comparing the bits of their noise with a power of two, and the few that are left get
core/noise.py's score in float64. Invariant: what is passed over cannot win, whatever is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types

from paceline.core import noise
from paceline.core.types import Pick
from paceline.cpu.compile import piece
from paceline.cpu.lanes import INT32, INT64, LOG2_E, Emitter, float_pointer, floats, instruction, ints
from paceline.cpu.top import BLOCK, HALF, MASK, gumbel, has_larger

ROUNDS, COUNTERS = 10, BLOCK // 4  # of Philox; that a block of tokens has
MOST_BITS = 33.1  # no token that is further behind can win: 1 - u is at least 2 ** -33
# the exponent of 2 ** 32 as a float keeps it, and more than float32 is wrong by; one of an exponent
EXPONENT, UNIT = 127.0 + 32.0 + 0.001, 2.0**23


class Row(NamedTuple):
    """A row of logits, and how the token after it is drawn."""

    at: int
    size: int
    best: int  # where the largest is; -1: it is not finite
    position: int  # of the token
    one: Pick
    base: float  # the largest, divided by the temperature
    floor: float  # what min-p leaves is at least this, divided likewise


def _philox(emit: Emitter, counter: Any, position: Any, keys: Sequence[Any]) -> list[Any]:
    """The four words of each of COUNTERS counters, from this one on."""
    builder, word, wide = emit.builder, ints(COUNTERS), ir.VectorType(INT64, COUNTERS)
    first, place, *starts = (builder.trunc(each, INT32) for each in (counter, position, *keys))
    a, b = emit.broadcast(first, COUNTERS), emit.broadcast(place, COUNTERS)
    a, c, d = builder.add(a, word([*range(COUNTERS)])), word([0] * COUNTERS), word([0] * COUNTERS)
    for turn in range(ROUNDS):
        k, m = (
            emit.broadcast(builder.add(start, INT32(weyl * turn & 0xFFFFFFFF)), COUNTERS)
            for start, weyl in zip(starts, noise._WEYL, strict=True)
        )
        x, y = (
            builder.mul(builder.zext(each, wide), wide([int(factor)] * COUNTERS))
            for each, factor in zip((a, c), noise._MULTIPLIERS, strict=True)
        )
        halves = [builder.bitcast(each, ints(2 * COUNTERS)) for each in (y, x)]  # the lower one comes first
        high, other = (emit.shuffle(range(1, 2 * COUNTERS, 2), each) for each in halves)
        a, c = builder.xor(builder.xor(high, b), k), builder.xor(builder.xor(other, d), m)
        b, d = (emit.shuffle(range(0, 2 * COUNTERS, 2), each) for each in halves)
    return [a, b, c, d]


@instruction(types.int64, operands=8)
def survivors(emit: Emitter, *operands: Any) -> Any:
    """Which of a block's tokens can be ahead of the lead: a bit each, token i's at 16 * (i % 4) + i // 4.
    operands: address of its logits, first counter of its noise, position, halves of the seed; the largest
    logit, and how (logit - largest) * scale + offset become the bits of a float, 2 ** 32 times the 1 - u from
    which on it loses: between powers of two a line, which is above the curve."""
    (at, counter, position, *keys, top, scale, offset), builder = operands, emit.builder
    logits, found, zero = emit.load(at, floats(BLOCK)), [], emit.constant(0.0, COUNTERS)
    largest, factor, shift = (emit.broadcast(each, COUNTERS) for each in (top, scale, offset))
    for lane, word in enumerate(_philox(emit, counter, position, keys)):
        below = builder.fsub(emit.shuffle(range(lane, BLOCK, 4), logits), largest)
        bits = emit.math("maxnum", emit.fma(below, factor, shift), zero)
        limit = builder.bitcast(builder.fptosi(bits, ints(COUNTERS)), floats(COUNTERS))
        rest = builder.uitofp(builder.not_(word), floats(COUNTERS))  # 1 - u, in units of 2 ** -32
        found.append(builder.fcmp_ordered("<", rest, limit))
    some, mask = reduce(builder.or_, found), emit.variable(INT64(0))
    with builder.if_then(emit.call(f"llvm.vector.reduce.or.v{COUNTERS}i1", ir.IntType(1), [some])):
        for lane, each in enumerate(found):
            here = builder.zext(builder.bitcast(each, ir.IntType(COUNTERS)), INT64)
            shifted = builder.shl(here, INT64(COUNTERS * lane))
            builder.store(builder.or_(builder.load(mask), shifted), mask)
    return builder.load(mask)


@piece
def is_ahead(score, token, lead, other):  # type: ignore[no-untyped-def]
    """Of equal scores the lower id wins."""
    return score > lead or (score == lead and token < other)


@piece
def contest(r, begin, end):  # type: ignore[no-untyped-def]
    """(score, token) of what is ahead among the tokens [begin, end) and the one with the largest logit."""
    row, seed, t = carray(float_pointer(r.at), r.size), np.uint64(r.one.seed), r.one.temperature
    top, base, scale, token = row[r.best], r.base, LOG2_E / t * UNIT, r.best
    low, high, slack = np.int64(seed & MASK), np.int64(seed >> HALF), abs(np.float64(top)) * 1e-6
    lead, position = base + gumbel(seed, r.position, r.best), r.position
    for start in range(begin, end, BLOCK):
        mask, stop = np.int64(-1), min(start + BLOCK, end)
        if stop - start == BLOCK:
            at, ahead, mask = r.at + 4 * start, (lead - base) * LOG2_E, np.int64(0)
            if has_larger(at, top - (MOST_BITS - ahead) / LOG2_E * t - slack):
                offset = (EXPONENT - ahead) * UNIT
                mask = survivors(at, start // 4, position, low, high, top, scale, offset)
        if mask == 0:
            continue
        for i in range(start, stop):
            if (mask >> (16 * (i % 4) + (i - start) // 4)) & 1:
                score = row[i] / t + gumbel(seed, position, i)
                if is_ahead(score, i, lead, token):
                    lead, token = score, i
    return lead, token
