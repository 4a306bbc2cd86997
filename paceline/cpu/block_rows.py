"""What a call of cpu/blocks.py is told, and what each of its rows has to know.

The host names requests, in eight numbers each; rows are worked out from them by the kernel. Invariant: arrays
of rows have room for all rows of a call, and nothing is read of them before the first thread has written
them.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from numba import carray

from paceline.cpu.compile import numbers, piece
from paceline.cpu.heads import Rows, Shape, Work
from paceline.cpu.lanes import int_pointer

# what the host says of a request: where its sequence lies, its rows read so far and new ones, the token a
# block begins with, the same as a draft id (the number of words where it is none; then the last guess), and
# the position of the first guess
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
    mixed: int  # room for [num, num_outputs]: what the Markov head adds
    logits: int  # [steps, num, num_outputs]
    tokens: int  # [steps, num]
    chances: int  # [steps, num] float64, of the paths
    found: int  # [num, threads]: which word each thread found the largest in its share of a row
    sums: int  # [num, threads] float64: of the exponentials there
    is_guessing: bool


@piece
def write_context(c, b):  # type: ignore[no-untyped-def]
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
def write_rows(r, b):  # type: ignore[no-untyped-def]
    requests, tokens = (
        carray(int_pointer(b.requests), (b.num, NUM_COLUMNS)),
        carray(int_pointer(r.tokens), r.num),
    )
    places, seen, keys = (
        carray(int_pointer(r.places), r.num),
        carray(int_pointer(r.seen), r.num),
        carray(int_pointer(r.keys), r.num),
    )
    values, rooms = carray(int_pointer(r.values), r.num), carray(int_pointer(r.rooms), r.num)
    for row in range(r.num):
        one, at = requests[row // b.size], row % b.size
        end = one[START] + one[COUNT]
        tokens[row], places[row], seen[row] = b.mask if at else one[ROOT], end + at, end + b.size
        keys[row], values[row], rooms[row] = one[KEYS], one[VALUES], one[ROOM]


CONTEXT, ROWS = 0, len(Context._fields)  # where the parts of a call begin, in numbers
BLOCK = ROWS + len(Rows._fields)
SHAPE = BLOCK + len(Block._fields)
WORK = SHAPE + len(Shape._fields)
NUM, STEPS, IS_GUESSING = (BLOCK + Block._fields.index(name) for name in ("num", "steps", "is_guessing"))


def call_of(context: Context, rows: Rows, block: Block, shape: Shape, work: Work) -> array[int]:
    """What `draft_blocks` is given the address of."""
    return numbers((*context, *rows, *block, *shape, *work))


@piece
def context_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 9)
    return Context(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8])


@piece
def block_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 19)
    return Block(
        f[0],
        f[1],
        f[2],
        f[3],
        f[4],
        f[5],
        f[6],
        f[7],
        f[8],
        f[9],
        f[10],
        f[11],
        f[12],
        f[13],
        f[14],
        f[15],
        f[16],
        f[17],
        f[18] != 0,
    )
