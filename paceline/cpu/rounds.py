"""Rounds of one greedy request on the CPU: made in one compiled call (cpu/flights.py), then landed one by
one.

Invariant: whatever the kernel is given the address of lives until it returns, and what it wrote is copied
before anybody else takes off; slots for the longest drafts of all rounds are reserved.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from paceline.core.types import Asides, Batch, Round
from paceline.cpu.chain_call import MOST_ROWS
from paceline.cpu.chain_head import ChainHead
from paceline.cpu.chains import draft_chains
from paceline.cpu.compile import entry_of
from paceline.cpu.decoder import CpuDecoder, LayerCache
from paceline.cpu.flights import (
    COUNT,
    FLOATS,
    HEAD_SECONDS,
    NUM_HEAD,
    NUM_OTHER,
    NUM_READ,
    OTHER,
    ROUND_SECONDS,
    WHO,
    WIDTH,
    Craft,
    fly,
)
from paceline.cpu.forward import FORWARD
from paceline.cpu.head_memory import address
from paceline.cpu.recycle import Recycled
from paceline.cpu.taps import Taps
from paceline.cpu.votes import draft as vote
from paceline.heads.rows import Feed, Matcher, Orders, Speaker

MOST_ROUNDS = 16  # in a row
LONGEST = MOST_ROWS // 2 - 1  # tokens of a draft: the head must be able to read what two rounds say
NO_MATCHER = Matcher(0, 0, 0, 0, 0, 0)


class CpuFlown:
    """Rounds that are over: what each said, as the kernel wrote it down."""

    is_first, num_left = False, 0

    def __init__(
        self, length: int, ring: list[list[int]], floats: list[list[float]], layers: Sequence[int], width: int, memory: np.ndarray,
        has_head: bool,
    ) -> None:  # fmt: skip
        """memory: the hidden states of all rounds, one after the other."""
        self._has_head = has_head
        self._length, self._ring, self._floats, self._layers, self._width, self._memory = (
            length,
            ring,
            floats,
            layers,
            width,
            memory,
        )

    def __len__(self) -> int:
        return len(self._ring)

    def more(self) -> None:
        raise AssertionError("all rounds are over")

    def hidden(self, number: int) -> Mapping[int, torch.Tensor]:
        rows, size = self._ring[number][COUNT] + 1, len(self._layers) * self._width
        first = sum(row[COUNT] + 1 for row in self._ring[:number]) * size
        return Taps(self._layers, self._memory[first : first + rows * size], rows, self._width)

    def round(self, number: int) -> Round:
        row, floats, length = self._ring[number], self._floats[number], self._length
        count, is_other = row[COUNT], row[WHO] == OTHER
        other = row[WIDTH : WIDTH + row[NUM_OTHER]], floats[FLOATS : FLOATS + row[NUM_OTHER]]
        own_at, chances_at, picked_at = WIDTH + length, FLOATS + length, WIDTH + 2 * length
        own = row[own_at : own_at + row[NUM_HEAD]], floats[chances_at : chances_at + row[NUM_HEAD]]
        tokens, chances = other if is_other else own
        if not self._has_head:  # who flies is the only one
            is_other, other, own = False, ([], []), other
        asides = Asides(other, own, is_other, row[NUM_READ], floats[HEAD_SECONDS], floats[ROUND_SECONDS])
        return Round([tokens[:count]], [chances[:count]], [row[picked_at : picked_at + count + 1]], asides)


class CpuRounds:
    most_rounds, most_requests, is_asking = MOST_ROUNDS, 1, True

    def __init__(
        self, head: ChainHead | None, decoder: CpuDecoder, kv: Sequence[LayerCache], length: int
    ) -> None:
        """head: None for suffix matching alone. length: of the longest draft, LONGEST at most with a head."""
        self._head, self._decoder, self._kv = head, decoder, kv
        sources = () if head is None else head.config.hidden_layers
        self._layers = tuple(dict.fromkeys(sources))
        self._layers_at = array("q", self._layers)
        self._source_of = array("q", [self._layers.index(layer) for layer in sources])
        self._ring = np.zeros((MOST_ROUNDS, WIDTH + 3 * length + 1), np.int64)
        self._floats = np.zeros((MOST_ROUNDS, FLOATS + 2 * length))
        self._pushed = array("i", [0] * (length + 1))
        drafts = (
            0 if head is None else entry_of(draft_chains, 2)
        )  # without a head it need not even be compiled
        self._entries = entry_of(FORWARD[decoder.bits], 5), drafts, entry_of(vote, 6)
        self._features = Recycled()
        self._compile()

    def _compile(self) -> None:
        """Now, so that nobody's first answer waits for it."""
        nothing = array("q", [0] * len(Craft._fields))
        fly(nothing.buffer_info()[0])

    def can_fly(self, temperature: float) -> bool:
        return temperature == 0

    def launch(
        self, feeds: Sequence[Feed], speakers: Sequence[Speaker], batch: Batch, count: int, orders: Orders
    ) -> CpuFlown:
        """batch: the rows of the longest draft, of which only the root is known. The feed: what the head has
        not read, few rows.
        """
        course, length, width = orders.course, len(batch.columns.rows) - 1, self._decoder.config.hidden_size
        assert course is not None, "drafts are weighed"
        assert 1 <= count <= MOST_ROUNDS, "the ring holds so many"
        assert self._ring.shape[1] >= WIDTH + 3 * length + 1, "and drafts so long"
        call, numbers, guessed, chances = self._open(feeds, speakers, length, orders.least, count)
        prepared = self._decoder.prepare(batch, self._kv, count * (length + 1))
        ids, positions, slots, _, _, _, blocks, prefix, _ = batch.addresses()
        memory = self._features.block(count * (length + 1) * len(self._layers) * width)
        matcher, columns = orders.matcher or NO_MATCHER, batch.columns
        lists = array("d", course.added), array("d", course.own), array("d", course.others)
        settings = array(
            "d",
            (
                course.seconds,
                course.margin,
                course.promise,
                course.sure,
                course.own_factor,
                course.other_factor,
            ),
        )
        state = array(
            "q",
            (
                columns.prefix_lens[0],
                columns.input_ids[0],
                sum(len(feed.tokens) for feed in feeds),
                orders.wanted,
                0,
            ),
        )
        stops = array("q", orders.stops)
        added, own, others = (each.buffer_info()[0] for each in lists)
        craft = array("q", Craft(
            *self._entries, prepared.spec.buffer_info()[0], prepared.model, prepared.work, prepared.logits.data_ptr(), prepared.threads,
            ids, positions, slots, blocks, batch.block_size, prefix, prepared.picked, prepared.taps.buffer_info()[0],
            self._layers_at.buffer_info()[0], len(self._layers), width, address(memory), call, numbers, guessed, chances,
            len(self._source_of), self._source_of.buffer_info()[0], matcher.live, matcher.past, matcher.scratch, matcher.drafted,
            matcher.reach, min(matcher.budget, length), self._pushed.buffer_info()[0], length, count, stops.buffer_info()[0], len(stops),
            course.bins, course.depths, added, own, others, settings.buffer_info()[0], state.buffer_info()[0], address(self._ring),
            address(self._floats),
        ))  # fmt: skip
        made = fly(craft.buffer_info()[0])
        assert made, "whatever was said before, the suffix tree has read"
        return CpuFlown(
            length, *self._written(made, length), self._layers, width, memory, self._head is not None
        )

    def _open(
        self, feeds: Sequence[Feed], speakers: Sequence[Speaker], length: int, least: float, count: int
    ) -> tuple[int, int, int, int]:
        if self._head is None:
            return 0, 0, 0, 0
        (feed,), (speaker,) = feeds, speakers
        return self._head.open(feed, speaker, length, least, count * (length + 1))

    def _written(self, made: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
        """Copied: the next flight writes over it."""
        width, breadth = WIDTH + 3 * length + 1, FLOATS + 2 * length
        ring, floats = self._ring.reshape(-1)[: made * width], self._floats.reshape(-1)[: made * breadth]
        return ring.reshape(made, width).tolist(), floats.reshape(made, breadth).tolist()
