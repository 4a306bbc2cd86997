"""A call of cpu/blocks.py with nothing made anew: after a pass of the target the host's caches are cold, and
every object that has to be made costs microseconds.

Invariant: all addresses in the call lie in memory that this object owns and that never moves, but for what it
is given with each call.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.cpu.block_rows import (
    CONTEXT,
    IS_GUESSING,
    NUM,
    NUM_COLUMNS,
    ROWS,
    STEPS,
    WORK,
    Block,
    Context,
    call_of,
)
from paceline.cpu.blocks import draft_blocks
from paceline.cpu.head_memory import address
from paceline.cpu.heads import Rows, Shape, Work
from paceline.heads.rows import BlockFeed, Guesses, Speaker

NO_WORK = Work(*[0] * len(Work._fields))


class Constants(NamedTuple):
    """What is the same in all calls of a head."""

    size: int  # rows of a block
    mask: int
    first: int
    most_steps: int
    ids: np.ndarray  # of the draft's vocabulary in the target's; empty where they are the same
    rank: int
    before: int
    num_sources: int
    balance: int
    hidden_norm: int


class BlockCall:
    def __init__(self, constants: Constants, shape: Shape, most_requests: int, most_rows: int) -> None:
        """With memory for so many requests and rows of features."""
        self.most_requests, self.most_rows = most_requests, most_rows
        self._constants, self._shape, self._work = constants, shape, NO_WORK
        rows, steps = most_requests * constants.size, constants.most_steps * most_requests
        shares = most_requests * shape.threads
        sizes = [
            most_requests * NUM_COLUMNS,
            *[most_rows] * 4,
            *[rows] * 7,
            steps,
            most_rows * constants.num_sources,
            shares,
        ]
        starts = np.cumsum([0, *sizes]).tolist()
        self._tokens, self._sources = starts[12:14]
        self._numbers = array("q", [0] * starts[-1])
        self._seeds, self._temperatures = array("Q", [0] * most_requests), array("d", [0.0] * most_requests)
        self._chances, self._sums = array("d", [0.0] * steps), array("d", [0.0] * shares)
        self._mixed = np.empty((most_requests, shape.num_outputs), np.float32)
        self._logits = np.empty((steps, shape.num_outputs), np.float32)
        base = self._numbers.buffer_info()[0]
        self._call = self._first_call([base + 8 * start for start in starts])
        self._at = self._call.buffer_info()[0]

    def _first_call(self, at: Sequence[int]) -> array[int]:
        """Of nothing yet. at: addresses of the arrays of whole numbers."""
        k = self._constants
        tokens, places, keys, values, rooms, seen, nobody = at[5:12]
        context = Context(0, at[13], k.num_sources, k.balance, k.hidden_norm, at[1], at[2], at[3], at[4])
        rows = Rows(0, tokens, places, keys, values, rooms, places, seen, 0, nobody, 0)
        block = Block(
            0, at[0], k.size, k.mask, k.first, 0, self._temperatures.buffer_info()[0], self._seeds.buffer_info()[0], address(k.ids),
            len(k.ids), k.rank, k.before, address(self._mixed), address(self._logits), at[12], self._chances.buffer_info()[0],
            at[14], self._sums.buffer_info()[0], False,
        )  # fmt: skip
        return call_of(context, rows, block, self._shape, NO_WORK)

    def run(
        self, feeds: Sequence[BlockFeed], words: Sequence[int], sources: Sequence[int], speakers: Sequence[Speaker], steps: int,
        work: Work, *, is_guessing: bool,
    ) -> None:  # fmt: skip
        """words: the feeds' roots as draft ids; sources: addresses of all rows' features. Without steps
        nobody speaks.
        """
        numbers, call, at = self._numbers, self._call, 0
        for i, (feed, word, speaker) in enumerate(zip(feeds, words, speakers, strict=True)):
            place, count = feed.place, len(feed.rows)
            numbers[at : at + NUM_COLUMNS] = array(
                "q",
                (
                    place.keys_at,
                    place.values_at,
                    place.blocks,
                    feed.start,
                    count,
                    feed.root,
                    word,
                    speaker.position,
                ),
            )
            self._temperatures[i], self._seeds[i] = speaker.temperature, speaker.seed
            at += NUM_COLUMNS
        numbers[self._sources : self._sources + len(sources)] = array("q", sources)
        call[CONTEXT], call[ROWS] = (
            len(sources) // self._constants.num_sources,
            len(feeds) * self._constants.size if steps else 0,
        )
        call[NUM], call[STEPS], call[IS_GUESSING] = len(feeds), steps, is_guessing
        if work is not self._work:
            self._work = work
            call[WORK : WORK + len(work)] = array("q", work)
        draft_blocks(self._at, self._shape.threads)

    def guesses(self, count: int, steps: int) -> Guesses:
        """Of the last call, with so many requests."""
        tokens, chances = (
            self._numbers[self._tokens : self._tokens + steps * count],
            self._chances[: steps * count],
        )
        if count == 1:
            return Guesses([[token] for token in tokens], [[chance] for chance in chances])
        starts = range(0, steps * count, count)
        return Guesses(
            [tokens[i : i + count].tolist() for i in starts],
            [chances[i : i + count].tolist() for i in starts],
        )

    def logits(self, count: int, steps: int) -> np.ndarray:
        """[steps, requests, outputs] of the last call; the next one overwrites them."""
        return self._logits[: steps * count].reshape(steps, count, -1)
