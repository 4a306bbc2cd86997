"""The draft of one sequence with nothing made anew: after a pass of the target the host's caches are cold,
and every object that has to be made costs microseconds.

Invariant: all addresses in the call lie in arrays that this object owns and that never move, but for what it
is given with each call.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from paceline.cpu.chains import (
    FOLLOWING,
    LEAST,
    LOGITS,
    ROWS,
    STEPS,
    TASK,
    WORK,
    Entry,
    Task,
    call_of,
    draft_chains,
)
from paceline.cpu.head_memory import address
from paceline.cpu.heads import Rows, Shape, Work
from paceline.heads.rows import Feed, Guesses, Speaker

MOST_ROWS, MOST_STEPS = 16, 16
TOKENS, POSITIONS, KEYS, VALUES, ROOMS, PLACES, SEEN, NOBODY = (
    MOST_ROWS * column for column in range(8)
)  # columns of the rows
SILENT = Speaker(0.0, 0, 0)
NO_WORK = Work(*[0] * len(Work._fields))


class SingleFeed:
    def __init__(self, shape: Shape, entry: Entry, ids: np.ndarray) -> None:
        """ids: of the draft's vocabulary in the target's; empty where they are the same."""
        self._ids, self._threads, self._work = ids, shape.threads, NO_WORK
        self._logits = np.empty(shape.num_outputs, np.float32)
        self._outputs = np.empty(shape.hidden, np.float32)
        self._sources = 8 * MOST_ROWS  # where the rows' sources begin
        self._own = self._sources + MOST_ROWS * entry.num_sources
        self._then = self._own + entry.num_sources  # a row of a further pass, column by column
        self._rest = (
            self._then + 7
        )  # who speaks, who speaks later, steps made and whether to go on, the first position
        self._numbers = array("q", [0] * (self._rest + 5))
        for i in range(entry.num_sources):
            self._numbers[self._own + i] = address(self._outputs)
        self._seed, self._temperature = array("Q", [0]), array("d", [0.0])
        self._tokens, self._chances = array("q", [0] * MOST_STEPS), array("d", [0.0] * MOST_STEPS)
        base = self._numbers.buffer_info()[0]
        columns = [base + 8 * MOST_ROWS * column for column in range(8)]
        rows = Rows(0, *columns[:7], 0, columns[7], 0)  # type: ignore[call-arg]
        then = Rows(1, *(base + 8 * (self._then + column) for column in range(7)), 0, columns[7], 0)  # type: ignore[call-arg]
        self._call = call_of(rows, then, shape, entry, *self._tasks(base), NO_WORK)
        self._floats = memoryview(self._call).cast("B").cast("d")  # the same memory
        self.at = self._call.buffer_info()[0]

    def _tasks(self, base: int) -> tuple[Task, Task]:
        def at(place: int) -> int:
            return base + 8 * place

        first = Task(
            at(self._sources), True, at(self._rest), 1, 0, self._temperature.buffer_info()[0], self._seed.buffer_info()[0],
            at(self._rest + 4), address(self._ids), len(self._ids), 0.0, address(self._logits), address(self._outputs),
            self._tokens.buffer_info()[0], self._chances.buffer_info()[0], at(self._rest + 2),
        )  # fmt: skip
        return first, first._replace(sources=at(self._own), is_fused=False, speaking=at(self._rest + 1))

    def guess(
        self, feed: Feed, sources: Sequence[int], speaker: Speaker, steps: int, least: float, work: Work
    ) -> Guesses:
        """A chain after the last row of the feed, until its chance is below `least`; there is room for it in
        the feed's place.
        """
        self.open(feed, sources, speaker, steps, least, work)
        draft_chains(self.at, self._threads)
        made = self._numbers[self._rest + 2]
        return Guesses(
            [[token] for token in self._tokens[:made]], [[chance] for chance in self._chances[:made]]
        )

    def output(self, feed: Feed, sources: Sequence[int], work: Work) -> np.ndarray:
        """[1, hidden] after the last row of the feed; the next call writes there, too."""
        self.open(feed, sources, SILENT, 0, 0.0, work)
        self._call[TASK + LOGITS] = 0
        draft_chains(self.at, self._threads)
        self._call[TASK + LOGITS] = address(self._logits)
        return self._outputs[None]

    def open(
        self, feed: Feed, sources: Sequence[int], speaker: Speaker, steps: int, least: float, work: Work
    ) -> None:
        """Write down what `draft_chains` must know of it."""
        self._write(feed, sources, speaker)
        call = self._call
        call[ROWS], call[TASK + STEPS], call[FOLLOWING + STEPS] = len(feed.tokens), steps, steps
        self._floats[TASK + LEAST] = self._floats[FOLLOWING + LEAST] = least
        if work is not self._work:
            self._work = work
            call[WORK : WORK + len(work)] = array("q", work)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of the call, the numbers that it reads, the tokens and their chances."""
        parts = (self._numbers, self._tokens, self._chances)
        return self.at, *(part.buffer_info()[0] for part in parts)  # type: ignore[return-value]

    def _write(self, feed: Feed, sources: Sequence[int], speaker: Speaker) -> None:
        numbers, place, at = self._numbers, feed.place, feed.start
        keys, values, blocks = place.keys_at, place.values_at, place.blocks
        for row, token in enumerate(feed.tokens):
            numbers[TOKENS + row], numbers[POSITIONS + row], numbers[PLACES + row] = token, at, at
            numbers[KEYS + row], numbers[VALUES + row], numbers[ROOMS + row] = keys, values, blocks
            at += 1
            numbers[SEEN + row] = at
        numbers[self._sources : self._sources + len(sources)] = array("q", sources)
        numbers[self._then : self._rest] = array("q", (0, at, keys, values, blocks, at, at + 1))
        rest = self._rest
        numbers[rest], numbers[rest + 2], numbers[rest + 3], numbers[rest + 4] = (
            len(feed.tokens) - 1,
            0,
            0,
            speaker.position,
        )
        self._seed[0], self._temperature[0] = speaker.seed, speaker.temperature
