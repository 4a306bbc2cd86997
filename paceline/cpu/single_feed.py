"""The draft of one sequence with nothing made anew: after a pass of the target the host's caches are cold, and every object that has to
be made costs microseconds.

Invariant: all addresses in the tuples lie in arrays that this object owns and that never move, but for what it is given with each call.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from paceline.cpu.chains import Entry, Task, draft_chains
from paceline.cpu.head_memory import address
from paceline.cpu.heads import Rows, Shape, Work
from paceline.models.head_rows import Feed, Guesses, Speaker

MOST_ROWS, MOST_STEPS = 8, 16
TOKENS, POSITIONS, KEYS, VALUES, ROOMS, PLACES, SEEN, NOBODY = range(8)  # columns of the rows
MOST_TASKS = 256  # kept: one for each number of steps and each least chance


class SingleFeed:
    def __init__(self, shape: Shape, entry: Entry, ids: np.ndarray) -> None:
        """ids: of the draft's vocabulary in the target's; empty where they are the same."""
        self._shape, self._entry, self._ids = shape, entry, ids
        self._logits = np.empty(shape.num_outputs, np.float32)
        self._outputs = np.empty(shape.hidden, np.float32)
        self._sources = 8 * MOST_ROWS  # where the rows' sources begin
        self._own = self._sources + MOST_ROWS * entry.num_sources
        self._then = self._own + entry.num_sources  # a row of a further pass, column by column
        self._rest = self._then + 7  # who speaks, who speaks later, steps made and whether to go on, the first position
        self._numbers = array("q", [0] * (self._rest + 5))
        for i in range(entry.num_sources):
            self._numbers[self._own + i] = address(self._outputs)
        self._seed, self._temperature = array("Q", [0]), array("d", [0.0])
        self._tokens, self._chances = array("q", [0] * MOST_STEPS), array("d", [0.0] * MOST_STEPS)
        base = self._numbers.buffer_info()[0]
        columns = [base + 8 * MOST_ROWS * column for column in range(8)]
        self._rows = [_rows(num, columns[:7], columns[NOBODY]) for num in range(MOST_ROWS + 1)]
        self._further = _rows(1, [base + 8 * (self._then + column) for column in range(7)], columns[NOBODY])
        self._base = base
        self._tasks: dict[tuple[int, float], tuple[Task, Task]] = {}

    def guess(self, feed: Feed, sources: Sequence[int], speaker: Speaker, steps: int, least: float, work: Work) -> Guesses:
        """A chain after the last row of the feed, until its chance is below `least`; there is room for it in the feed's place."""
        numbers, count, place = self._numbers, len(feed.tokens), feed.place
        keys, values, blocks, at = address(place.keys), address(place.values), place.blocks, feed.start
        for row, token in enumerate(feed.tokens):
            numbers[row], numbers[MOST_ROWS * POSITIONS + row], numbers[MOST_ROWS * KEYS + row] = token, at, keys
            numbers[MOST_ROWS * VALUES + row], numbers[MOST_ROWS * ROOMS + row] = values, blocks
            numbers[MOST_ROWS * PLACES + row], numbers[MOST_ROWS * SEEN + row] = at, at + 1
            at += 1
        for i, source in enumerate(sources, self._sources):
            numbers[i] = source
        for column, number in enumerate((0, at, keys, values, blocks, at, at + 1), self._then):
            numbers[column] = number
        rest = self._rest
        numbers[rest], numbers[rest + 2], numbers[rest + 3], numbers[rest + 4] = count - 1, 0, 0, speaker.position
        self._seed[0], self._temperature[0] = speaker.seed, speaker.temperature
        task, following = self._tasks.get((steps, least)) or self._task(steps, least)
        draft_chains(self._rows[count], self._further, self._shape, self._entry, task, following, work)
        made = numbers[rest + 2]
        return Guesses([[token] for token in self._tokens[:made]], [[chance] for chance in self._chances[:made]])

    def _task(self, steps: int, least: float) -> tuple[Task, Task]:
        def at(place: int) -> int:
            return self._base + 8 * place

        first = Task(
            at(self._sources), True, at(self._rest), 1, steps, self._temperature.buffer_info()[0], self._seed.buffer_info()[0],
            at(self._rest + 4), address(self._ids), len(self._ids), float(least), address(self._logits), address(self._outputs),
            self._tokens.buffer_info()[0], self._chances.buffer_info()[0], at(self._rest + 2),
        )  # fmt: skip
        if len(self._tasks) >= MOST_TASKS:
            self._tasks.clear()
        then = first._replace(sources=at(self._own), is_fused=False, speaking=at(self._rest + 1))
        return self._tasks.setdefault((steps, least), (first, then))


def _rows(num: int, columns: Sequence[int], nobody: int) -> Rows:
    """Rows that see their own sequence alone."""
    tokens, positions, keys, values, rooms, places, seen = columns
    return Rows(num, tokens, positions, keys, values, rooms, places, seen, 0, nobody, 0)
