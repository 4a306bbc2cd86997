"""EAGLE: a head of one layer drafts from the target's hidden states, token by token, then on from its own output.

The pair (hidden state of position t, token of position t + 1) is one row of the head. Rows of the text are read with true features; what
the head guesses lies behind them and is overwritten in the next round, so nothing has to be rolled back.
With a width the draft is EAGLE-2's tree: the best paths by the product of the head's probabilities.
On a GPU several rounds of draft and check may follow each other without the host: what the head read in them counts when they land.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.models.head_rows import Feed, Guesses, Node, Speaker
from paceline.proposers.base import Surroundings
from paceline.proposers.features import Library, Read
from paceline.proposers.grow import Growth
from paceline.proposers.head_backends import chain_backend, rounds_backend
from paceline.proposers.heads import GREEDY, Asked, HeadDrafter, HeadDrafterConfig, Pairs
from paceline.runtime.batch import build
from paceline.types import Draft, Flown, Request, Round, Seen, Segment
from paceline.verify.tree import Tree

CHUNK = 8  # rows: where more wait, all but the last are read before, which needs their keys and values alone
EAGER = 4  # requests: of so few, prompts are read as the target reads them; of more, when their drafts are asked for


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
        return Node(self.read.place, self.places[n], start - 1 + len(path), growth.tokens[n], source, start, others)


class Eagle(HeadDrafter):
    name = "eagle"
    kinds = ("eagle",)

    def __init__(self, config: HeadDrafterConfig, surroundings: Surroundings) -> None:
        super().__init__(config, surroundings)
        self._backend, self._tree = chain_backend(self.head, surroundings, self.longest_chain), config
        self._library = Library(self._backend.place, self._backend.fork, self._read_most, lookahead=1)
        length = self.longest_chain if not config.confidence_threshold else 0
        self._rounds, self._runner = rounds_backend(self._backend, surroundings, length), surroundings.runner

    def can_guess(self, temperature: float) -> bool:
        return self._backend.can_guess(temperature)

    def guess(self, asked: Sequence[Asked]) -> Guesses:
        speakers = [a.speaker for a in asked if a.speaker is not None]
        return self._backend.guess(self._feeds(asked), speakers, max([a.limit for a in asked]), self.least)

    def grow(self, asked: Sequence[Asked]) -> list[Draft]:
        feeds = self._feeds(asked)
        trees = [_Nodes(self._library.reads[a.text.request.id]) for a in asked]

        def speak(growths: list[Growth], pairs: Pairs) -> torch.Tensor:
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
        reads = [self._library.reading(text, CHUNK) for text, _, _ in asked]
        return [self._take(read, len(read.text.waiting)) for read in reads]

    @property
    def most_rounds(self) -> int:
        return 0 if self._rounds is None else self._rounds.most_rounds

    def usual_round(self, num_requests: int) -> int:
        return self.longest_chain if self._rounds is not None and num_requests <= self._rounds.most_requests else 0

    def round_length(self, requests: Sequence[Request]) -> int:
        if not self.usual_round(len(requests)):
            return 0
        texts = [self._texts.get(request.id) for request in requests]
        is_possible = all(text is not None and text.is_ready and text.request.pick is not None for text in texts)
        return self.longest_chain if is_possible else 0

    def fly(self, requests: Sequence[Request], count: int) -> Flown:
        assert self._rounds is not None, "a round has a length"
        length = self.longest_chain
        reads = [self._library.reading(self._texts[request.id], min(CHUNK, length + 1)) for request in requests]
        feeds = [self._take(read, len(read.text.waiting)) for read in reads]
        picks = [(request, request.pick or GREEDY) for request in requests]
        speakers = [Speaker(pick.temperature, pick.seed, len(request.tokens)) for request, pick in picks]
        segments = [Segment([r.tokens[-1], *[0] * length], r.cache, num_logits=length + 1, pick=pick) for r, pick in picks]
        return self._rounds.launch(feeds, speakers, build(segments, self._runner.kv), count)

    def land(self, requests: Sequence[Request], said: Round, number: int) -> list[Draft]:
        """Each round but the first has read what the one before showed."""
        for read in (self._library.reads.get(request.id) for request in requests if number):
            if read is not None:
                read.take(len(read.text.waiting))
        roots = [request.tokens[-1] for request in requests]
        trees = [Tree.chain(root, drafted) for root, drafted in zip(roots, said.tokens, strict=True)]
        return [Draft(tree, self.name, None, (1.0, *paths)) for tree, paths in zip(trees, said.chances, strict=True)]

    def observe(self, seen: Sequence[Seen]) -> None:
        super().observe(seen)
        if len(seen) <= EAGER:
            for one in seen:
                if one.num_known > CHUNK:
                    self._library.reading(self._texts[one.request.id], CHUNK)

    def _take(self, read: Read, count: int) -> Feed:
        start, rows, tokens = read.count, read.take(count), read.tokens
        return Feed(read.place, start, [tokens[row.position + 1] for row in rows], rows)

    def _read_most(self, read: Read) -> None:
        self._backend.read([self._take(read, len(read.text.waiting) - 1)])

    def release(self, request: Request) -> None:
        super().release(request)
        self._library.finish(request.id)
