"""A head that drafts token by token, K tokens of many requests in one compiled call: EAGLE-3, EAGLE-1 and
small distilled models.

The first pass reads what the requests have not read yet, with true features of the target where the head
wants them; its last rows speak. Each further pass has one row a request: the token guessed last, and the
head's own output in place of features. Of rows that do not speak only keys and values are wanted: where one
row speaks, it alone goes through the rest of the last layer. A pass of a tree's level is the same first pass
with features given as addresses of outputs, and one step.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.compile import kernel, numbers, piece
from paceline.cpu.guess import guess
from paceline.cpu.heads import (
    FUSE,
    HEAD,
    Rows,
    Shape,
    Work,
    embed_row,
    finish_layer,
    keep_layer,
    layer_of,
    matrix_of,
    multiply,
    put_normed,
    put_row,
    rows_at,
    scale_row,
    shape_at,
    work_at,
)
from paceline.cpu.lanes import double_pointer, int_pointer, seed_pointer
from paceline.cpu.rows import copy, normalize
from paceline.cpu.sync import barrier

EAGLE_3, EAGLE_1, PLAIN = 3, 1, 0  # what enters the first layer


class Entry(NamedTuple):
    """How a row enters the layers."""

    kind: int
    num_sources: int  # features of a position
    feature_norm: int  # address; 0: features are taken as they are
    balance: int  # address of a factor for each column of the first product's input
    is_normed_residual: bool
    is_normed_output: bool


class Task(NamedTuple):
    sources: int  # address of [rows, num_sources] addresses of features; 0: none
    is_fused: bool  # they are the target's; else each row's first is an output of the head
    speaking: int  # [num_speaking] rows of the first pass whose logits are wanted
    num_speaking: int
    steps: int
    temperatures: int  # [num_speaking] float64
    seeds: int  # [num_speaking] uint64
    position: int  # [num_speaking]: of the first token to be guessed
    ids: int  # of the target's vocabulary; 0: the same
    num_ids: int
    least: float  # stop when the chance of every request's path is below
    logits: int  # [num_speaking, head.n]; 0: outputs alone are wanted
    outputs: int  # [num_speaking, hidden]
    tokens: int  # [steps, num_speaking]: the guesses, target's ids
    chances: int  # [steps, num_speaking] float64, of the paths
    done: int  # how many steps were made


@piece
def _fuse(part, r, s, e, t, w):  # type: ignore[no-untyped-def]
    """Features through the first product into h."""
    sources = carray(int_pointer(t.sources), (r.num, e.num_sources))
    tokens = carray(int_pointer(r.tokens), r.num)
    ahead = 1 if e.kind == EAGLE_1 else 0
    for row in range(part, r.num, s.threads):
        ready = w.ready + row * w.widest * 4
        if e.kind == EAGLE_1:
            embed_row(s, tokens[row], ready)
        for i in range(e.num_sources):
            to = ready + (i + ahead) * s.hidden * 4
            if e.feature_norm != 0 and t.is_fused:
                normalize(sources[row, i], e.feature_norm, to, s.hidden, s.eps)
            else:
                copy(sources[row, i], to, s.hidden)
        scale_row(ready, e.balance, (e.num_sources + ahead) * s.hidden)
        put_row(ready, (e.num_sources + ahead) * s.hidden, w, row, r.num)
    fuse = matrix_of(s, FUSE)
    multiply(part, s, w, fuse, w.narrow, r.num)
    for row in range(part, r.num, s.threads):
        copy(w.narrow + row * fuse.n * 4, w.h + row * s.hidden * 4, s.hidden)


@piece
def _enter(part, r, s, e, t, w):  # type: ignore[no-untyped-def]
    """The residual stream before the first layer."""
    tokens = carray(int_pointer(r.tokens), r.num)
    if e.kind == EAGLE_1 or (e.kind == EAGLE_3 and t.is_fused):
        _fuse(part, r, s, e, t, w)
    elif e.kind == EAGLE_3:
        sources = carray(int_pointer(t.sources), (r.num, e.num_sources))
        for row in range(part, r.num, s.threads):
            copy(sources[row, 0], w.h + row * s.hidden * 4, s.hidden)
    else:
        for row in range(part, r.num, s.threads):
            embed_row(s, tokens[row], w.h + row * s.hidden * 4)


@piece
def _put_first(part, r, s, e, layer, w):  # type: ignore[no-untyped-def]
    """The input of the first layer: for EAGLE-3 the token's embedding and the feature side by side, each with
    its norm.
    """
    tokens = carray(int_pointer(r.tokens), r.num)
    for row in range(part, r.num, s.threads):
        h, ready = w.h + row * s.hidden * 4, w.ready + row * w.widest * 4
        if e.kind != EAGLE_3:
            put_normed(s, w, h, layer.input_norm, row, r.num)
            continue
        embed_row(s, tokens[row], ready)
        normalize(ready, layer.input_norm, ready, s.hidden, s.eps)
        normalize(h, layer.hidden_norm, ready + s.hidden * 4, s.hidden, s.eps)
        if e.is_normed_residual:
            copy(ready + s.hidden * 4, h, s.hidden)
        put_row(ready, 2 * s.hidden, w, row, r.num)


@piece
def _only(r, row):  # type: ignore[no-untyped-def]
    """One of the rows."""
    at = row * 8
    return Rows(
        1, r.tokens + at, r.positions + at, r.keys + at, r.values + at, r.rooms + at, r.places + at, r.seen + at,
        r.others + at * r.most_others, r.num_others + at, r.most_others,
    )  # fmt: skip


@piece
def _from_row(w, s, layer, row):  # type: ignore[no-untyped-def]
    """The memory of a pass in which what was the row's residual stream and queries are the first."""
    h, wide = w.h + row * s.hidden * 4, w.wide + row * layer.qkv.n * 4
    return Work(w.sync, h, w.ready, wide, w.narrow, w.values, w.scales, w.sums, w.scores, w.longest, w.widest)


