"""The pass of a step as it would be without drafts: what they are weighed against. No tensors."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.costs import CostModel
from paceline.engine.scheduler import Turn

DEAR = 0.25  # of a pass: where eight rows more cost so much, the better of two drafts is checked and not both


class Load:
    __slots__ = ("_costs", "by_row", "cached", "price", "rows", "seconds", "speaking")

    def __init__(self, turns: Sequence[Turn], costs: CostModel) -> None:
        self._costs, rows, speaking, cached = costs, 0, 0, 0
        for turn in turns:
            rows += turn.num_new
            if turn.is_caught_up:
                speaking += 1
                cached += turn.request.cache.num_cached
        self.rows, self.speaking, self.cached = rows, speaking, cached
        # Of the speaking requests alone: what a prompt's chunk takes is not theirs to pay.
        self.seconds = costs.pass_seconds(speaking, cached, cached) if speaking else 0.0
        self.price = self.seconds / speaking if speaking else 0.0  # of a token
        self.by_row = (
            costs.per_row_token * cached / speaking if speaking else 0.0
        )  # what a row sees, on average

    def added_by(self, count: int, each: float) -> list[float]:
        """Seconds that 1, 2, ... nodes add to the pass, with so many more for each."""
        base = self._costs.base(self.rows + count)
        start = base[self.rows]
        return [base[self.rows + n] - start + n * each for n in range(1, count + 1)]

    def row_seconds(self, num_nodes: int) -> float:
        """Of one row more, on average over so many."""
        count = max(num_nodes, 1)
        base = self._costs.base(self.rows + count)
        return (base[self.rows + count] - base[self.rows]) / count + self.by_row

    def has_dear_rows(self) -> bool:
        base = self._costs.base(self.rows + 8)
        return base[self.rows + 8] > (1 + DEAR) * base[self.rows]
