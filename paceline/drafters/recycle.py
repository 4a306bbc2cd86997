"""Token recycling: the target's likeliest tokens after a token, when it last stood somewhere, are guesses for
what follows it now.

A table of eight successors for each token of the vocabulary is filled from every verified node, the rejected
ones too, and drafts are trees grown from it, the best chance first. Chances come from how often each rank was
right, and each token's first successor. Invariant: the table never grows, and a step costs O(nodes drafted).
All requests share it: a guess that came from another request's text is checked like any other, so it can
change how many tokens are accepted at once and never which.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from paceline.core.types import Draft, Needs, Request, Seen
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, tree_draft, within

WIDTH = 8
# how often each rank was the target's choice, to start with: as measured
RANKS = (0.31, 0.10, 0.057, 0.033, 0.028, 0.019, 0.013, 0.009)
RATE = 1 / 512  # how fast that follows what is seen
FAITH = 8.0  # sightings after which a token's own record weighs as much as the ranks'
MEMORY = 64  # sightings of a token after which older ones count half
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class RecycleConfig(DrafterConfig):
    num_speculative_tokens: int = within(1, 128, 8)
    tree: bool = True  # false: only the likeliest successor of each token, as a chain
    min_token_prob: float = within(0.0, 1.0, 0.1)  # draft nothing with a smaller chance of being accepted


class Recycle(Drafter):
    name = "recycle"
    is_free = can_rewind = True
    Config = RecycleConfig

    def __init__(self, config: RecycleConfig, context: DrafterContext) -> None:
        super().__init__(config)
        vocab_size = context.executor.config.vocab_size
        self.needs = Needs(top_tokens=min(WIDTH, vocab_size))
        context.executor.warm_up(self.needs.top_tokens)
        self._width = self.needs.top_tokens if config.tree else 1
        self._ranks = list(RANKS[: self.needs.top_tokens])
        self._successors = np.full((vocab_size, self.needs.top_tokens), UNKNOWN, np.int32)
        # of a token's first successor
        self._right, self._times = (array("f", bytes(4 * vocab_size)) for _ in range(2))

    @property
    def num_bytes(self) -> int:
        return self._successors.nbytes + 8 * len(self._times)

    def draft(self, request: Request, budget: int) -> Draft:
        tokens, parents, chances = [request.tokens[-1]], [-1], [1.0]
        waiting: list[tuple[float, int, int]] = []  # (-chance, parent, token): a heap
        self._open(waiting, tokens[0], 0, 1.0)
        limit = min(budget, self.config.num_speculative_tokens)
        while waiting and len(tokens) <= limit:
            chance, parent, token = heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            chances.append(-chance)
            self._open(waiting, token, len(tokens) - 1, -chance)
        return tree_draft(request, tokens, parents, chances, self.name)

    def _open(self, waiting: list[tuple[float, int, int]], token: int, node: int, reach: float) -> None:
        """Add what may follow a drafted node."""
        successors = self._successors[token, : self._width].tolist()
        if successors[0] == UNKNOWN:
            return
        # how likely each of the successors is, best first
        first = (self._right[token] + FAITH * self._ranks[0]) / (self._times[token] + FAITH)
        rest = (1 - first) / (1 - self._ranks[0])
        chances = [first, *(rest * rank for rank in self._ranks[1:])]
        for successor, chance in zip(successors, chances, strict=False):
            if reach * chance < self.config.min_token_prob:
                return
            heappush(waiting, (-reach * chance, node, successor))

    def observe(self, seen: Sequence[Seen]) -> None:
        for one in seen:
            if one.draft is None or one.verdict is None or one.top is None:
                continue
            tokens = one.draft.tree.tokens
            for node, chosen in zip(one.verdict.path, one.verdict.tokens, strict=True):
                self._compare(tokens[node], chosen)
            self._successors[list(tokens)] = one.top.cpu().numpy()

    def _compare(self, token: int, chosen: int) -> None:
        """Compare what the table says follows a token with what did."""
        successors = self._successors[token].tolist()
        if successors[0] == UNKNOWN:
            return
        self._right[token] += successors[0] == chosen
        self._times[token] += 1
        if self._times[token] > MEMORY:
            self._right[token] /= 2
            self._times[token] /= 2
        for rank, successor in enumerate(successors):
            self._ranks[rank] += RATE * ((successor == chosen) - self._ranks[rank])