@piece
def _run(part, r, s, e, t, w):  # type: ignore[no-untyped-def]
    _enter(part, r, s, e, t, w)
    for i in range(s.num_layers):
        layer = layer_of(s.layers, i)
        if i == 0:
            _put_first(part, r, s, e, layer, w)
        else:
            for row in range(part, r.num, s.threads):
                put_normed(s, w, w.h + row * s.hidden * 4, layer.input_norm, row, r.num)
        keep_layer(part, r, s, layer, i, w)
        if i < s.num_layers - 1 or t.num_speaking > 1:
            finish_layer(part, r, s, layer, i, w)
        elif t.num_speaking == 1:
            row = carray(int_pointer(t.speaking), 1)[0]
            finish_layer(part, _only(r, row), s, layer, i, _from_row(w, s, layer, row))
    barrier(w.sync, s.threads)


@piece
def _speak(part, s, e, t, w, rows_at):  # type: ignore[no-untyped-def]
    """Outputs of the speaking rows, and logits where somebody wants them."""
    rows, count = carray(int_pointer(rows_at), t.num_speaking), t.num_speaking
    for i in range(part, count, s.threads):
        h, to = w.h + rows[i] * s.hidden * 4, t.outputs + i * s.hidden * 4
        put_normed(s, w, h, s.norm, i, count)
        if e.is_normed_output:
            copy(w.ready + i * w.widest * 4, to, s.hidden)
        else:
            copy(h, to, s.hidden)
    if t.logits != 0:
        multiply(part, s, w, matrix_of(s, HEAD), t.logits, count)


