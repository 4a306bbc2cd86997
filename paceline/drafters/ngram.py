"""Prompt lookup: if the last few tokens occurred before, guess that what followed then follows now.

The longest match wins, and of equally long ones the most recent. A match is trusted half as far as it is
long: one or two tokens that occurred before give one drafted token, five in a row give three, unless a
shortest match was asked for, which is then trusted wholly. A kernel reads the text (cpu/lookup.py), so the
compiled burst drafts by itself. Invariant: nothing is kept but the text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from paceline.core.options import require
from paceline.core.types import Draft, Needs, Request
from paceline.cpu import lookup
from paceline.cpu.compile import entry_of, numbers
from paceline.cpu.recycle import address
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, chain, num_same, within
from paceline.heads.rows import Matcher

LONGEST = 128  # tokens that a stage may take back: the longest draft there is
ROOM = 4096  # tokens that a text has room for beyond those it holds: more than a burst emits


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


class Ngram(Drafter):
    name = "ngram"
    needs = Needs(verdicts=False)
    is_free = can_rewind = True
    Config = NgramConfig

    def __init__(self, config: NgramConfig, context: DrafterContext | None = None) -> None:
        super().__init__(config)
        self._texts: dict[str, tuple[np.ndarray, array[int]]] = {}  # by request, with its lookup.Lookup
        size = config.num_speculative_tokens + 1
        self._drafted, self._reach = np.zeros(size, np.int64), np.zeros(size)
        self._entry = entry_of(lookup.draft, 6)

    def draft(self, request: Request, budget: int) -> Draft:
        size = lookup.draft(self._read(request), 0, 0, 0, min(budget, self.config.num_speculative_tokens), 0)
        tokens, chances = self._drafted[1:size].tolist(), self._reach[1:size].tolist()
        return chain(request, tokens, self.name, chances=tuple(chances))

    def matcher(self, request: Request) -> Matcher:
        written = address(self._drafted), address(self._reach)
        return Matcher(self._entry, self._read(request), 0, 0, *written, self.config.num_speculative_tokens)

    def _read(self, request: Request) -> int:
        """Take over what has changed of the text: the address of its Lookup."""
        tokens, known = request.tokens, self._texts.get(request.id)
        text, header = known or (np.zeros(0, np.int32), array("q", [0]))
        num, start = header[0], max(header[0] - LONGEST, 0)
        same = start + num_same(tokens[start:num], text[start:num].tolist())
        if len(tokens) + ROOM > len(text):
            text, before = np.zeros(2 * (len(tokens) + ROOM), np.int32), text
            text[:same] = before[:same]
            trusted = self.config.prompt_lookup_min is not None
            sizes = len(text), self.config.shortest, self.config.longest, trusted
            places = address(self._drafted), address(self._reach)
            header = numbers(lookup.Lookup(0, address(text), *sizes, *places))
            self._texts[request.id] = text, header
        text[same : len(tokens)], header[0] = tokens[same:], len(tokens)
        return header.buffer_info()[0]

    def release(self, request: Request) -> None:
        self._texts.pop(request.id, None)
