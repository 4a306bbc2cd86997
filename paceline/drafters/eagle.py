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

from paceline.core.tree import Tree
from paceline.core.types import Course, Draft, Flown, Proposer, Request, Round, Seen, Segment
from paceline.drafters.base import Surroundings
from paceline.drafters.features import Read
from paceline.drafters.grow import Growth
from paceline.drafters.head_backends import chain_backend, rounds_backend
from paceline.drafters.heads import GREEDY, Asked, HeadDrafter, HeadDrafterConfig, Numbered
from paceline.drafters.pairs import CHUNK, Pairs
from paceline.drafters.suffix import Suffix
from paceline.heads.rows import Feed, Guesses, Node, Orders, Speaker
from paceline.runtime.batch import build


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

    def __init__(self, config: HeadDrafterConfig, surroundings: Surroundings) -> None:
        super().__init__(config, surroundings)
        self._backend, self._tree = chain_backend(self.head, surroundings, self.longest_chain), config
        self._pairs = Pairs(self._backend)
        length = self.longest_chain if not config.confidence_threshold else 0
        self._rounds, self._runner = rounds_backend(self._backend, surroundings, length), surroundings.runner

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

    @property
    def most_rounds(self) -> int:
        return 0 if self._rounds is None else self._rounds.most_rounds

    def usual_round(self, num_requests: int) -> int:
        """Where drafts are weighed one by one in rounds, as in steps, they are nothing to be decided
        about.
        """
        if self._rounds is None or self._rounds.is_asking or num_requests > self._rounds.most_requests:
            return 0
        return self.longest_chain

    def round_length(self, requests: Sequence[Request], most: int) -> int:
        rounds, length = self._rounds, self.longest_chain
        if rounds is None or len(requests) > rounds.most_requests or (most < length and not rounds.is_asking):
            return 0
        texts, picks = (
            [self._texts.get(request.id) for request in requests],
            [request.pick for request in requests],
        )
        is_possible = all(text is not None and text.is_ready for text in texts)
        is_possible = is_possible and all(
            pick is not None and rounds.can_fly(pick.temperature) for pick in picks
        )
        return min(most, length) if is_possible else 0

    @property
    def is_weighing(self) -> bool:
        return self._rounds is not None and self._rounds.is_asking

    def asks_beside(self, other: Proposer) -> bool:
        return self.is_weighing and isinstance(other, Suffix)

    def fly(
        self,
        requests: Sequence[Request],
        count: int,
        length: int,
        course: Course | None,
        other: Proposer | None,
    ) -> Flown:
        assert self._rounds is not None, "a round has a length"
        feeds = [self._pairs.shown(self._texts[request.id], min(CHUNK, length + 1)) for request in requests]
        picks = [(request, request.pick or GREEDY) for request in requests]
        speakers = [Speaker(pick.temperature, pick.seed, len(request.tokens)) for request, pick in picks]
        segments = [
            Segment([r.tokens[-1], *[0] * length], r.cache, num_logits=length + 1, pick=pick)
            for r, pick in picks
        ]
        first = requests[0]
        matcher = other.matcher(first) if isinstance(other, Suffix) else None
        orders = Orders(
            course, matcher, self.least, tuple(first.stop_ids), first.params.max_tokens - first.num_output
        )
        return self._rounds.launch(feeds, speakers, build(segments, self._runner.kv), count, orders)

    def land(self, requests: Sequence[Request], said: Round, number: int) -> list[Draft]:
        """What the head has read in a round counts now: all that was shown before, unless it says
        otherwise.
        """
        asides = said.asides
        for read in (self._pairs.library.reads.get(request.id) for request in requests):
            if read is not None:
                read.take(len(read.text.waiting) if asides is None else asides.num_read)
        roots, source = (
            [request.tokens[-1] for request in requests],
            Suffix.name if asides is not None and asides.is_other else self.name,
        )
        trees = [Tree.chain(root, drafted) for root, drafted in zip(roots, said.tokens, strict=True)]
        return [
            Draft(tree, source, None, (1.0, *paths)) for tree, paths in zip(trees, said.chances, strict=True)
        ]

    def observe(self, seen: Sequence[Seen]) -> None:
        super().observe(seen)
        self._pairs.read_ahead(seen, self._texts)

    def release(self, request: Request) -> None:
        super().release(request)
        self._pairs.library.finish(request.id)
