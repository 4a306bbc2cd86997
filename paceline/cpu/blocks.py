"""DFlash in compiled form: the target's features become keys and values of every layer, and a whole block is
drafted in one pass.

Rows of a block see all of the context and each other. Their keys and values lie behind the context's and are
overwritten by what the target shows next. With a Markov head a token's logits also depend on the token before
it: each thread adds what that token makes likely to its share of all words and looks through them while they
are in its caches; what the threads found is settled by one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.compile import kernel, piece, struct
from paceline.cpu.guess import look_through, settle
from paceline.cpu.head_attention import ROW_SIZE, Rows
from paceline.cpu.head_call import CallMemory, Entry, Turn, Work
from paceline.cpu.heads import (
    chance_before,
    guess_token,
    keep_rows,
    multiply_8,
    put_8_norm,
    put_8_row,
    put_features,
    request_of,
    rows_of,
    run_rows,
    write_guess,
    write_row,
)
from paceline.cpu.lanes import LANES, double_pointer, int_pointer
from paceline.cpu.layer import Model, activations, layer_of
from paceline.cpu.matmul import Matrix, outputs_of, product_8
from paceline.cpu.rows import add, copy
from paceline.cpu.sync import barrier, close_region, join, open_region, range_of


class Block(NamedTuple):
    """What is guessed in the blocks. Rows of a request follow each other."""

    size: int  # rows of a block
    mask: int  # the token of all rows but the first
    first: int  # row of a block that guesses the first token
    hidden_norm: int  # of fused features
    rank: int  # of the Markov head; 0: none
    before: int  # its first matrix: [vocabulary + 1, rank] floats
    markov: Matrix  # its second


class Call(NamedTuple):
    """What `draft_blocks` is given the address of. Scratch: [requests, num_outputs] floats that the Markov
    head adds, then [requests, threads] words, the largest in a thread's share of a row, and the sums of
    exponentials there."""

    turn: Turn
    work: Work
    memory: CallMemory
    model: Model
    entry: Entry
    block: Block


call_at = struct(Call)


@piece
def _write_rows(c):  # type: ignore[no-untyped-def]
    """Rows of features, and after them those of the blocks; rows of blocks that guess, step by step."""
    b, num, row = c.block, c.turn.num_requests, 0
    table = carray(int_pointer(c.memory.table), (c.turn.num_rows + num * b.size, ROW_SIZE))
    tokens = carray(int_pointer(c.memory.tokens), num * b.size)
    speaking = carray(int_pointer(c.memory.speaking), c.turn.num_speaking)
    for i in range(num):
        one = request_of(c, i)
        for ahead in range(one.num_rows):
            write_row(table, row, one, ahead, 0)
            row += 1
        for at in range(b.size):
            own = i * b.size + at
            tokens[own] = b.mask if at else one.root
            write_row(table, c.turn.num_rows + own, one, one.num_rows + at, one.start + one.num_rows + b.size)
    for i in range(c.turn.num_speaking):
        speaking[i] = i % num * b.size + b.first + i // num


@piece
def _take_in(share, c):  # type: ignore[no-untyped-def]
    """Features, fused and normed, as keys and values of every layer."""
    m, e, w, num = c.model, c.entry, c.work, c.turn.num_rows
    sources = carray(int_pointer(c.memory.sources), (num, e.num_sources))
    for row in range(share.part, num, share.threads):
        put_features(e, sources[row], 0, 0, m, w, row, num)
    multiply_8(share, e.fuse, w, w.narrow, num)
    for row in range(share.part, num, share.threads):
        put_8_norm(w.narrow + row * e.fuse.n * 4, c.block.hidden_norm, m, w, row, num)
    for i in range(m.num_layers):
        keep_rows(share, rows_of(c, num), m, layer_of(m.layers, i), i, w, m.num_heads)


@piece
def _put_word(c, i, word):  # type: ignore[no-untyped-def]
    """The input of the Markov head's second matrix."""
    w, rank = c.work, c.block.rank
    ready = w.ready + i * w.widest * 4
    copy(c.block.before + word * rank * 4, ready, rank)
    put_8_row(ready, rank, w, i, c.turn.num_requests)


@piece
def _found(share, c):  # type: ignore[no-untyped-def]
    """The part of the scratch that tells what threads found: words and sums."""
    num = c.turn.num_requests
    at, shape = c.memory.scratch + num * c.memory.num_outputs * 4, (num, share.threads)
    return carray(int_pointer(at), shape), carray(double_pointer(at + num * share.threads * 8), shape)


@piece
def _search(share, c, step):  # type: ignore[no-untyped-def]
    """A thread's share of the words of all requests."""
    num, size, (words, sums) = c.turn.num_requests, c.memory.num_outputs, _found(share, c)
    first, last = range_of(share, size // LANES)
    first, last = first * LANES, last * LANES
    mixed = c.memory.scratch + first * num * 4  # [num, last - first]
    if c.block.rank:
        product_8(0, 1, outputs_of(c.block.markov, first, last - first), activations(c.work), mixed, num)
    for i in range(num):
        row = c.memory.logits + (step * num + i) * size * 4
        if c.block.rank:
            add(row + first * 4, mixed + i * (last - first) * 4, last - first)
        if request_of(c, i).temperature == 0.0:
            words[i, share.part], sums[i, share.part] = look_through(row, first, last, c.memory.num_words)


@piece
def _settle(share, c, step):  # type: ignore[no-untyped-def]
    """The words of a step, and what the next step needs of them."""
    num, (words, sums) = c.turn.num_requests, _found(share, c)
    for i in range(share.part, num, share.threads):
        row = step * num + i
        if request_of(c, i).temperature == 0.0:
            best, chance = settle(c.memory.logits + row * c.memory.num_outputs * 4, words[i], sums[i])
        else:
            best, chance = guess_token(c, row, step, i)
        write_guess(c, step, i, best, chance * chance_before(c, step, i))
        if c.block.rank:
            _put_word(c, i, best)


@piece
def _part(share, c):  # type: ignore[no-untyped-def]
    b, t = c.block, c.turn
    if share.part == 0:
        _write_rows(c)
    _take_in(share, c)
    if t.num_speaking:
        table = c.memory.table + t.num_rows * ROW_SIZE * 8
        run_rows(share, c, Rows(t.num_requests * b.size, c.memory.tokens, table, 0, 0), b.size, False)
    for i in range(share.part, t.num_requests if b.rank and t.steps else 0, share.threads):
        _put_word(c, i, request_of(c, i).word)
    for step in range(t.steps):
        barrier(share)
        _search(share, c, step)
        barrier(share)
        _settle(share, c, step)


@kernel(parallel=True)
def draft_blocks(at, threads):  # type: ignore[no-untyped-def]
    """at: of the numbers of a Call."""
    sync = call_at(at).work.sync
    open_region(sync)
    for part in prange(threads):
        share = join(sync, np.int64(part), threads)
        if share.part >= 0:
            _part(share, call_at(at))
    close_region(sync)
