"""DFlash in compiled form: the target's features become keys and values of every layer, and a whole block is
drafted in one pass.

Rows of a block see all of the context and each other. Their keys and values lie behind the context's and are
overwritten by what the target shows next. With a Markov head a token's logits also depend on the token before
it: each thread adds what that token makes likely to its share of all words and looks through them while they
are in its caches; what the threads found is settled by one of them. The host names requests, in eight numbers
each, and rows are worked out from them by the first thread, before a barrier.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.compile import kernel, piece, struct
from paceline.cpu.guess import Noise, guess, look_through, settle
from paceline.cpu.head_attention import value_at, write_key
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
from paceline.cpu.lanes import LANES, double_pointer, int_pointer, seed_pointer
from paceline.cpu.layer import Model, activations, layer_of, turn_head
from paceline.cpu.matmul import Matrix, outputs_of, product_8
from paceline.cpu.rows import add, copy
from paceline.cpu.sync import barrier, close_region, join, open_region, range_of


class RequestNumbers(NamedTuple):
    """What the host says of a request."""

    keys: int  # where its sequence lies
    values: int
    room: int
    start: int  # rows read so far
    num_rows: int  # new ones
    root: int  # the token that a block begins with
    word: int  # the same as a draft id: the number of words where it is none
    position: int  # of the first guess


class Context(NamedTuple):
    """Rows of features to be taken into the sequences; room for int64 arrays of `num` numbers."""

    num: int
    sources: int  # [num, num_sources] addresses: these the host writes
    num_sources: int
    fuse: Matrix
    balance: int
    hidden_norm: int
    places: int
    keys: int
    values: int
    rooms: int


class Block(NamedTuple):
    """What is guessed in the blocks. Rows of a request follow each other."""

    num: int  # requests
    requests: int  # address of [num] RequestNumbers
    size: int  # rows of a block
    mask: int  # the token of all rows but the first
    first: int  # row of a block that guesses the first token
    steps: int  # 0: nothing is guessed, features are only taken in
    temperatures: int
    seeds: int
    ids: int
    num_ids: int
    rank: int  # of the Markov head; 0: none
    before: int  # its first matrix: [vocabulary + 1, rank] floats
    markov: Matrix  # its second
    mixed: int  # room for [num, num_outputs]: what the Markov head adds
    logits: int  # [steps, num, num_outputs]
    tokens: int  # [steps, num]
    chances: int  # [steps, num] float64, of the paths
    found: int  # [num, threads]: which word each thread found the largest in its share of a row
    sums: int  # [num, threads] float64: of the exponentials there
    is_guessing: bool


class Call(NamedTuple):
    """What `draft_blocks` is given the address of."""

    context: Context
    rows: Rows
    block: Block
    model: Model
    work: Work


call_at, request_at = struct(Call), struct(RequestNumbers)
REQUEST_BYTES = 8 * len(RequestNumbers._fields)


@piece
def _request(b, i):  # type: ignore[no-untyped-def]
    return request_at(b.requests + i * REQUEST_BYTES)


@piece
def _write_rows(c, r, b):  # type: ignore[no-untyped-def]
    """Rows of the context and of the blocks, from what the requests' numbers say."""
    places, keys = carray(int_pointer(c.places), c.num), carray(int_pointer(c.keys), c.num)
    values, rooms = carray(int_pointer(c.values), c.num), carray(int_pointer(c.rooms), c.num)
    row = 0
    for i in range(b.num):
        one = _request(b, i)
        for place in range(one.start, one.start + one.num_rows):
            places[row], keys[row], values[row], rooms[row] = place, one.keys, one.values, one.room
            row += 1
    tokens, places = carray(int_pointer(r.tokens), r.num), carray(int_pointer(r.places), r.num)
    seen, keys = carray(int_pointer(r.seen), r.num), carray(int_pointer(r.keys), r.num)
    values, rooms = carray(int_pointer(r.values), r.num), carray(int_pointer(r.rooms), r.num)
    for row in range(r.num):
        one, at = _request(b, row // b.size), row % b.size
        end = one.start + one.num_rows
        tokens[row], places[row], seen[row] = b.mask if at else one.root, end + at, end + b.size
        keys[row], values[row], rooms[row] = one.keys, one.values, one.room


@piece
def _take_in(share, c, m, w):  # type: ignore[no-untyped-def]
    """Features, fused and normed, as keys and values of every layer."""
    sources = carray(int_pointer(c.sources), (c.num, c.num_sources))
    for row in range(share.part, c.num, share.threads):
        put_features(c, sources[row], 0, 0, m, w, row, c.num)
    multiply_8(share, c.fuse, w, w.narrow, c.num)
    for row in range(share.part, c.num, share.threads):
        put_8_norm(w.narrow + row * c.fuse.n * 4, c.hidden_norm, m, w, row, c.num)
    barrier(share)
    for i in range(m.num_layers):
        layer = layer_of(m.layers, i)
        matrix = outputs_of(layer.qkv, m.num_heads * m.dim, 2 * m.num_kv_heads * m.dim)
        product_8(share.part, share.threads, matrix, activations(w), w.wide, c.num)
        barrier(share)
        _keep_context(share, c, m, layer, i, w, matrix.n)
        barrier(share)


@piece
def _keep_context(share, c, m, layer, i, w, stride):  # type: ignore[no-untyped-def]
    """Keys and values of layer i, which lie side by side in `wide`."""
    places, keys = carray(int_pointer(c.places), c.num), carray(int_pointer(c.keys), c.num)
    values, rooms = carray(int_pointer(c.values), c.num), carray(int_pointer(c.rooms), c.num)
    for item in range(share.part, c.num * m.num_kv_heads, share.threads):
        row, head = item // m.num_kv_heads, item % m.num_kv_heads
        here = w.wide + (row * stride + head * m.dim) * 4
        turn_head(m, layer, layer.k_norm, here, places[row])
        write_key(m, i, keys[row], rooms[row], places[row], head, here)
        to = value_at(m, i, values[row], rooms[row], places[row], head)
        copy(here + m.num_kv_heads * m.dim * 4, to, m.dim)


@piece
def _run(share, b, r, m, w):  # type: ignore[no-untyped-def]
    """From the blocks' tokens to the logits of all rows that guess, step by step."""
    tokens = carray(int_pointer(r.tokens), r.num)
    for row in range(share.part, r.num, share.threads):
        embed_row(m, tokens[row], w.h + row * m.hidden * 4)
    for i in range(m.num_layers):
        layer = layer_of(m.layers, i)
        put_8_norms(share, r.num, m, w, layer.input_norm)
        keep_layer(share, r, m, layer, i, w)
        finish_layer(share, r, b.size, m, layer, i, w)
    barrier(share)
    rows = b.steps * b.num
    for item in range(share.part, rows, share.threads):
        step, request = item // b.num, item % b.num
        put_8_norm(w.h + (request * b.size + b.first + step) * m.hidden * 4, m.norm, m, w, item, rows)
    multiply_8(share, m.head, w, b.logits, rows)


@piece
def _put_word(b, w, i, word):  # type: ignore[no-untyped-def]
    """The input of the Markov head's second matrix."""
    ready = w.ready + i * w.widest * 4
    copy(b.before + word * b.rank * 4, ready, b.rank)
    put_8_row(ready, b.rank, w, i, b.num)


@piece
def _search(share, b, m, w, step):  # type: ignore[no-untyped-def]
    """A thread's share of the words of all requests."""
    temperatures, part = carray(double_pointer(b.temperatures), b.num), share.part
    found = carray(int_pointer(b.found), (b.num, share.threads))
    sums = carray(double_pointer(b.sums), (b.num, share.threads))
    first, last = range_of(share, m.head.n // LANES)
    first, last = first * LANES, last * LANES
    mixed = b.mixed + first * b.num * 4  # [num, last - first]
    if b.rank:
        product_8(0, 1, outputs_of(b.markov, first, last - first), activations(w), mixed, b.num)
    for i in range(b.num):
        row = b.logits + (step * b.num + i) * m.head.n * 4
        if b.rank:
            add(row + first * 4, mixed + i * (last - first) * 4, last - first)
        if temperatures[i] == 0.0:
            found[i, part], sums[i, part] = look_through(row, first, last, m.vocab)


@piece
def _settle(share, b, m, w, step):  # type: ignore[no-untyped-def]
    """The words of a step, and what the next step needs of them."""
    temperatures, seeds = carray(double_pointer(b.temperatures), b.num), carray(seed_pointer(b.seeds), b.num)
    tokens, ids = carray(int_pointer(b.tokens), (b.steps, b.num)), carray(int_pointer(b.ids), b.num_ids)
    chances = carray(double_pointer(b.chances), (b.steps, b.num))
    found = carray(int_pointer(b.found), (b.num, share.threads))
    sums = carray(double_pointer(b.sums), (b.num, share.threads))
    for i in range(share.part, b.num, share.threads):
        row = b.logits + (step * b.num + i) * m.head.n * 4
        if temperatures[i] == 0.0:
            best, chance = settle(row, found[i], sums[i])
        else:
            how = Noise(temperatures[i], seeds[i], _request(b, i).position + step)
            best, chance = guess(row, m.head.n, m.vocab, ids, how)
        tokens[step, i] = ids[best] if b.num_ids else best
        chances[step, i] = chance * (chances[step - 1, i] if step else 1.0)
        if b.rank:
            _put_word(b, w, i, best)


@piece
def _guess_words(share, b, m, w):  # type: ignore[no-untyped-def]
    """From logits without the Markov head to tokens and the chances of the paths to them."""
    for i in range(share.part, b.num if b.rank else 0, share.threads):
        _put_word(b, w, i, _request(b, i).word)
    for step in range(b.steps):
        barrier(share)
        _search(share, b, m, w, step)
        barrier(share)
        _settle(share, b, m, w, step)


@piece
def _part(share, c):  # type: ignore[no-untyped-def]
    if share.part == 0:
        _write_rows(c.context, c.rows, c.block)
    _take_in(share, c.context, c.model, c.work)
    if c.block.steps:
        _run(share, c.block, c.rows, c.model, c.work)
        if c.block.is_guessing:
            _guess_words(share, c.block, c.model, c.work)


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
