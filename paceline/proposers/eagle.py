"""EAGLE: a head of one layer drafts from the target's hidden states, token by token, then on from its own output.

The pair (hidden state of position t, token of position t + 1) is one row of the head. Rows of the text are read with true features; what
the head guesses lies behind them and is overwritten in the next round, so nothing has to be rolled back.
With a width the draft is EAGLE-2's tree: the best paths by the product of the head's probabilities.
Several rounds of draft and check may follow each other without the host: what the head read in them counts when they land.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.models.head_rows import Feed, Guesses, Node, Orders, Row, Speaker
from paceline.proposers.base import Surroundings
from paceline.proposers.features import Library, Read
from paceline.proposers.grow import Growth
from paceline.proposers.head_backends import chain_backend, rounds_backend
from paceline.proposers.heads import GREEDY, Asked, HeadDrafter, HeadDrafterConfig, Pairs
from paceline.proposers.suffix import Suffix
from paceline.runtime.batch import build
from paceline.types import Course, Draft, Flown, Proposer, Request, Round, Seen, Segment
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
        """Where drafts are weighed one by one in rounds, as in steps, they are nothing to be decided about."""
        if self._rounds is None or self._rounds.is_asking or num_requests > self._rounds.most_requests:
            return 0
        return self.longest_chain

    def round_length(self, requests: Sequence[Request], most: int) -> int:
        rounds, length = self._rounds, self.longest_chain
        if rounds is None or len(requests) > rounds.most_requests or (most < length and not rounds.is_asking):
            return 0
        texts, picks = [self._texts.get(request.id) for request in requests], [request.pick for request in requests]
        is_possible = all(text is not None and text.is_ready for text in texts)
        is_possible = is_possible and all(pick is not None and rounds.can_fly(pick.temperature) for pick in picks)
        return min(most, length) if is_possible else 0

    @property
    def is_weighing(self) -> bool:
        return self._rounds is not None and self._rounds.is_asking

    def asks_beside(self, other: Proposer) -> bool:
        return self.is_weighing and isinstance(other, Suffix)

    def fly(self, requests: Sequence[Request], count: int, length: int, course: Course | None, other: Proposer | None) -> Flown:
        assert self._rounds is not None, "a round has a length"
        reads = [self._library.reading(self._texts[request.id], min(CHUNK, length + 1)) for request in requests]
        feeds = [self._feed(read, list(read.text.waiting)) for read in reads]
        picks = [(request, request.pick or GREEDY) for request in requests]
        speakers = [Speaker(pick.temperature, pick.seed, len(request.tokens)) for request, pick in picks]
        segments = [Segment([r.tokens[-1], *[0] * length], r.cache, num_logits=length + 1, pick=pick) for r, pick in picks]
        first = requests[0]
        matcher = other.matcher(first) if isinstance(other, Suffix) else None
        orders = Orders(course, matcher, self.least, tuple(first.stop_ids), first.params.max_tokens - first.num_output)
        return self._rounds.launch(feeds, speakers, build(segments, self._runner.kv), count, orders)

    def land(self, requests: Sequence[Request], said: Round, number: int) -> list[Draft]:
        """What the head has read in a round counts now: all that was shown before, unless it says otherwise."""
        asides = said.asides
        for read in (self._library.reads.get(request.id) for request in requests):
            if read is not None:
                read.take(len(read.text.waiting) if asides is None else asides.num_read)
        roots, source = [request.tokens[-1] for request in requests], Suffix.name if asides is not None and asides.is_other else self.name
        trees = [Tree.chain(root, drafted) for root, drafted in zip(roots, said.tokens, strict=True)]
        return [Draft(tree, source, None, (1.0, *paths)) for tree, paths in zip(trees, said.chances, strict=True)]

    def observe(self, seen: Sequence[Seen]) -> None:
        super().observe(seen)
        if len(seen) <= EAGER:
            for one in seen:
                if one.num_known > CHUNK:
                    self._library.reading(self._texts[one.request.id], CHUNK)

    def _take(self, read: Read, count: int) -> Feed:
        start, rows = read.count, read.take(count)
        return self._feed(read, rows)._replace(start=start)

    def _feed(self, read: Read, rows: list[Row]) -> Feed:
        return Feed(read.place, read.count, [read.tokens[row.position + 1] for row in rows], rows)

    def _read_most(self, read: Read) -> None:
        self._backend.read([self._take(read, len(read.text.waiting) - 1)])

    def release(self, request: Request) -> None:
        super().release(request)
        self._library.finish(request.id)
