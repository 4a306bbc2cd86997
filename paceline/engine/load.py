"""The pass of a step as it would be without drafts: what they are weighed against. No tensors."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.costs import CostModel
from paceline.engine.scheduler import Turn


class Load:
    __slots__ = ("by_row", "cached", "price", "rows", "seconds", "speaking")

    def __init__(self, turns: Sequence[Turn], costs: CostModel) -> None:
        rows = speaking = cached = 0
        for turn in turns:
            rows += turn.num_new
            if turn.is_caught_up:
                speaking += 1
                cached += turn.request.cache.num_cached
        self.rows, self.speaking, self.cached = rows, speaking, cached
        # Of the speaking requests alone: what a prompt's chunk takes is not theirs to pay.
        self.seconds = costs.pass_seconds(speaking, cached, cached) if speaking else 0.0
        self.price = self.seconds / speaking if speaking else 0.0  # of a token
        self.by_row = costs.per_row_token * cached / speaking if speaking else 0.0  # what a row sees, on average
