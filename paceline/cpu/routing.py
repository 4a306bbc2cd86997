"""Which experts a row wakes, and with what shares: models/experts.py's router behind its product.

Invariant: a row's choice depends on its own logits alone; of equal scores the first expert's wins. Logits
that are no numbers choose an expert that exists, too, and its share is no number either.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from paceline.cpu.compile import piece
from paceline.cpu.lanes import LANES, Emitter, float_pointer, floats, instruction, int_pointer

ZERO, ONE, TINY = np.float32(0), np.float32(1), np.float32(1e-20)
NEVER, NO_NUMBER = np.float32(-np.inf), np.float32(np.nan)


class Routing(NamedTuple):
    """The same in all layers."""

    num_experts: int = 0
    per_token: int = 0
    slots: int = 0  # experts that work for a row: the chosen, and behind them the shared one
    is_sigmoid: bool = False
    normalizes: bool = False
    is_gated: bool = False  # the shared expert's share is the sigmoid of one more logit
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    entry: int = 0  # of experts.py's kernel
    is_by_rank: bool = False  # an expert belongs to one rank; else every rank has some of its tiles


@instruction(constants=1)
def exponentials(emit: Emitter, is_negative: int, x: Any, shift: Any, out: Any, count: Any) -> None:
    """out = e ** (x - shift), or e ** -x, over `count` floats, a multiple of 16."""
    builder = emit.builder
    with emit.loop(builder.sdiv(count, emit.const(LANES))) as turn:
        step = emit.times(turn, 4 * LANES)
        value = emit.load(emit.offset(x, step), floats(LANES))
        value = builder.fneg(value) if is_negative else builder.fsub(value, emit.broadcast(shift, LANES))
        emit.store(emit.exponential(value), emit.offset(out, step))


@piece
def _group_score(choice, first, size):  # type: ignore[no-untyped-def]
    """A group of experts is as good as its best two together."""
    best, second = NEVER, NEVER
    for e in range(first, first + size):
        if choice[e] > best:
            best, second = choice[e], best
        elif choice[e] > second:
            second = choice[e]
    return best if size == 1 else best + second


@piece
def _drop_groups(r, choice):  # type: ignore[no-untyped-def]
    """The worst groups, one by one, are out of the choice; of equal ones the last."""
    size = r.num_experts // r.groups
    for _ in range(r.groups - r.top_groups):
        worst, low = 0, -NEVER
        for group in range(r.groups):
            score = _group_score(choice, group * size, size)
            if NEVER < score <= low:
                worst, low = group, score
        for e in range(worst * size, (worst + 1) * size):
            choice[e] = NEVER


@piece
def route(r, logits_at, scores_at, n, correction, chosen_at, shares_at):  # type: ignore[no-untyped-def]
    """From n logits, which are overwritten like the n scores, to `slots` experts and their shares."""
    choice, scores = carray(float_pointer(logits_at), n), carray(float_pointer(scores_at), n)
    chosen, shares = carray(int_pointer(chosen_at), r.slots), carray(float_pointer(shares_at), r.slots)
    total = ZERO if r.normalizes else ONE
    if r.is_sigmoid or r.is_gated:
        exponentials(1, logits_at, ZERO, scores_at, n)
    if r.slots > r.per_token:
        chosen[r.per_token] = r.num_experts
        shares[r.per_token] = ONE / (ONE + scores[r.num_experts]) if r.is_gated else ONE
    if r.is_sigmoid:
        corrections = carray(float_pointer(correction), r.num_experts)
        for e in range(r.num_experts):
            scores[e] = ONE / (ONE + scores[e])
            choice[e] = scores[e] + corrections[e]
        if r.top_groups < r.groups:
            _drop_groups(r, choice)
    else:
        top = choice[0]
        for e in range(1, r.num_experts):
            top = max(top, choice[e])
        exponentials(0, logits_at, top, scores_at, n)
        if not r.normalizes:
            total = ZERO
            for e in range(r.num_experts):
                total += scores[e]
    for i in range(r.per_token):
        best, high = 0, NEVER
        for e in range(r.num_experts):
            if choice[e] > high:
                best, high = e, choice[e]
        share = scores[best] if high > NEVER else NO_NUMBER
        chosen[i], shares[i], choice[best] = best, share, NEVER
        if r.normalizes:
            total += share
    for i in range(r.per_token):
        shares[i] = shares[i] / (total + TINY) * np.float32(r.scale)
        if not r.is_sigmoid and correction != 0:
            shares[i] *= carray(float_pointer(correction), r.num_experts)[chosen[i]]
