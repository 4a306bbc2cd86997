"""Calls of cpu/chains.py with nothing made anew: after a pass of the target the host's caches are cold, and
every object that has to be made costs microseconds.

Invariant: all addresses in the call lie in arrays that this object owns and that never move, but for what it
is given with each call.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.cpu.chains import (
    FOLLOWING,
    LEAST,
    LOGITS,
    ROWS,
    STEPS,
    TASK,
    WORK,
    Call,
    Entry,
    Task,
    draft_chains,
)
from paceline.cpu.compile import numbers, place_of
from paceline.cpu.head_memory import NO_WORK, address
from paceline.cpu.heads import Rows, Work
from paceline.cpu.layer import Model
from paceline.heads.rows import Feed, Guesses, Node, Sampler

MOST_ROWS, MOST_STEPS = 16, 16  # of the usual call: one request, whose rows are the tokens of a few passes
# columns of the usual call's rows, in numbers
TOKENS, POSITIONS, KEYS, VALUES, ROOMS, PLACES, SEEN, NOBODY = (MOST_ROWS * column for column in range(8))
THEN, OTHERS = place_of(Call, "then"), place_of(Call, "first", "others")
IS_FUSED, NUM_SPEAKING = place_of(Task, "is_fused"), place_of(Task, "num_speaking")


class Capacity(NamedTuple):
    """What a call has memory for."""

    feeds: int = 1
    rows: int = MOST_ROWS
    others: int = 0  # places of a tree that a row sees beside its text
    steps: int = MOST_STEPS


USUAL = Capacity()


class ChainCall:
    def __init__(
        self, model: Model, entry: Entry, ids: np.ndarray, threads: int, most: Capacity = USUAL
    ) -> None:
        """ids: of the draft's vocabulary in the target's; empty where they are the same."""
        self.most, (feeds, rows, others, steps) = most, most
        self._ids, self._threads, self._work, self._count = ids, threads, NO_WORK, 0
        self._logits = np.empty((feeds, model.head.n), np.float32)
        self._outputs = np.empty((feeds, model.hidden), np.float32)
        sources = entry.num_sources
        # eight columns, the rows' sources, the outputs' addresses, seven columns of the further passes' rows,
        # which rows speak here and there, steps made and whether to go on, first positions, others
        sizes = [
            8 * rows,
            rows * sources,
            feeds * sources,
            7 * feeds,
            feeds,
            feeds,
            2,
            feeds,
            rows,
            rows * others,
        ]
        starts = np.cumsum([0, *sizes]).tolist()
        self._sources, self._own, self._then, self._speaking, _, self._done, self._position = starts[1:8]
        self._counts, self._others = starts[8:10]
        self._numbers = array("q", [0] * starts[-1])
        for feed in range(feeds):
            at = self._own + feed * sources
            self._numbers[at : at + sources] = array("q", [address(self._outputs[feed])] * sources)
            self._numbers[self._speaking + feeds + feed] = feed
        self._seeds, self._temperatures = array("Q", [0] * feeds), array("d", [0.0] * feeds)
        self._tokens, self._chances = array("q", [0] * (steps * feeds)), array("d", [0.0] * (steps * feeds))
        base = self._numbers.buffer_info()[0]
        self._places = [base + 8 * start for start in starts]
        self._call = numbers(self._first_call(model, entry, base, rows, feeds))
        self._floats = memoryview(self._call).cast("B").cast("d")  # the same memory
        self.at = self._call.buffer_info()[0]

    def _first_call(self, model: Model, entry: Entry, base: int, rows: int, feeds: int) -> Call:
        """Of nothing yet."""
        columns = [base + 8 * rows * column for column in range(8)]
        ahead = [base + 8 * (self._then + feeds * column) for column in range(7)]
        first, then = (Rows(0, *own, 0, columns[7], 0) for own in (columns[:7], ahead))  # type: ignore[call-arg]
        places = self._places
        temperatures, seeds = self._temperatures.buffer_info()[0], self._seeds.buffer_info()[0]
        tokens, chances = self._tokens.buffer_info()[0], self._chances.buffer_info()[0]
        task = Task(
            places[1], True, places[4], 0, 0, temperatures, seeds, places[7], address(self._ids),
            len(self._ids), 0.0, address(self._logits), address(self._outputs), tokens, chances, places[6],
        )  # fmt: skip
        following = task._replace(sources=places[2], is_fused=False, speaking=places[5])
        return Call(first, then, model, entry, task, following, NO_WORK)

    def open(
        self, feeds: Sequence[Feed], sources: Sequence[int], samplers: Sequence[Sampler], steps: int,
        least: float, work: Work,
    ) -> None:  # fmt: skip
        """Write down what `draft_chains` must know of feeds, after whose last rows chains of up to `steps`
        tokens are drafted, until no chance reaches `least`; without samplers they are only read."""
        given, rows, row, then, count = self._numbers, self.most.rows, 0, self._then, self.most.feeds
        for i, feed in enumerate(feeds):
            place, at = feed.place, feed.start
            keys, values, blocks = place.keys_at, place.values_at, place.blocks
            for token in feed.tokens:
                given[row], given[rows + row], given[5 * rows + row] = token, at, at
                given[2 * rows + row], given[3 * rows + row], given[4 * rows + row] = keys, values, blocks
                at += 1
                given[6 * rows + row] = at
                row += 1
            given[self._speaking + i] = row - 1
            for column, number in enumerate((0, at, keys, values, blocks, at, at + 1)):
                given[then + column * count + i] = number
        for i, sampler in enumerate(samplers):
            given[self._position + i] = sampler.position
            self._seeds[i], self._temperatures[i] = sampler.seed, sampler.temperature
        self._floats[TASK + LEAST] = self._floats[FOLLOWING + LEAST] = least
        self._open(row, sources, len(samplers), steps, work)

    def open_nodes(self, nodes: Sequence[Node], sources: Sequence[int], work: Work) -> None:
        """The same of the nodes of a tree's level, each of which speaks once."""
        given, rows, most = self._numbers, self.most.rows, self.most.others
        for row, n in enumerate(nodes):
            place = n.place
            columns = (n.token, n.position, place.keys_at, place.values_at, place.blocks, n.at, n.seen)
            for column, number in enumerate(columns):
                given[column * rows + row] = number
            given[self._speaking + row], given[self._counts + row] = row, len(n.others)
            at = self._others + row * most
            given[at : at + len(n.others)] = array("q", n.others)
        self._open(len(nodes), sources, len(nodes), 0, work, is_tree=True)

    def _open(
        self, rows: int, sources: Sequence[int], count: int, steps: int, work: Work, *, is_tree: bool = False
    ) -> None:
        call, self._count = self._call, count
        self._numbers[self._sources : self._sources + len(sources)] = array("q", sources)
        self._numbers[self._done] = self._numbers[self._done + 1] = 0
        call[ROWS], call[THEN], call[TASK + IS_FUSED] = rows, count, not is_tree
        for task in (TASK, FOLLOWING):
            call[task + NUM_SPEAKING], call[task + STEPS] = count, steps
        others = (0, self._places[0] + 8 * 7 * self.most.rows, 0)
        if is_tree:
            others = (self._places[9], self._places[8], self.most.others)
        call[OTHERS : OTHERS + 3] = array("q", others)
        if work is not self._work:
            self._work = work
            call[WORK : WORK + len(work)] = array("q", work)

    def run(self, *, has_logits: bool = True) -> None:
        self._call[TASK + LOGITS] = address(self._logits) if has_logits else 0
        draft_chains(self.at, self._threads)

    @property
    def guesses(self) -> Guesses:
        """What the last call drafted."""
        made, count = self._numbers[self._done], self._count
        tokens, chances = self._tokens[: made * count], self._chances[: made * count]
        starts = range(0, made * count, count or 1)
        return Guesses(
            [tokens[i : i + count].tolist() for i in starts],
            [chances[i : i + count].tolist() for i in starts],
        )

    @property
    def logits(self) -> np.ndarray:
        """[requests, outputs] after the last rows; the next call writes there, too."""
        return self._logits[: self._count]

    @property
    def outputs(self) -> np.ndarray:
        """[requests, hidden]."""
        return self._outputs[: self._count]

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of the call, the numbers that it reads, the tokens and their chances."""
        parts = (self._numbers, self._tokens, self._chances)
        return self.at, *(part.buffer_info()[0] for part in parts)  # type: ignore[return-value]
