"""Bursts of one request on the CPU: made in one compiled call (burst_kernel.py), then landed round by
round.

Invariant: whatever the kernel is given the address of lives until it returns; slots for the longest drafts of
all rounds are reserved.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core.accept import follow
from paceline.core.tree import Tree
from paceline.core.types import Batch, Draft, Round
from paceline.cpu import burst_kernel as kernel
from paceline.cpu.burst_kernel import BurstCall, HeadPart, TargetPart, WeightsPart
from paceline.cpu.chain_head import ChainHead, draft_chains
from paceline.cpu.compile import entry_of, numbers, size_of
from paceline.cpu.decoder import CpuDecoder, LayerCache
from paceline.cpu.forward import FORWARD
from paceline.cpu.head_call import MOST_ROWS, CallMemory
from paceline.cpu.recycle import Taps, address
from paceline.heads.rows import BurstInput, Matcher, TreeShape

MOST_ROUNDS = 16  # in a row
NO_MATCHER, NO_HEAD = Matcher(*[0] * 7), HeadPart(0, 0, CallMemory(*[0] * len(CallMemory._fields)), 0, 0)
LONGEST = MOST_ROWS // 2 - 1  # tokens of a draft: the head must be able to read what two rounds emit


@dataclass(frozen=True, slots=True)
class CpuBurst:
    """Rounds that are over: what each emitted, as the kernel wrote it down."""

    ring: list[list[int]]
    floats: list[list[float]]
    length: int  # of the longest draft
    names: tuple[str, ...]  # of the drafters: which matches, and whose head drafts
    layers: tuple[int, ...]
    memory: np.ndarray  # the layers' hidden states, of one round after the other
    num_left: int = 0

    def __len__(self) -> int:
        return len(self.ring)

    def more(self) -> None:
        raise AssertionError("all rounds are over")

    def hidden(self, number: int) -> Mapping[int, torch.Tensor]:
        if not self.layers:
            return {}
        rows, (_, width) = self.ring[number][kernel.COUNT] + 1, self.memory.shape
        size = len(self.layers) * width
        first = sum(row[kernel.COUNT] + 1 for row in self.ring[:number]) * size
        return Taps(self.layers, self.memory.reshape(-1)[first : first + rows * size], rows, width)

    def round(self, number: int, roots: Sequence[int]) -> Round:
        row, floats = self.ring[number], self.floats[number]
        source, count, num_match, num_head, num_read = row[: kernel.WIDTH]
        head_seconds, seconds = floats[: kernel.FLOATS]

        def chain(which: int, num: int) -> Draft:
            at, reach_at = kernel.WIDTH + which * self.length, kernel.FLOATS + which * self.length
            tree, reach = Tree.chain(roots[0], row[at : at + num]), floats[reach_at : reach_at + num]
            return Draft(tree, self.names[which], None, (1.0, *reach))

        drafts, which = (chain(0, num_match), chain(1, num_head)), int(source != kernel.MATCH)
        checked = drafts[which] if drafts[which].num_drafted == count else chain(which, count)
        picked_at = kernel.WIDTH + 2 * self.length
        answers = tuple((draft.source, draft) for draft in drafts if draft.num_drafted)
        verdict = follow(checked, row[picked_at:][: count + 1])
        return Round([checked], [verdict], answers, seconds, head_seconds, num_read)


class CpuBurstBackend:
    most_rounds, most_requests, is_weighing = MOST_ROUNDS, 1, True

    def __init__(self, head: ChainHead | None, decoder: CpuDecoder, kv: Sequence[LayerCache]) -> None:
        """head: None for a matcher alone, or nothing."""
        self._head, self._decoder, self._kv, self._features = head, decoder, kv, decoder.memory.recycled()
        sources = () if head is None else head.layers
        self._layers = tuple(dict.fromkeys(sources))
        self._layers_at = array("q", self._layers)
        self._source_of = array("q", [self._layers.index(layer) for layer in sources])
        # needed, and compiled, for a head alone
        self._drafts = 0 if head is None else entry_of(draft_chains, 2)
        self._forward, _ = entry_of(FORWARD[decoder.bits], 5), decoder.draw
        # Compiled now: no request waits for it. The numbers have a name, since they must live as long as the
        # call, before which a kernel may be compiled for half a minute.
        nothing = array("q", [0] * size_of(BurstCall))
        kernel.run_burst(nothing.buffer_info()[0])

    def longest(self, num_requests: int) -> int:
        return LONGEST

    def trees(self, num_requests: int) -> Sequence[TreeShape]:
        return ()

    def launch(self, batch: Batch, given: BurstInput) -> CpuBurst:
        """batch: the rows of the longest draft, of which only the root is known. The feed: what the head has
        not read, few rows."""
        columns, rounds, matcher, weights = batch.columns, given.num_rounds, given.matcher, given.weights
        assert weights is not None, "drafts are weighed"
        assert batch.picks is not None, "the kernel goes on from what the pass picks"
        rows, width = len(columns.rows), self._decoder.config.hidden_size
        length, num_more = rows - 1, rounds * rows
        states = num_more * len(self._layers)
        memory = self._features.block(states * width).reshape(states, width)
        ring = np.empty((rounds, kernel.WIDTH + 3 * length + 1), np.int64)
        floats, scores = np.empty((rounds, kernel.FLOATS + 2 * length)), np.empty(rows)
        taps, depth = self._decoder.no_taps[:], self._decoder.config.num_layers
        ready = self._decoder.prepare(batch, self._kv, taps, depth, num_more)
        pushed = array("i", [0] * rows)
        match = matcher._replace(budget=min(matcher.budget, length)) if matcher else NO_MATCHER
        lists = [array("d", each) for each in (weights.added, weights.head_rates, weights.match_rates)]
        added, head_rates, match_rates = (each.buffer_info()[0] for each in lists)
        of_head, of_match = (head_rates, weights.head_factor), (match_rates, weights.match_factor)
        weighing = WeightsPart(weights.seconds, added, weights.promised, *of_head, *of_match, address(scores))
        waiting = sum(len(feed.tokens) for feed in given.feeds)
        state = array("q", (columns.prefix_lens[0], columns.input_ids[0], waiting, given.wanted, 0))
        stops = array("q", given.stops)
        kept = self._layers_at.buffer_info()[0], len(self._layers), width, address(memory)
        target = TargetPart(self._forward, *ready.arguments, *kept)
        head = NO_HEAD
        if self._head is not None:
            asked = self._head.open(given.feeds, given.samplers, length, num_more, least=given.least)
            sources = len(self._source_of), self._source_of.buffer_info()[0]
            head = HeadPart(self._drafts, asked.at, asked.memory, *sources)
        parts = target, head, match, pushed.buffer_info()[0], weighing
        ends = stops.buffer_info()[0], len(stops), state.buffer_info()[0]
        call = numbers(BurstCall(*parts, length, rounds, *ends, address(ring), address(floats)))
        made = kernel.run_burst(call.buffer_info()[0])
        assert made, "the matcher has read all that was emitted before"
        found = ring[:made].tolist(), floats[:made].tolist()
        return CpuBurst(*found, length, given.names, self._layers, memory)