@piece
def _guess(part, s, t, step):  # type: ignore[no-untyped-def]
    """A token for each request, and the chance of the path to it."""
    temperatures, seeds = (
        carray(double_pointer(t.temperatures), t.num_speaking),
        carray(seed_pointer(t.seeds), t.num_speaking),
    )
    positions, ids = carray(int_pointer(t.position), t.num_speaking), carray(int_pointer(t.ids), t.num_ids)
    tokens = carray(int_pointer(t.tokens), (t.steps, t.num_speaking))
    chances = carray(double_pointer(t.chances), (t.steps, t.num_speaking))
    for i in range(part, t.num_speaking, s.threads):
        best, chance = guess(
            t.logits + i * s.num_outputs * 4,
            s.num_outputs,
            s.num_words,
            ids,
            temperatures[i],
            seeds[i],
            positions[i] + step,
        )
        tokens[step, i] = ids[best] if t.num_ids else best
        chances[step, i] = chance * (chances[step - 1, i] if step else 1.0)


@piece
def _move_on(r, t, step):  # type: ignore[no-untyped-def]
    """One row a request: the guess, one place further. False if nothing likely is left."""
    tokens = carray(int_pointer(t.tokens), (t.steps, t.num_speaking))
    chances = carray(double_pointer(t.chances), (t.steps, t.num_speaking))
    to, most = carray(int_pointer(r.tokens), r.num), 0.0
    for i in range(r.num):
        to[i] = tokens[step, i]
        most = max(most, chances[step, i])
    if step:
        for column in (r.positions, r.places, r.seen):
            ahead = carray(int_pointer(column), r.num)
            for i in range(r.num):
                ahead[i] += 1
    return most >= t.least


@piece
def _part(part, first, then, s, e, t, w, following):  # type: ignore[no-untyped-def]
    done = carray(int_pointer(t.done), 2)  # steps made, and whether to go on
    _run(part, first, s, e, t, w)
    _speak(part, s, e, t, w, t.speaking)
    for step in range(t.steps):
        _guess(part, s, t, step)
        barrier(w.sync, s.threads)
        if part == 0:
            done[0] = step + 1
            done[1] = 1 if step + 1 < t.steps and _move_on(then, t, step) else 0
        barrier(w.sync, s.threads)
        if done[1] == 0:
            return
        _run(part, then, s, e, following, w)
        _speak(part, s, e, following, w, following.speaking)


ROWS, THEN = 0, len(Rows._fields)  # where the parts of a call begin, in numbers
SHAPE = THEN + len(Rows._fields)
ENTRY = SHAPE + len(Shape._fields)
TASK = ENTRY + len(Entry._fields)
FOLLOWING = TASK + len(Task._fields)
WORK = FOLLOWING + len(Task._fields)
LEAST, STEPS, LOGITS = (Task._fields.index(name) for name in ("least", "steps", "logits"))


def call_of(
    first: Rows, then: Rows, shape: Shape, entry: Entry, task: Task, following: Task, work: Work
) -> array[int]:
    """What `draft_chains` is given the address of."""
    return numbers((*first, *then, *shape, *entry, *task, *following, *work))


@piece
def _task_at(at):  # type: ignore[no-untyped-def]
    f, x = carray(int_pointer(at), 16), carray(double_pointer(at), 16)
    return Task(
        f[0],
        f[1] != 0,
        f[2],
        f[3],
        f[4],
        f[5],
        f[6],
        f[7],
        f[8],
        f[9],
        x[10],
        f[11],
        f[12],
        f[13],
        f[14],
        f[15],
    )


@kernel(parallel=True)
def draft_chains(at, threads):  # type: ignore[no-untyped-def]
    """at: of what `call_of` made. `following` is the task of the further passes: the same, with the head's
    outputs for features.
    """
    for part in prange(threads):
        first, then, s = rows_at(at), rows_at(at + 8 * THEN), shape_at(at + 8 * SHAPE)
        t, following = _task_at(at + 8 * TASK), _task_at(at + 8 * FOLLOWING)
        f = carray(int_pointer(at + 8 * ENTRY), 6)
        e = Entry(f[0], f[1], f[2], f[3], f[4] != 0, f[5] != 0)
        _part(np.int64(part), first, then, s, e, t, work_at(at + 8 * WORK), following)
