"""Prompt lookup: if the last few tokens occurred before, guess that what followed then follows now.

The longest match wins, and of equally long ones the most recent. A match is trusted half as far as it is
long: one or two tokens that occurred before give one drafted token, five in a row give three, unless a
shortest match was asked for, which is then trusted wholly. Every n-gram is indexed as it appears, so a step
costs O(prompt_lookup_max) however long the text is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from paceline.core.options import require
from paceline.core.types import Draft, Needs, Request
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, chain, empty, num_same, within

LONGEST = 128  # tokens that a stage may take back: the longest draft there is
# what followed a match of n tokens follows it again with the chance n / (n + DOUBT): measured for suffix.py
DOUBT = 2.0


@dataclass(frozen=True, slots=True)
class NgramConfig(DrafterConfig):
    num_speculative_tokens: int = within(1, 128, 3)
    # longest match looked for; None: twice the tokens drafted
    prompt_lookup_max: int | None = within(1, 64, None)
    prompt_lookup_min: int | None = None  # shortest match trusted; None: 1, drafts half as long as it

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        low, remedy = self.shortest, f"use a whole number from 1 to prompt_lookup_max ({self.longest})"
        require(type(low) is int and 1 <= low <= self.longest, "prompt_lookup_min", low, remedy)

    @property
    def longest(self) -> int:
        asked = self.prompt_lookup_max
        return min(2 * self.num_speculative_tokens, 64) if asked is None else asked

    @property
    def shortest(self) -> int:
        return 1 if self.prompt_lookup_min is None else self.prompt_lookup_min


class _Index:
    """Where each n-gram of one request last ended, for every n from `low` to `high`.

    A stage shows its drafter guesses as text and takes them back, at most LONGEST of them: what they
    overwrote is kept that long."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it
        self.text: list[int] = []  # that was indexed, and what each of its last tokens replaced
        self.replaced: deque[list[tuple[tuple[int, ...], int | None]]] = deque(maxlen=LONGEST)

    def extend(self, tokens: Sequence[int]) -> None:
        """Index n-grams that have a follower: all but the one that ends the text. What was indexed beyond the
        text as it is now is forgotten."""
        start = max(len(self.text) - LONGEST, 0)
        now, before = tokens[start : len(self.text)], self.text[start:]
        if now != before:
            same = start + num_same(now, before)
            for _ in range(max(same, 1), len(self.text)):
                for gram, place in self.replaced.pop():
                    if place is None:
                        del self.ends[gram]
                    else:
                        self.ends[gram] = place
            del self.text[same:]
        for end in range(max(len(self.text), 1), len(tokens)):
            grams = [tuple(tokens[end - n : end]) for n in range(self.low, min(self.high, end) + 1)]
            if end >= len(tokens) - LONGEST:
                self.replaced.append([(gram, self.ends.get(gram)) for gram in grams])
            self.ends.update(dict.fromkeys(grams, end))
        self.text += tokens[len(self.text) :]

    def follower(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Where the longest match goes on, and how long it is."""
        for n in range(min(self.high, len(tokens) - 1), self.low - 1, -1):
            found = self.ends.get(tuple(tokens[-n:]))
            if found is not None:
                return found, n
        return None


class Ngram(Drafter):
    name = "ngram"
    needs = Needs(verdicts=False)
    is_free = can_rewind = True
    Config = NgramConfig

    def __init__(self, config: NgramConfig, context: DrafterContext | None = None) -> None:
        super().__init__(config)
        self._indexes: dict[str, _Index] = {}

    def draft(self, request: Request, budget: int) -> Draft:
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = _Index(self.config.shortest, self.config.longest)
        index.extend(request.tokens)
        found = index.follower(request.tokens)
        if found is None:
            return empty(request, self.name)
        start, match = found
        trusted = (match + 1) // 2 if self.config.prompt_lookup_min is None else budget
        length = min(budget, trusted, self.config.num_speculative_tokens)
        # a match that overlaps the end repeats: read on from the draft itself
        period = request.num_tokens - start
        tokens = [request.tokens[start + i % period] for i in range(length)]
        chances = accumulate(((match + i) / (match + i + DOUBT) for i in range(length)), mul)
        return chain(request, tokens, self.name, chances=tuple(chances))

    def release(self, request: Request) -> None:
        self._indexes.pop(request.id, None)
