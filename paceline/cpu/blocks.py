"""DFlash in compiled form: the target's features become keys and values of every layer, and a whole block is drafted in one pass.

Rows of a block see all of the context and each other. Their keys and values lie behind the context's and are overwritten by what the
target shows next. With a Markov head a token's logits also depend on the token before it, so the guesses are made from left to right.
The host names requests; what each row of a pass must know is written down here, by the first thread before the first barrier.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.compile import kernel, numbers, piece
from paceline.cpu.guess import guess
from paceline.cpu.head_attention import value_at, write_key
from paceline.cpu.heads import (
    FUSE,
    HEAD,
    Rows,
    Shape,
    Work,
    embed_row,
    layer_of,
    matrix_of,
    multiply,
    put_normed,
    put_row,
    rows_at,
    run_layer,
    scale_row,
    shape_at,
    turn_unit,
    work_at,
)
from paceline.cpu.lanes import double_pointer, int_pointer, seed_pointer
from paceline.cpu.matmul import BLOCK_8, DOT_ROWS, GROUP_8, Activations, Matrix, product_8
from paceline.cpu.rows import add, copy
from paceline.cpu.sync import barrier

MARKOV = 3  # of a shape's matrices
# what the host says of a request: where its sequence lies, its rows read so far and new ones, the token a block begins with, the same as
# a draft id (the number of words where it is none; then the last guess), and the position of the first guess
KEYS, VALUES, ROOM, START, COUNT, ROOT, WORD, POSITION = range(8)
NUM_COLUMNS = 8


class Context(NamedTuple):
    """Rows of features to be taken into the sequences; room for int64 arrays of `num` numbers."""

    num: int
    sources: int  # [num, num_sources] addresses: these the host writes
    num_sources: int
    balance: int
    hidden_norm: int
    places: int
    keys: int
    values: int
    rooms: int


class Block(NamedTuple):
    """How the rows of the blocks speak. Rows of a request follow each other."""

    num: int  # requests
    requests: int  # address of [num, NUM_COLUMNS] int64
    size: int  # rows of a block
    mask: int  # the token of all rows but the first
    first: int  # row of a block that guesses the first token
    steps: int  # 0: nobody speaks, features are only taken in
    temperatures: int
    seeds: int
    ids: int
    num_ids: int
    rank: int  # of the Markov head; 0: none
    before: int  # its first matrix: [num_words + 1, rank] floats
    mixed: int  # [num, num_outputs]: what the Markov head adds
    logits: int  # [steps, num, num_outputs]
    tokens: int  # [steps, num]
    chances: int  # [steps, num] float64, of the paths
    is_guessing: bool


@piece
def _write_context(c, b):  # type: ignore[no-untyped-def]
    """Row by row, what the requests' numbers say."""
    requests, row = carray(int_pointer(b.requests), (b.num, NUM_COLUMNS)), 0
    places, keys = carray(int_pointer(c.places), c.num), carray(int_pointer(c.keys), c.num)
    values, rooms = carray(int_pointer(c.values), c.num), carray(int_pointer(c.rooms), c.num)
    for i in range(b.num):
        one = requests[i]
        for place in range(one[START], one[START] + one[COUNT]):
            places[row], keys[row], values[row], rooms[row] = place, one[KEYS], one[VALUES], one[ROOM]
            row += 1


