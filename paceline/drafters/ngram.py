"""Prompt lookup: if the last few tokens occurred before, guess that what followed then follows now.

The longest match wins, and of equally long ones the most recent. A match is trusted half as far as it is
long: one or two tokens that occurred before give one drafted token, five in a row give three, unless a
shortest match was asked for, which is then trusted wholly. Every n-gram is indexed as it appears, so a step
costs O(prompt_lookup_max) however long the text is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from paceline.core.options import require
from paceline.core.types import Draft, Needs, Request
from paceline.drafters.base import (
    Drafter,
    DrafterConfig,
    DrafterContext,
    chain,
    check_whole,
    empty,
    propose_each,
)

LONGEST = 128  # tokens that a stage may take back: the longest draft there is
# what followed a match of n tokens follows it again with the chance n / (n + DOUBT), as measured for
# suffix.py
DOUBT = 2.0


@dataclass(frozen=True, slots=True)
class NgramConfig(DrafterConfig):
    num_speculative_tokens: int = 3
    prompt_lookup_max: int | None = None  # longest match looked for; None: twice the tokens drafted
    prompt_lookup_min: int | None = (
        None  # shortest match trusted; None: 1, and drafts half as long as their match
    )

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        if self.prompt_lookup_max is not None:
            check_whole(self, "prompt_lookup_max", 1, 64)
        low, remedy = self.shortest, f"use a whole number from 1 to prompt_lookup_max ({self.longest})"
        require(type(low) is int and 1 <= low <= self.longest, "prompt_lookup_min", low, remedy)

    @property
    def longest(self) -> int:
        asked = self.prompt_lookup_max
        return min(2 * self.num_speculative_tokens, 64) if asked is None else asked

    @property
    def shortest(self) -> int:
        return 1 if self.prompt_lookup_min is None else self.prompt_lookup_min

    def trusted(self, match: int) -> int:
        """How many tokens to draft after a match of so many."""
        most = self.num_speculative_tokens
        return min((match + 1) // 2, most) if self.prompt_lookup_min is None else most


@dataclass(slots=True)
class _Index:
    """Where each n-gram of one request last ended, for every n asked for.

    A stage shows its drafter guesses as text and takes them back, at most LONGEST of them: what they
    overwrote is kept that long.
    """

    # n-gram -> index of the token that followed it
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0
    tail: list[int] = field(default_factory=list)  # the last LONGEST tokens that were indexed
    replaced: deque[list[tuple[tuple[int, ...], int | None]]] = field(
        default_factory=lambda: deque(maxlen=LONGEST)
    )  # for each of them

    def extend(self, tokens: Sequence[int], low: int, high: int) -> None:
        """Index n-grams that have a follower: all but the one that ends the text."""
        self._take_back(tokens)
        for end in range(max(self.num_indexed, 1), len(tokens)):
            grams = [tuple(tokens[end - n : end]) for n in range(low, min(high, end) + 1)]
            if end >= len(tokens) - LONGEST:
                self.replaced.append([(gram, self.ends.get(gram)) for gram in grams])
            for gram in grams:
                self.ends[gram] = end
        self.tail += tokens[max(self.num_indexed, len(tokens) - LONGEST) :]
        del self.tail[:-LONGEST]
        self.num_indexed = len(tokens)

    def _take_back(self, tokens: Sequence[int]) -> None:
        """Forget what was indexed beyond the text as it is now."""
        start = self.num_indexed - len(self.tail)
        now = tokens[start : self.num_indexed]
        if now == self.tail:
            return
        same = start + next(
            (i for i, (a, b) in enumerate(zip(now, self.tail, strict=False)) if a != b), len(now)
        )
        for _ in range(max(same, 1), self.num_indexed):
            for gram, end in self.replaced.pop():
                if end is None:
                    del self.ends[gram]
                else:
                    self.ends[gram] = end
        del self.tail[same - start :]
        self.num_indexed = same

    def follower(self, tokens: Sequence[int], low: int, high: int) -> tuple[int, int] | None:
        """Where the longest match goes on, and how long it is."""
        for n in range(min(high, len(tokens) - 1), low - 1, -1):
            found = self.ends.get(tuple(tokens[-n:]))
            if found is not None:
                return found, n
        return None


class Ngram(Drafter):
    name = "ngram"
    needs = Needs(verdicts=False)
    is_free = True
    can_rewind = True
    Config = NgramConfig

    def __init__(self, config: NgramConfig, context: DrafterContext | None = None) -> None:
        self.config = config
        self._low, self._high = config.shortest, config.longest
        self._indexes: dict[str, _Index] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return propose_each(self, self._draft, requests, budgets)

    def _draft(self, request: Request, budget: int) -> Draft:
        low, high = self._low, self._high
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = _Index()
        index.extend(request.tokens, low, high)
        found = index.follower(request.tokens, low, high)
        if found is None:
            return empty(request, self.name)
        start, match = found
        # a match that overlaps the end repeats: read on from the draft itself
        period = request.num_tokens - start
        length = min(budget, self.config.trusted(match))
        tokens = [request.tokens[start + i % period] for i in range(length)]
        chances = accumulate(((match + i) / (match + i + DOUBT) for i in range(length)), mul)
        return chain(request, tokens, self.name, chances=tuple(chances))

    def release(self, request: Request) -> None:
        self._indexes.pop(request.id, None)
