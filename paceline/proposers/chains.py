"""Grows one chain per request with a model: the loop that draft models, quantized models and early exit share.

Invariant: requests are only read. A grammar is advanced along the guesses and rolled back before returning.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from paceline.errors import GrammarError
from paceline.proposers.base import chain, empty, fit_vocabulary
from paceline.runtime.runner import Runner
from paceline.types import Cached, Draft, Request, Segment
from paceline.verify.sampling import guess


@dataclass(slots=True)
class Chain:
    """One request's chain while it grows."""

    request: Request
    cache: Cached  # the drafting model's view; its num_cached moves on as tokens are fed
    budget: int
    pending: list[int]  # tokens to feed next
    tokens: list[int] = field(default_factory=list)
    q: list[torch.Tensor | None] = field(default_factory=list)
    num_advanced: int = 0

    @property
    def is_growing(self) -> bool:
        return len(self.tokens) < self.budget and not (self.tokens and self.tokens[-1] in self.request.stop_ids)


def grow(runner: Runner, chains: Sequence[Chain], vocab_size: int, num_layers: int | None = None) -> None:
    """Draft until every chain has spent its budget or guessed an end. Slots must have been reserved."""
    try:
        while growing := [c for c in chains if c.is_growing]:
            segments = [Segment(c.pending, c.cache) for c in growing]
            logits = fit_vocabulary(runner.forward(segments, num_layers=num_layers).logits, vocab_size)
            for c, row in zip(growing, logits, strict=True):
                c.cache.num_cached += len(c.pending)
                _extend(c, row)
    finally:
        for c in chains:
            if c.num_advanced and c.request.constraint is not None:
                with suppress(GrammarError):  # a broken grammar fails its request when the target reads it
                    c.request.constraint.rollback(c.num_advanced)


def _extend(c: Chain, logits: torch.Tensor) -> None:
    constraint = c.request.constraint
    try:
        token, q = guess(c.request, c.tokens, logits)
        if constraint is not None and token not in c.request.stop_ids:
            constraint.advance(token)
            c.num_advanced += 1
    except GrammarError:  # the drafter has nothing to say that the request allows; the target may
        c.budget = len(c.tokens)
        return
    c.tokens.append(token)
    c.q.append(q)
    c.pending = [token]


def drafts_of(chains: Sequence[Chain], requests: Sequence[Request], source: str) -> list[Draft]:
    """A draft for each request, empty for those without a chain."""
    grown = {id(c.request): c for c in chains}
    return [chain(r, c.tokens, source, c.q) if (c := grown.get(id(r))) else empty(r, source) for r in requests]
