"""Bursts of one greedy request on the CPU: made in one compiled call (burst_kernel.py), then landed round by
round.

Invariant: whatever the kernel is given the address of lives until it returns, and what it wrote is copied
before the next burst; slots for the longest drafts of all rounds are reserved.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from paceline.core.tree import Tree
from paceline.core.types import Batch, Draft, Round
from paceline.cpu.burst_kernel import (
    COUNT,
    FLOATS,
    HEAD_SECONDS,
    MATCH,
    NUM_HEAD,
    NUM_MATCH,
    NUM_READ,
    ROUND_SECONDS,
    SOURCE,
    WIDTH,
    BurstCall,
    HeadPart,
    MatchPart,
    TargetPart,
    WeightsPart,
    run_burst,
)
from paceline.cpu.chain_call import MOST_ROWS
from paceline.cpu.chain_head import ChainHead
from paceline.cpu.chains import draft_chains
from paceline.cpu.compile import entry_of, numbers, size_of
from paceline.cpu.decoder import CpuDecoder, LayerCache
from paceline.cpu.forward import FORWARD
from paceline.cpu.head_memory import address
from paceline.cpu.recycle import Recycled, Taps
from paceline.heads.rows import BurstInput

MOST_ROUNDS = 16  # in a row
LONGEST = MOST_ROWS // 2 - 1  # tokens of a draft: the head must be able to read what two rounds emit


class CpuBurst:
    """Rounds that are over: what each emitted, as the kernel wrote it down."""

    num_left = 0

    def __init__(
        self,
        backend: CpuBurstBackend,
        num_rounds: int,
        length: int,
        memory: np.ndarray,
        sources: tuple[str, str],
    ) -> None:
        """memory: the hidden states of all rounds, one after the other. sources: the names of the drafters
        that match, and whose head drafts.
        """
        self._length, self._layers, self._width = length, backend.layers, backend.width
        self._memory, self._sources = memory, sources
        self._ring, self._floats = backend.written(num_rounds, length)

    def __len__(self) -> int:
        return len(self._ring)

    def more(self) -> None:
        raise AssertionError("all rounds are over")

    def hidden(self, number: int) -> Mapping[int, torch.Tensor]:
        if not self._layers:
            return {}
        rows, size = self._ring[number][COUNT] + 1, len(self._layers) * self._width
        first = sum(row[COUNT] + 1 for row in self._ring[:number]) * size
        return Taps(self._layers, self._memory[first : first + rows * size], rows, self._width)

    def round(self, number: int, roots: Sequence[int]) -> Round:
        row, floats, length = self._ring[number], self._floats[number], self._length
        drafts = []
        for source, at, num in ((0, 0, row[NUM_MATCH]), (1, length, row[NUM_HEAD])):
            tree = Tree.chain(roots[0], row[WIDTH + at : WIDTH + at + num])
            reach = tuple(floats[FLOATS + at : FLOATS + at + num])
            drafts.append(Draft(tree, self._sources[source], None, (1.0, *reach)))
        checked = _first_nodes(drafts[row[SOURCE] != MATCH], row[COUNT])
        picked_at = WIDTH + 2 * length
        picked = row[picked_at : picked_at + row[COUNT] + 1]
        answers = tuple((draft.source, draft) for draft in drafts if draft.num_drafted)
        return Round([checked], [picked], answers, floats[ROUND_SECONDS], floats[HEAD_SECONDS], row[NUM_READ])


def _first_nodes(draft: Draft, count: int) -> Draft:
    if count == draft.num_drafted:
        return draft
    tree, end = draft.tree, count + 1
    assert draft.chances is not None
    return Draft(Tree.known(tree.tokens[:end], tree.parents[:end]), draft.source, None, draft.chances[:end])


class CpuBurstBackend:
    most_rounds, most_requests, is_weighing = MOST_ROUNDS, 1, True

    def __init__(
        self, head: ChainHead | None, decoder: CpuDecoder, kv: Sequence[LayerCache], length: int
    ) -> None:
        """head: None for a matcher alone, or nothing. length: of the longest draft, LONGEST at most with a
        head.
        """
        self._head, self._decoder, self._kv = head, decoder, kv
        self.width = decoder.config.hidden_size
        sources = () if head is None else head.config.hidden_layers
        self.layers = tuple(dict.fromkeys(sources))
        self._layers_at = array("q", self.layers)
        self._source_of = array("q", [self.layers.index(layer) for layer in sources])
        self._ring = np.zeros((MOST_ROUNDS, WIDTH + 3 * length + 1), np.int64)
        self._floats = np.zeros((MOST_ROUNDS, FLOATS + 2 * length))
        self._scores = np.zeros(length + 1)
        self._pushed = array("i", [0] * (length + 1))
        # needed, and compiled, for a head alone
        self._drafts = 0 if head is None else entry_of(draft_chains, 2)
        self._forward = entry_of(FORWARD[decoder.bits], 5)
        self._features = Recycled()
        # Compiled now: no request waits for it. The numbers have a name, since they must live as long as the
        # call, before which a kernel may be compiled for half a minute.
        nothing = array("q", [0] * size_of(BurstCall))
        run_burst(nothing.buffer_info()[0])

    def can_run(self, temperature: float) -> bool:
        return temperature == 0

    def launch(self, batch: Batch, given: BurstInput) -> CpuBurst:
        """batch: the rows of the longest draft, of which only the root is known. The feed: what the head has
        not read, few rows.
        """
        weights, length, columns = given.weights, len(batch.columns.rows) - 1, batch.columns
        assert weights is not None, "drafts are weighed"
        assert 1 <= given.num_rounds <= MOST_ROUNDS, "the ring holds no more rounds"
        assert self._ring.shape[1] >= WIDTH + 3 * length + 1, "and no longer drafts"
        memory = self._features.block(given.num_rounds * (length + 1) * len(self.layers) * self.width)
        target, kept = self._target(batch, given, length, memory)
        matcher = given.matcher
        match = MatchPart(0, 0, 0, 0, 0, 0, 0, self._pushed.buffer_info()[0])
        if matcher is not None:
            budget, (*places, _, _) = min(matcher.budget, length), matcher
            match = MatchPart(*places, budget, self._pushed.buffer_info()[0])  # type: ignore[call-arg]
        lists = [array("d", each) for each in (weights.added, weights.head_rates, weights.match_rates)]
        added, head_rates, match_rates = (each.buffer_info()[0] for each in lists)
        weighing = WeightsPart(
            weights.seconds, weights.promised, weights.head_factor, weights.match_factor, added, head_rates,
            match_rates,
            address(self._scores),
        )  # fmt: skip
        waiting = sum(len(feed.tokens) for feed in given.feeds)
        state = array("q", (columns.prefix_lens[0], columns.input_ids[0], waiting, given.wanted, 0))
        stops = array("q", given.stops)
        call = numbers(BurstCall(
            target, self._head_part(given, length), match, weighing, length, given.num_rounds,
            stops.buffer_info()[0], len(stops), state.buffer_info()[0], address(self._ring),
            address(self._floats),
        ))  # fmt: skip
        made = run_burst(call.buffer_info()[0])
        assert made, "the matcher has read all that was emitted before"
        del kept
        sources = "" if matcher is None else matcher.name, given.head_name
        return CpuBurst(self, made, length, memory, sources)

    def _target(
        self, batch: Batch, given: BurstInput, length: int, memory: np.ndarray
    ) -> tuple[TargetPart, object]:
        """The decoder's part, and what must live until the call returns."""
        ready = self._decoder.prepare(batch, self._kv, given.num_rounds * (length + 1))
        ids, positions, slots, _, _, _, blocks, prefix, _ = batch.addresses()
        part = TargetPart(
            self._forward, ready.spec.buffer_info()[0], ready.model, ready.work, ready.logits.data_ptr(),
            ready.threads,
            ids, positions, slots, blocks, prefix, ready.picked, ready.taps.buffer_info()[0],
            self._layers_at.buffer_info()[0], len(self.layers), self.width, address(memory),
        )  # fmt: skip
        return part, ready

    def _head_part(self, given: BurstInput, length: int) -> HeadPart:
        if self._head is None:
            return HeadPart(0, 0, 0, 0, 0, 0, 0)
        (feed,), (speaker,) = given.feeds, given.speakers
        where = self._head.open(feed, speaker, length, given.least, given.num_rounds * (length + 1))
        return HeadPart(self._drafts, *where, len(self._source_of), self._source_of.buffer_info()[0])

    def written(self, made: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
        """What the kernel wrote, copied: the next burst writes over it."""
        width, breadth = WIDTH + 3 * length + 1, FLOATS + 2 * length
        ring, floats = self._ring.reshape(-1)[: made * width], self._floats.reshape(-1)[: made * breadth]
        return ring.reshape(made, width).tolist(), floats.reshape(made, breadth).tolist()
