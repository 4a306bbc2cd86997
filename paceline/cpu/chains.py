"""A head that drafts token by token, K tokens of many requests in one compiled call: EAGLE-3, EAGLE-1 and
small distilled models.

The first pass reads what the requests have not read yet, with true features of the target where the head
wants them; its last rows speak. Each further pass has one row a request: the token guessed last, and the
head's own output in place of features. Of rows that do not speak only keys and values are wanted: where one
row speaks, it alone goes through the rest of the last layer. A pass of a tree's level is the same first pass
with features given as addresses of outputs, and one step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.compile import kernel, piece, place_of, struct
from paceline.cpu.guess import Noise, guess
from paceline.cpu.heads import (
    Rows,
    Work,
    embed_row,
    finish_layer,
    keep_layer,
    multiply_8,
    put_8_norm,
    put_8_norms,
    put_8_row,
    put_features,
)
from paceline.cpu.lanes import double_pointer, int_pointer, seed_pointer
from paceline.cpu.layer import Model, layer_of
from paceline.cpu.matmul import Matrix
from paceline.cpu.rows import copy, normalize
from paceline.cpu.sync import barrier, close_region, join, open_region

EAGLE_3, EAGLE_1, PLAIN = 3, 1, 0  # what enters the first layer


class Entry(NamedTuple):
    """How a row enters the layers."""

    kind: int
    num_sources: int  # features of a position
    feature_norm: int  # address; 0: features are taken as they are
    fuse: Matrix  # the first product, and
    balance: int  # address of a factor for each column of its input
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


class Call(NamedTuple):
    """What `draft_chains` is given the address of. `following` is the task of the further passes, whose rows
    are `then`: the same as `task`, with the head's outputs for features."""

    first: Rows
    then: Rows
    model: Model
    entry: Entry
    task: Task
    following: Task
    work: Work


call_at = struct(Call)
ROWS, TASK, FOLLOWING, WORK = (place_of(Call, name) for name in ("first", "task", "following", "work"))
LEAST, STEPS, LOGITS = (place_of(Task, name) for name in ("least", "steps", "logits"))


@piece
def _enter(share, r, m, e, t, w):  # type: ignore[no-untyped-def]
    """The residual stream before the first layer."""
    tokens = carray(int_pointer(r.tokens), r.num)
    if e.kind == EAGLE_1 or (e.kind == EAGLE_3 and t.is_fused):
        _fuse(share, r, m, e, t, w)
        return
    for row in range(share.part, r.num, share.threads):
        h = w.h + row * m.hidden * 4
        if e.kind == EAGLE_3:
            copy(carray(int_pointer(t.sources), (r.num, e.num_sources))[row, 0], h, m.hidden)
        else:
            embed_row(m, tokens[row], h)


@piece
def _fuse(share, r, m, e, t, w):  # type: ignore[no-untyped-def]
    """Features, for EAGLE-1 after the token's embedding, through the first product into h."""
    sources = carray(int_pointer(t.sources), (r.num, e.num_sources))
    tokens = carray(int_pointer(r.tokens), r.num)
    norm, first = e.feature_norm if t.is_fused else 0, m.hidden if e.kind == EAGLE_1 else 0
    for row in range(share.part, r.num, share.threads):
        if first:
            embed_row(m, tokens[row], w.ready + row * w.widest * 4)
        put_features(e, sources[row], norm, first, m, w, row, r.num)
    multiply_8(share, e.fuse, w, w.narrow, r.num)
    for row in range(share.part, r.num, share.threads):
        copy(w.narrow + row * e.fuse.n * 4, w.h + row * m.hidden * 4, m.hidden)


@piece
def _put_pairs(share, r, m, e, layer, w):  # type: ignore[no-untyped-def]
    """EAGLE-3's input of the layer: the token's embedding and the feature side by side, each normed."""
    tokens = carray(int_pointer(r.tokens), r.num)
    for row in range(share.part, r.num, share.threads):
        h, ready = w.h + row * m.hidden * 4, w.ready + row * w.widest * 4
        embed_row(m, tokens[row], ready)
        normalize(ready, layer.input_norm, ready, m.hidden, m.eps)
        normalize(h, layer.hidden_norm, ready + m.hidden * 4, m.hidden, m.eps)
        if e.is_normed_residual:
            copy(ready + m.hidden * 4, h, m.hidden)
        put_8_row(ready, 2 * m.hidden, w, row, r.num)


