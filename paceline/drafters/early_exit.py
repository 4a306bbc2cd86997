"""The target drafts for itself: its first n layers, then its own norm and head.

It shares the target's KV cache: the prefix is already there, and what drafting writes for the first n layers
the verify pass writes again, the same values, in the same slots. So there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.options import require
from paceline.core.types import Cached, Draft, Request
from paceline.drafters.base import DrafterContext
from paceline.drafters.grow import TreeConfig, grow
from paceline.drafters.reading import ModelDrafter, Reading


@dataclass(frozen=True, slots=True)
class EarlyExitConfig(TreeConfig):
    num_speculative_tokens: int = 2
    num_layers: int | None = None  # None: two thirds of the target's

    def __post_init__(self) -> None:
        TreeConfig.__post_init__(self)
        ok = self.num_layers is None or (isinstance(self.num_layers, int) and self.num_layers >= 1)
        require(ok, "num_layers", self.num_layers, "use a whole number, 1 or more")


class EarlyExit(ModelDrafter):
    name = "early_exit"
    Config = EarlyExitConfig

    def __init__(self, config: EarlyExitConfig, context: DrafterContext) -> None:
        total = context.executor.config.num_layers
        self.config = config
        self.num_layers = config.num_layers or max(1, 2 * total // 3)
        require(self.num_layers < total, "num_layers", self.num_layers, f"the target has {total}; use fewer")
        self.executor = context.executor
        self.vocab_size = context.vocab_size or self.executor.config.vocab_size

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return grow(self, requests, budgets, self.config, self.name)

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Reading]:
        """The request's own blocks, read on from its newest token."""
        views = [
            (r, b, Cached(r.cache.blocks, r.cache.num_cached))
            for r, b in zip(requests, budgets, strict=True)
            if b
        ]
        return [Reading(r, view, r.tokens[view.num_cached :], b) for r, b, view in views]
