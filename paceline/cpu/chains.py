"""A head that drafts token by token, K tokens of many requests in one compiled call: EAGLE-3, EAGLE-1 and
small distilled models.

The first pass reads what the requests have not read yet, with true features of the target where the head
wants them; its last rows speak. Each further pass has one row a request: the token guessed last, and the
head's own output in place of features. A tree's level is one pass in which each node is a request of one row
with features given as addresses of outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from paceline.cpu.compile import kernel, piece, struct
from paceline.cpu.head_attention import ROW_SIZE
from paceline.cpu.head_call import CallMemory, Entry, Turn, Work
from paceline.cpu.heads import (
    chance_before,
    guess_token,
    request_of,
    rows_of,
    run_rows,
    write_guess,
    write_row,
)
from paceline.cpu.lanes import double_pointer, int_pointer
from paceline.cpu.layer import Model
from paceline.cpu.sync import barrier, close_region, join, open_region


class Call(NamedTuple):
    """What `draft_chains` is given the address of."""

    turn: Turn
    work: Work
    memory: CallMemory
    model: Model
    entry: Entry


call_at = struct(Call)


@piece
def _write_rows(c, step):  # type: ignore[no-untyped-def]
    """Rows of the pass before guess `step`: the new ones of all requests, then the one after them."""
    num, row = c.turn.num_requests, 0
    table = carray(int_pointer(c.memory.table), (c.turn.num_rows if step == 0 else num, ROW_SIZE))
    speaking = carray(int_pointer(c.memory.speaking), num)
    for i in range(num):
        one = request_of(c, i)
        first = one.num_rows + step - 1 if step else 0
        for ahead in range(first, one.num_rows + step):
            write_row(table, row, one, ahead, one.seen + ahead)
            row += 1
        speaking[i] = row - 1


@piece
def _move_on(c, step):  # type: ignore[no-untyped-def]
    """The guesses are the tokens of the next pass, one place further. False if nothing likely is left."""
    num, sources, most = c.turn.num_requests, c.entry.num_sources, 0.0
    guesses = carray(int_pointer(c.memory.guesses), (c.turn.steps, num))
    chances = carray(double_pointer(c.memory.chances), (c.turn.steps, num))
    tokens = carray(int_pointer(c.memory.tokens), num)
    features = carray(int_pointer(c.memory.sources), (num, sources))
    for i in range(num):
        tokens[i] = guesses[step, i]
        features[i] = c.memory.outputs + i * c.model.hidden * 4
        most = max(most, chances[step, i])
    _write_rows(c, step + 1)
    return most >= c.turn.least


@piece
def _part(share, c):  # type: ignore[no-untyped-def]
    t, done = c.turn, carray(int_pointer(c.memory.done), 2)
    if share.part == 0:
        _write_rows(c, 0)
    run_rows(share, c, rows_of(c, t.num_rows), 1, t.is_fused)
    for step in range(t.steps):
        for i in range(share.part, t.num_requests, share.threads):
            best, chance = guess_token(c, i, step, i)
            write_guess(c, step, i, best, chance * chance_before(c, step, i))
        barrier(share)
        if share.part == 0:
            done[0] = step + 1
            done[1] = 1 if step + 1 < t.steps and _move_on(c, step) else 0
        barrier(share)
        if done[1] == 0:
            return
        run_rows(share, c, rows_of(c, t.num_requests), 1, False)


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
