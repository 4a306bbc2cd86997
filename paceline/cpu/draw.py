"""Tokens drawn by the threads of a pass: what core/sampling.py's `choose` says of the same row of logits.

Where nothing is cut, each thread has a contest (contest.py) in its part of a row. Else each gathers the
tokens near the best, and one takes the best of them off a heap until min-p, top-k and top-p are reached.
Invariant: neither threads nor other rows change a token: scores belong to tokens, and probabilities are
summed in pieces of a row that are always the same.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from paceline.core.types import Pick
from paceline.cpu import lanes
from paceline.cpu.compile import kernel, piece, size_of, struct
from paceline.cpu.contest import Row, contest, is_ahead
from paceline.cpu.forward import pass_at
from paceline.cpu.lanes import INT64, LOG2_E, Emitter, double_pointer, float_pointer, floats, int_pointer
from paceline.cpu.layer import model_at, work_at
from paceline.cpu.sync import Share, barrier
from paceline.cpu.top import BLOCK, choose, gumbel, has_larger

NEAR = 9.0  # nats below the best: what is gathered at first; of real text, top-p 0.95 needs more in 3 of 100
WIDER, MOST_NEAR = 1.5, 40.0  # times that, where it was not enough, until everything is gathered
ALL = -1.7e308  # a logit that is below all but what cannot come at all
BATCH = 8  # rows that are drawn at a time: there is memory for so many
PIECES = 64  # of a row, whose probabilities are summed one by one
DOUBLE, WIDTH, MAGIC = (ir.DoubleType(), 8, 1.5 * 2**52)  # of those sums: lanes, and as lanes.py has it
SERIES = [math.log(2) ** n / math.factorial(n) for n in range(13)]  # of 2 ** x, x from -1/2 to 1/2: 2e-16
CHOICE, CHOICE_BYTES, choice_at = Struct("dQqdd"), 8 * size_of(Pick), struct(Pick)


@lanes.instruction(types.float64, real=types.float64)
def sum_powers(emit: Emitter, at: Any, turns: Any, top: Any, scale: Any) -> Any:
    """The sum of 2 ** ((x - top) * scale) over 8 * turns floats, none above the top, as exact as doubles."""
    builder, kind, whole = emit.builder, ir.VectorType(DOUBLE, WIDTH), ir.VectorType(INT64, WIDTH)
    total, magic = emit.variable(kind([0.0] * WIDTH)), kind([MAGIC] * WIDTH)
    largest, factor = emit.broadcast(top, WIDTH), emit.broadcast(scale, WIDTH)
    with emit.loop(turns) as turn:
        x = builder.fpext(emit.load(emit.offset(at, emit.times(turn, 4 * WIDTH)), floats(WIDTH)), kind)
        bits = emit.math("maxnum", builder.fmul(builder.fsub(x, largest), factor), kind([-1000.0] * WIDTH))
        shifted = builder.fadd(bits, magic)
        rest, series = builder.fsub(bits, builder.fsub(shifted, magic)), kind([SERIES[-1]] * WIDTH)
        for coefficient in SERIES[-2::-1]:
            series = emit.fma(series, rest, kind([coefficient] * WIDTH))
        exponent = builder.shl(builder.bitcast(shifted, whole), whole([52] * WIDTH))
        power = builder.bitcast(builder.add(builder.bitcast(series, whole), exponent), kind)
        builder.store(builder.fadd(builder.load(total), power), total)
    return emit.total(builder.load(total))


@piece
def gather(at, begin, end, floor, t, ids):  # type: ignore[no-untyped-def]
    """The tokens of [begin, end) whose logit is at least `floor`, once divided by t: how many."""
    row, count = carray(float_pointer(at), end), 0
    limit = np.float32(floor * t - abs(floor * t) * 1e-6 - 1e-30)  # below it, whatever is rounded
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        if stop - start < BLOCK or has_larger(at + 4 * start, limit):
            for i in range(start, stop):
                if row[i] > limit and row[i] / t >= floor:
                    ids[count] = i
                    count += 1
    return count


@piece
def sink(ids, row, at, count):  # type: ignore[no-untyped-def]
    """One step of a heap: the largest logit comes first."""
    moved = ids[at]
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and row[ids[child + 1]] > row[ids[child]]:
            child += 1
        if not row[ids[child]] > row[moved]:
            break
        ids[at] = ids[child]
        at = child
    ids[at] = moved


@piece
def take(ids, row, most, share, shift, t):  # type: ignore[no-untyped-def]
    """Take tokens, best first and equal ones together, until there are `most` or they have that share of the
    probability, exp(logit / t - shift) each: where they begin, at the list's end, and their share."""
    left, reached = len(ids), 0.0
    for at in range(left // 2 - 1, -1, -1):
        sink(ids, row, at, left)
    while left > 0 and ((len(ids) - left < most and reached < share) or row[ids[0]] == row[ids[left]]):
        left -= 1
        ids[0], ids[left] = ids[left], ids[0]
        sink(ids, row, 0, left)
        reached += math.exp(row[ids[left]] / t - shift)
    return left, reached


@piece
def cut(ids, row, r, total, is_all):  # type: ignore[no-untyped-def]
    """Where the gathered tokens begin that are kept; -1 if more must be gathered first. total: of all tokens,
    beside the largest, where top-p alone cuts; is_all: all that min-p has left are here."""
    one, first, count, t, base = r.one, 0, len(ids), r.one.temperature, r.base
    if one.top_k > 0:
        first, _ = take(ids, row, one.top_k, np.inf, base, t)
        is_all = is_all or count >= one.top_k
    if one.top_p < 1.0 and is_all and (one.top_k > 0 or one.min_p > 0.0):
        total = 0.0
        for i in range(first, count):
            total += math.exp(row[ids[i]] / t - base)
    if one.top_p < 1.0 and total > 0.0:
        begin, reached = take(ids[first:], row, count, one.top_p, base + math.log(total), t)
        first += begin
        is_all = is_all or reached >= one.top_p
    return first if is_all else -1


@piece
def bound(size, number):  # type: ignore[no-untyped-def]
    """Where a piece of a row begins: at whole blocks."""
    return min(-(-size // BLOCK) * number // PIECES * BLOCK, size)


@piece
def row_of(b, m, w, logits, row, threads):  # type: ignore[no-untyped-def]
    """What is drawn after the row-th of those whose logits are wanted."""
    at, outputs = logits + row * m.head.n * 4, carray(int_pointer(b.outputs), b.num_outputs)
    best = choose(at, carray(int_pointer(w.largest), (b.num_outputs, threads))[row])
    position = carray(int_pointer(b.positions), b.rows)[outputs[row]] + 1
    one = choice_at(b.choices + row * CHOICE_BYTES)
    base = carray(float_pointer(at), m.vocab)[max(best, 0)] / one.temperature
    floor = base + math.log(one.min_p) if one.min_p > 0.0 else ALL
    return Row(at, m.vocab, best, position, one, base, floor)


@piece
def look(w, r, i, part, threads):  # type: ignore[no-untyped-def]
    """A thread's part of a row, number i of its batch: the token ahead, or where the distribution is cut the
    tokens near the best and the sums of the probabilities."""
    one, numbers = r.one, carray(int_pointer(w.found), (BATCH, threads, 2))
    scores = carray(double_pointer(w.found), (BATCH, threads, 2))
    if r.best < 0 or one.temperature == 0.0:
        return
    first, last = PIECES * part // threads, PIECES * (part + 1) // threads
    begin, end = bound(r.size, first), bound(r.size, last)
    if one.top_k == 0 and one.top_p >= 1.0 and one.min_p == 0.0:
        scores[i, part, 0], numbers[i, part, 1] = contest(r, begin, end)
        return
    ids, floor = carray(lanes.word_pointer(w.near), (BATCH, r.size))[i, begin:], max(r.floor, r.base - NEAR)
    numbers[i, part, 1] = gather(r.at, begin, end, floor, one.temperature, ids)
    if one.top_p < 1.0 and one.top_k == 0 and one.min_p == 0.0:
        top, scale = carray(float_pointer(r.at), r.size)[r.best], LOG2_E / one.temperature
        for number in range(first, last):
            begin, end = bound(r.size, number), bound(r.size, number + 1)
            total = sum_powers(r.at + 4 * begin, (end - begin) // WIDTH, top, scale)
            carray(double_pointer(w.masses), (BATCH, PIECES))[i, number] = total


@piece
def settle(w, r, i, threads):  # type: ignore[no-untyped-def]
    """The token, from what all threads have found in the row."""
    one, numbers = r.one, carray(int_pointer(w.found), (BATCH, threads, 2))
    scores, token, lead = carray(double_pointer(w.found), (BATCH, threads, 2)), r.best, -np.inf
    if r.best < 0 or one.temperature == 0.0:
        return r.best
    if one.top_k == 0 and one.top_p >= 1.0 and one.min_p == 0.0:
        for part in range(threads):
            if is_ahead(scores[i, part, 0], numbers[i, part, 1], lead, token):
                lead, token = scores[i, part, 0], numbers[i, part, 1]
        return token
    ids, count = carray(lanes.word_pointer(w.near), (BATCH, r.size))[i], 0
    for part in range(threads):
        begin = bound(r.size, PIECES * part // threads)
        for n in range(numbers[i, part, 1]):
            ids[count] = ids[begin + n]
            count += 1
    row, t, total = carray(float_pointer(r.at), r.size), one.temperature, 0.0
    if one.top_p < 1.0 and one.top_k == 0 and one.min_p == 0.0:
        for each in carray(double_pointer(w.masses), (BATCH, PIECES))[i]:
            total += each
        for n in range(r.size // WIDTH * WIDTH, r.size):  # what no vector has
            total += math.exp(row[n] / t - r.base)
    near, first = NEAR, cut(ids[:count], row, r, total, r.floor >= r.base - NEAR)
    while first < 0:
        near = WIDER * near if near < MOST_NEAR else np.inf
        count = gather(r.at, 0, r.size, max(r.floor, r.base - near), t, ids)
        first = cut(ids[:count], row, r, total, r.floor >= r.base - near)
    for n in range(first, count):
        score = row[ids[n]] / t + gumbel(np.uint64(one.seed), r.position, np.int64(ids[n]))
        if is_ahead(score, ids[n], lead, token):
            lead, token = score, np.int64(ids[n])
    return token


@kernel
def draw_rows(part, threads, sync, b_at, m_at, w_at, logits):  # type: ignore[no-untyped-def]
    """What a thread of a pass does once every part of every row has its largest: see forward.py."""
    share, b, m, w = Share(part, threads, sync, 0, 1), pass_at(b_at), model_at(m_at), work_at(w_at)
    picked, num = carray(int_pointer(b.picked), b.num_outputs), b.num_outputs
    for start in range(0, num, BATCH):
        end = min(start + BATCH, num)
        for row in range(start, end):
            look(w, row_of(b, m, w, logits, row, threads), row - start, part, threads)
        barrier(share)
        for row in range(start + part, end, threads):
            picked[row] = settle(w, row_of(b, m, w, logits, row, threads), row - start, threads)
        barrier(share)