@piece
def _only(r, row):  # type: ignore[no-untyped-def]
    """One of the rows."""
    at, most = row * 8, r.most_others
    keys, values, rooms, places, seen = r.keys + at, r.values + at, r.rooms + at, r.places + at, r.seen + at
    others, counts = r.others + at * most, r.num_others + at
    return Rows(1, r.tokens + at, r.positions + at, keys, values, rooms, places, seen, others, counts, most)


@piece
def _from_row(w, m, layer, row):  # type: ignore[no-untyped-def]
    """The memory of a pass in which what was the row's residual stream and queries are the first."""
    h, wide = w.h + row * m.hidden * 4, w.wide + row * layer.qkv.n * 4
    return Work(w.sync, h, w.ready, wide, w.narrow, w.values, w.scales, w.sums, w.scores, w.longest, w.widest)


@piece
def _run(share, r, m, e, t, w):  # type: ignore[no-untyped-def]
    _enter(share, r, m, e, t, w)
    for i in range(m.num_layers):
        layer = layer_of(m.layers, i)
        if i == 0 and e.kind == EAGLE_3:
            _put_pairs(share, r, m, e, layer, w)
        else:
            put_8_norms(share, r.num, m, w, layer.input_norm)
        keep_layer(share, r, m, layer, i, w)
        if i < m.num_layers - 1 or t.num_speaking > 1:
            finish_layer(share, r, 1, m, layer, i, w)
        elif t.num_speaking == 1:
            row = carray(int_pointer(t.speaking), 1)[0]
            finish_layer(share, _only(r, row), 1, m, layer, i, _from_row(w, m, layer, row))
    barrier(share)
    _speak(share, m, e, t, w)


@piece
def _speak(share, m, e, t, w):  # type: ignore[no-untyped-def]
    """Outputs of the speaking rows, and logits where they are wanted."""
    rows, count = carray(int_pointer(t.speaking), t.num_speaking), t.num_speaking
    for i in range(share.part, count, share.threads):
        h, to = w.h + rows[i] * m.hidden * 4, t.outputs + i * m.hidden * 4
        put_8_norm(h, m.norm, m, w, i, count)
        copy(w.ready + i * w.widest * 4 if e.is_normed_output else h, to, m.hidden)
    if t.logits != 0:
        multiply_8(share, m.head, w, t.logits, count)


@piece
def _guess(share, m, t, step):  # type: ignore[no-untyped-def]
    """A token for each request, and the chance of the path to it."""
    count, ids = t.num_speaking, carray(int_pointer(t.ids), t.num_ids)
    temperatures, seeds = carray(double_pointer(t.temperatures), count), carray(seed_pointer(t.seeds), count)
    positions, tokens = (
        carray(int_pointer(t.position), count),
        carray(int_pointer(t.tokens), (t.steps, count)),
    )
    chances, size = carray(double_pointer(t.chances), (t.steps, count)), m.head.n
    for i in range(share.part, count, share.threads):
        how = Noise(temperatures[i], seeds[i], positions[i] + step)
        best, chance = guess(t.logits + i * size * 4, size, m.vocab, ids, how)
        tokens[step, i] = ids[best] if t.num_ids else best
        chances[step, i] = chance * (chances[step - 1, i] if step else 1.0)


@piece
def _move_on(r, t, step):  # type: ignore[no-untyped-def]
    """The guesses are the tokens of the next pass, one place further. False if nothing likely is left."""
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
def _part(share, c):  # type: ignore[no-untyped-def]
    t, done = c.task, carray(int_pointer(c.task.done), 2)  # steps made, and whether to go on
    _run(share, c.first, c.model, c.entry, t, c.work)
    for step in range(t.steps):
        _guess(share, c.model, t, step)
        barrier(share)
        if share.part == 0:
            done[0] = step + 1
            done[1] = 1 if step + 1 < t.steps and _move_on(c.then, t, step) else 0
        barrier(share)
        if done[1] == 0:
            return
        _run(share, c.then, c.model, c.entry, c.following, c.work)


@kernel(parallel=True)
def draft_chains(at, threads):  # type: ignore[no-untyped-def]
    """at: of the numbers of a Call."""
    sync = call_at(at).work.sync
    open_region(sync)
    for part in prange(threads):
        share = join(sync, np.int64(part), threads)
        if share.part >= 0:
            _part(share, call_at(at))
    close_region(sync)
