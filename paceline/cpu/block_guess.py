"""The words of a block, from left to right: with a Markov head a token's logits also depend on the token
before it.

Each thread adds what that token makes likely to its share of all words and looks through them while they are
in its caches; what the threads found is settled by one of them. Guesses with noise are made by one thread
alone.
"""

from __future__ import annotations

from numba import carray

from paceline.cpu.block_rows import NUM_COLUMNS, POSITION, WORD
from paceline.cpu.compile import piece
from paceline.cpu.guess import guess, look_through, settle
from paceline.cpu.heads import matrix_of, outputs_of, put_row
from paceline.cpu.lanes import LANES, double_pointer, int_pointer, seed_pointer
from paceline.cpu.matmul import Activations, product_8
from paceline.cpu.rows import add, copy
from paceline.cpu.sync import barrier

MARKOV = 3  # of a shape's matrices


@piece
def _put_word(b, w, i, word):  # type: ignore[no-untyped-def]
    """The input of the Markov head's second matrix."""
    ready = w.ready + i * w.widest * 4
    copy(b.before + word * b.rank * 4, ready, b.rank)
    put_row(ready, b.rank, w, i, b.num)


@piece
def _search(part, b, s, w, step):  # type: ignore[no-untyped-def]
    """A thread's share of the words of all requests."""
    temperatures = carray(double_pointer(b.temperatures), b.num)
    found, sums = (
        carray(int_pointer(b.found), (b.num, s.threads)),
        carray(double_pointer(b.sums), (b.num, s.threads)),
    )
    turns = s.num_outputs // LANES
    first, last = turns * part // s.threads * LANES, turns * (part + 1) // s.threads * LANES
    mixed = b.mixed + first * b.num * 4  # [num, last - first]
    if b.rank:
        share = outputs_of(matrix_of(s, MARKOV), first, last - first)
        product_8(0, 1, share, Activations(w.values, w.scales, w.sums), mixed, b.num)
    for i in range(b.num):
        row = b.logits + (step * b.num + i) * s.num_outputs * 4
        if b.rank:
            add(row + first * 4, mixed + i * (last - first) * 4, last - first)
        if temperatures[i] == 0.0:
            found[i, part], sums[i, part] = look_through(row, first, last, s.num_words)


@piece
def _settle(part, b, s, w, step):  # type: ignore[no-untyped-def]
    """The words of a step, and what the next step needs of them."""
    temperatures, seeds = carray(double_pointer(b.temperatures), b.num), carray(seed_pointer(b.seeds), b.num)
    requests, ids = (
        carray(int_pointer(b.requests), (b.num, NUM_COLUMNS)),
        carray(int_pointer(b.ids), b.num_ids),
    )
    tokens, chances = (
        carray(int_pointer(b.tokens), (b.steps, b.num)),
        carray(double_pointer(b.chances), (b.steps, b.num)),
    )
    found, sums = (
        carray(int_pointer(b.found), (b.num, s.threads)),
        carray(double_pointer(b.sums), (b.num, s.threads)),
    )
    for i in range(part, b.num, s.threads):
        row = b.logits + (step * b.num + i) * s.num_outputs * 4
        if temperatures[i] == 0.0:
            best, chance = settle(row, found[i], sums[i])
        else:
            best, chance = guess(
                row, s.num_outputs, s.num_words, ids, temperatures[i], seeds[i], requests[i, POSITION] + step
            )
        tokens[step, i] = ids[best] if b.num_ids else best
        chances[step, i] = chance * (chances[step - 1, i] if step else 1.0)
        if b.rank:
            _put_word(b, w, i, best)


@piece
def guess_words(part, b, s, w):  # type: ignore[no-untyped-def]
    """From logits without the Markov head to tokens and the chances of the paths to them."""
    requests = carray(int_pointer(b.requests), (b.num, NUM_COLUMNS))
    for i in range(part, b.num if b.rank else 0, s.threads):
        _put_word(b, w, i, requests[i, WORD])
    for step in range(b.steps):
        barrier(w.sync, s.threads)
        _search(part, b, s, w, step)
        barrier(w.sync, s.threads)
        _settle(part, b, s, w, step)
