"""EAGLE: a head of one layer drafts from the target's hidden states, token by token, then on from its own
output.

How it reads a text: proposers/pairs.py. With a width the draft is EAGLE-2's tree: the best paths by the
product of its probabilities. Several rounds of draft and check may follow each other without the host: what
the head read in them counts when they land.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.types import Draft, Request, Seen
from paceline.drafters.base import DrafterContext
from paceline.drafters.features import Read
from paceline.drafters.grow import Growth
from paceline.drafters.heads import GREEDY, Asked, HeadDrafter, HeadDrafterConfig, Numbered
from paceline.drafters.pairs import CHUNK, Pairs
from paceline.heads.config import LayeredConfig
from paceline.heads.others import Eagle1Config
from paceline.heads.rows import ChainHead, Feed, Guesses, Node, Speaker


@dataclass(slots=True)
class _Nodes:
    """Where the rows of a growing tree lie, and what the head put out there."""

    read: Read
    places: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    def node(self, growth: Growth, n: int) -> Node:
        start, path = self.read.count, [n]
        self.places[n] = start + len(self.places)
        while growth.parents[path[-1]] > 0:
            path.append(growth.parents[path[-1]])
        others, source = [self.places[each] for each in reversed(path)], self.outputs[growth.parents[n]]
        return Node(
            self.read.place, self.places[n], start - 1 + len(path), growth.tokens[n], source, start, others
        )


class Eagle(HeadDrafter):
    name = "eagle"
    kinds = ("eagle",)
    has_bursts = True  # where the backend has them

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        super().__init__(config, context)
        self._backend, self._tree = self._load(context), config
        self._pairs = Pairs(self._backend)
        length = self.longest_chain if not config.confidence_threshold else 0
        if length and self.head.config.hidden_layers and self.has_bursts:
            executor = context.executor
            layers = executor.memory.layers
            self.burst_backend = executor.backend.burst(executor.decoder, layers, self._backend, length)

    def _load(self, context: DrafterContext) -> ChainHead:
        config, executor = self.head.config, context.executor
        assert isinstance(config, LayeredConfig)
        norm = context.checkpoint.tensor("norm.weight") if isinstance(config, Eagle1Config) else None
        return executor.backend.chain_head(
            config, self.head.tensors, executor.decoder, executor.memory.num_blocks, norm, self.longest_chain
        )

    def can_guess(self, temperature: float) -> bool:
        return self._backend.can_guess(temperature)

    def guess(self, asked: Sequence[Asked]) -> Guesses:
        speakers = [a.speaker for a in asked if a.speaker is not None]
        return self._backend.guess(self._feeds(asked), speakers, max([a.limit for a in asked]), self.least)

    def grow(self, asked: Sequence[Asked]) -> list[Draft]:
        feeds = self._feeds(asked)
        trees = [_Nodes(self._pairs.library.reads[a.text.request.id]) for a in asked]

        def speak(growths: list[Growth], pairs: Numbered) -> torch.Tensor:
            if not trees[0].outputs:
                said = self._backend.begin(feeds)
            else:
                said = self._backend.level([trees[i].node(growths[i], n) for i, n in pairs])
            for (i, n), output in zip(pairs, said.outputs, strict=True):
                trees[i].outputs[n] = output
            return said.logits

        return self.grow_all(asked, speak, self._tree)

    def _feeds(self, asked: Sequence[Asked]) -> list[Feed]:
        """What the head has not read of each text."""
        return self._pairs.feeds([a.text for a in asked])

    def burst_length(self, requests: Sequence[Request], most: int) -> int:
        """Drafts that are not weighed on the device have their full length."""
        backend, length = self.burst_backend, self.longest_chain
        if backend is None or (most < length and not backend.is_weighing):
            return 0
        texts = [self._texts.get(request.id) for request in requests]
        return min(most, length) if all(text is not None and text.is_ready for text in texts) else 0

    def burst_feeds(self, requests: Sequence[Request], length: int) -> tuple[list[Feed], list[Speaker]]:
        feeds = [self._pairs.shown(self._texts[request.id], min(CHUNK, length + 1)) for request in requests]
        picks = [(len(request.tokens), request.pick or GREEDY) for request in requests]
        return feeds, [Speaker(pick.temperature, pick.seed, position) for position, pick in picks]

    def end_round(self, requests: Sequence[Request], num_read: int | None) -> None:
        for request in requests:
            read = self._pairs.library.reads.get(request.id)
            if read is not None:
                read.take(len(read.text.waiting) if num_read is None else num_read)

    def observe(self, seen: Sequence[Seen]) -> None:
        super().observe(seen)
        self._pairs.read_ahead(seen, self._texts)

    def release(self, request: Request) -> None:
        super().release(request)
        self._pairs.library.finish(request.id)