@piece
def _write_rows(r, b):  # type: ignore[no-untyped-def]
    requests, tokens = carray(int_pointer(b.requests), (b.num, NUM_COLUMNS)), carray(int_pointer(r.tokens), r.num)
    places, seen, keys = carray(int_pointer(r.places), r.num), carray(int_pointer(r.seen), r.num), carray(int_pointer(r.keys), r.num)
    values, rooms = carray(int_pointer(r.values), r.num), carray(int_pointer(r.rooms), r.num)
    for row in range(r.num):
        one, at = requests[row // b.size], row % b.size
        end = one[START] + one[COUNT]
        tokens[row], places[row], seen[row] = b.mask if at else one[ROOT], end + at, end + b.size
        keys[row], values[row], rooms[row] = one[KEYS], one[VALUES], one[ROOM]


@piece
def _only_keys_values(s, matrix):  # type: ignore[no-untyped-def]
    """The rows of a qkv matrix below the queries'."""
    skipped = s.num_heads * s.dim
    tiles = skipped // DOT_ROWS
    return Matrix(matrix.weight + tiles * (matrix.k // GROUP_8) * BLOCK_8, matrix.bias + skipped * 4, matrix.k, matrix.n - skipped)


@piece
def _take_in(part, c, s, w):  # type: ignore[no-untyped-def]
    """Features, fused and normed, as keys and values of every layer."""
    sources, places = carray(int_pointer(c.sources), (c.num, c.num_sources)), carray(int_pointer(c.places), c.num)
    keys, values = carray(int_pointer(c.keys), c.num), carray(int_pointer(c.values), c.num)
    rooms = carray(int_pointer(c.rooms), c.num)
    width, fuse = c.num_sources * s.hidden, matrix_of(s, FUSE)
    for row in range(part, c.num, s.threads):
        ready = w.ready + row * w.widest * 4
        for i in range(c.num_sources):
            copy(sources[row, i], ready + i * s.hidden * 4, s.hidden)
        scale_row(ready, c.balance, width)
        put_row(ready, width, w, row, c.num)
    multiply(part, s, w, fuse, w.narrow, c.num)
    for row in range(part, c.num, s.threads):
        put_normed(s, w, w.narrow + row * fuse.n * 4, c.hidden_norm, row, c.num)
    barrier(w.sync, s.threads)
    for i in range(s.num_layers):
        layer = layer_of(s.layers, i)
        matrix = _only_keys_values(s, layer.qkv)
        product_8(part, s.threads, matrix, Activations(w.values, w.scales, w.sums), w.wide, c.num)
        barrier(w.sync, s.threads)
        for item in range(part, c.num * s.num_kv_heads, s.threads):
            row, head = item // s.num_kv_heads, item % s.num_kv_heads
            here = w.wide + (row * matrix.n + head * s.dim) * 4
            turn_unit(s, layer, layer.k_norm, here, places[row])
            write_key(s, i, keys[row], rooms[row], places[row], head, here)
            copy(here + s.num_kv_heads * s.dim * 4, value_at(s, i, values[row], rooms[row], places[row], head), s.dim)
        barrier(w.sync, s.threads)


@piece
def _run(part, r, s, w):  # type: ignore[no-untyped-def]
    tokens = carray(int_pointer(r.tokens), r.num)
    for row in range(part, r.num, s.threads):
        embed_row(s, tokens[row], w.h + row * s.hidden * 4)
    for i in range(s.num_layers):
        layer = layer_of(s.layers, i)
        for row in range(part, r.num, s.threads):
            put_normed(s, w, w.h + row * s.hidden * 4, layer.input_norm, row, r.num)
        run_layer(part, r, s, layer, i, w)
    barrier(w.sync, s.threads)


@piece
def _speak(part, b, s, w):  # type: ignore[no-untyped-def]
    """Logits of all rows that guess, step by step."""
    rows = b.steps * b.num
    for item in range(part, rows, s.threads):
        step, request = item // b.num, item % b.num
        put_normed(s, w, w.h + (request * b.size + b.first + step) * s.hidden * 4, s.norm, item, rows)
    multiply(part, s, w, matrix_of(s, HEAD), b.logits, rows)


@piece
def _add_markov(part, b, s, w, step):  # type: ignore[no-untyped-def]
    """To the logits of a step, what the token before it adds."""
    requests = carray(int_pointer(b.requests), (b.num, NUM_COLUMNS))
    for i in range(part, b.num, s.threads):
        ready = w.ready + i * w.widest * 4
        copy(b.before + requests[i, WORD] * b.rank * 4, ready, b.rank)
        put_row(ready, b.rank, w, i, b.num)
    multiply(part, s, w, matrix_of(s, MARKOV), b.mixed, b.num)
    for i in range(part, b.num, s.threads):
        add(b.logits + (step * b.num + i) * s.num_outputs * 4, b.mixed + i * s.num_outputs * 4, s.num_outputs)


@piece
def _guess(part, b, s, w):  # type: ignore[no-untyped-def]
    temperatures, seeds = carray(double_pointer(b.temperatures), b.num), carray(seed_pointer(b.seeds), b.num)
    requests, ids = carray(int_pointer(b.requests), (b.num, NUM_COLUMNS)), carray(int_pointer(b.ids), b.num_ids)
    tokens, chances = carray(int_pointer(b.tokens), (b.steps, b.num)), carray(double_pointer(b.chances), (b.steps, b.num))
    for step in range(b.steps):
        if b.rank:
            _add_markov(part, b, s, w, step)
        for i in range(part, b.num, s.threads):
            at = b.logits + (step * b.num + i) * s.num_outputs * 4
            best, chance = guess(at, s.num_outputs, s.num_words, ids, temperatures[i], seeds[i], requests[i, POSITION] + step)
            tokens[step, i] = ids[best] if b.num_ids else best
            chances[step, i] = chance * (chances[step - 1, i] if step else 1.0)
            requests[i, WORD] = best
        barrier(w.sync, s.threads)


@piece
def _part(part, c, r, b, s, w):  # type: ignore[no-untyped-def]
    if part == 0:
        _write_context(c, b)
        _write_rows(r, b)
    _take_in(part, c, s, w)
    if b.steps == 0:
        return
    _run(part, r, s, w)
    _speak(part, b, s, w)
    if b.is_guessing:
        _guess(part, b, s, w)


CONTEXT, ROWS = 0, len(Context._fields)  # where the parts of a call begin, in numbers
BLOCK = ROWS + len(Rows._fields)
SHAPE = BLOCK + len(Block._fields)
WORK = SHAPE + len(Shape._fields)
NUM, STEPS, IS_GUESSING = (BLOCK + Block._fields.index(name) for name in ("num", "steps", "is_guessing"))


def call_of(context: Context, rows: Rows, block: Block, shape: Shape, work: Work) -> array[int]:
    """What `draft_blocks` is given the address of."""
    return numbers((*context, *rows, *block, *shape, *work))


@piece
def _context_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 9)
    return Context(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8])


@piece
def _block_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 17)
    return Block(
        f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14], f[15], f[16] != 0
    )  # fmt: skip


@kernel(parallel=True)
def draft_blocks(at, threads):  # type: ignore[no-untyped-def]
    """at: of what `call_of` made."""
    for part in prange(threads):
        c, r, b = _context_at(at + 8 * CONTEXT), rows_at(at + 8 * ROWS), _block_at(at + 8 * BLOCK)
        _part(np.int64(part), c, r, b, shape_at(at + 8 * SHAPE), work_at(at + 8 * WORK))
