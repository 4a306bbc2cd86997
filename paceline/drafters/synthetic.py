"""Drafts that are right as often as is asked, so that any model can be measured at any acceptance: for
benchmarks, and refused by the server.

A prompt's answer is remembered when it has been given; when the prompt comes again its tokens are drafted,
each right with the asked chance if all before it were. Drafting takes no time here: a real drafter's must be
added. Invariant: a draft is checked like any other, so no text changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from paceline.core.noise import Purpose, uniform
from paceline.core.options import require
from paceline.core.types import Draft, Needs, Request
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, chain, empty

MOST_KNOWN = 4096  # answers


@dataclass(frozen=True, slots=True)
class SyntheticConfig(DrafterConfig):
    # the chance that a drafted token is right, by its place in the draft; further ones have the last
    acceptance: Sequence[float] = (0.8,)

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        given, remedy = self.acceptance, "give a list of numbers from 0 to 1, such as [0.8, 0.7]"
        is_list = isinstance(given, (list, tuple)) and len(given) > 0
        is_right = is_list and all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in given)
        require(is_right, "acceptance", given, remedy)


class Synthetic(Drafter):
    name = "synthetic"
    needs = Needs(verdicts=False)
    is_free = True
    Config = SyntheticConfig

    def __init__(self, config: SyntheticConfig, context: DrafterContext) -> None:
        super().__init__(config)
        self._vocab_size = context.vocab_size or context.executor.config.vocab_size
        self._known: dict[tuple[int, ...], list[int]] = {}  # by prompt: with its answer, the newest last
        self._live: dict[
            str, tuple[list[int], int]
        ] = {}  # by request: what is known, and the seed of its coins
        most, rates = config.num_speculative_tokens, list(config.acceptance)
        self._rates = np.array((rates + rates[-1:] * most)[:most], np.float64)
        self._chances = tuple(accumulate(self._rates.tolist(), mul))

    def draft(self, request: Request, budget: int) -> Draft:
        if request.id not in self._live:
            prompt = tuple(request.tokens[: request.num_prompt])
            self._live[request.id] = self._known.get(prompt, []), hash(prompt) & (2**64 - 1)
        (known, seed), place = self._live[request.id], len(request.tokens)
        text = known[place : place + min(budget, len(self._rates))]
        if not text:
            return empty(request, self.name)
        coins = uniform(seed, place, Purpose.DRAFT, np.arange(len(text)))
        is_right = (coins < self._rates[: len(text)]).tolist()
        tokens = [t if right else (t + 1) % self._vocab_size for t, right in zip(text, is_right, strict=True)]
        return chain(request, tokens, self.name, chances=self._chances[: len(text)])

    def release(self, request: Request) -> None:
        self._live.pop(request.id, None)
        prompt, tokens = tuple(request.tokens[: request.num_prompt]), request.tokens
        before = self._known.pop(prompt, [])
        self._known[prompt] = before if len(before) > len(tokens) else list(tokens)
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
