"""The target drafts for itself: its first n layers, then its own norm and head.

It shares the target's KV cache: the prefix is already there, and what drafting writes for the first n layers the verify
pass writes again, the same values, in the same slots. So there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import require
from paceline.proposers.base import DrafterConfig, Surroundings
from paceline.proposers.chains import Chain, drafts_of, grow
from paceline.types import Cached, Draft, Needs, Request, Seen


@dataclass(frozen=True, slots=True)
class EarlyExitConfig(DrafterConfig):
    num_speculative_tokens: int = 2
    num_layers: int | None = None  # None: two thirds of the target's

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        ok = self.num_layers is None or (isinstance(self.num_layers, int) and self.num_layers >= 1)
        require(ok, "num_layers", self.num_layers, "use a whole number, 1 or more")


class EarlyExit:
    name = "early_exit"
    needs = Needs()
    is_free = False
    Config = EarlyExitConfig

    def __init__(self, config: EarlyExitConfig, surroundings: Surroundings) -> None:
        total = surroundings.runner.config.num_layers
        self.config = config
        self.num_layers = config.num_layers or max(1, 2 * total // 3)
        require(self.num_layers < total, "num_layers", self.num_layers, f"the target has {total}; use fewer")
        self.runner = surroundings.runner

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        chains = [self._start(r, b) for r, b in zip(requests, budgets, strict=True) if b]
        grow(self.runner, chains, self.runner.config.vocab_size, self.num_layers)
        return drafts_of(chains, requests, self.name)

    def _start(self, request: Request, budget: int) -> Chain:
        view = Cached(request.cache.blocks, request.cache.num_cached)  # the request's own blocks, read on from its newest token
        return Chain(request, view, budget, request.tokens[view.num_cached :])

    def observe(self, seen: Sequence[Seen]) -> None:
        """Nothing is kept between rounds."""

    def release(self, request: Request) -> None:
        """Nothing is kept for a request."""
