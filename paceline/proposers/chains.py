"""Grows one chain per request with a model: the loop that draft models, quantized models and early exit share.

Invariant: requests are only read. A grammar is advanced along the guesses and rolled back before returning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.errors import GrammarError
from paceline.proposers.base import fit_vocabulary
from paceline.runtime.runner import Runner
from paceline.types import Cached, Request, Segment
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
            for chain, row in zip(growing, logits, strict=True):
                chain.cache.num_cached += len(chain.pending)
                _extend(chain, row)
    finally:
        for chain in chains:
            if chain.num_advanced and chain.request.constraint is not None:
                chain.request.constraint.rollback(chain.num_advanced)


def _extend(chain: Chain, logits: torch.Tensor) -> None:
    try:
        token, q = guess(chain.request, chain.tokens, logits)
    except GrammarError:  # the drafter's vocabulary holds nothing the request allows here; the target's may
        chain.budget = len(chain.tokens)
        return
    chain.tokens.append(token)
    chain.q.append(q)
    chain.pending = [token]
    constraint = chain.request.constraint
    if constraint is not None and token not in chain.request.stop_ids:
        constraint.advance(token)
        chain.num_advanced += 1
