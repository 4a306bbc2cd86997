"""What drafts would gain, worked out from what passes, drafters and the host cost and what was guessed. No
clock and no tensors.

The formulas are those of engine/costs.py: E[tokens a step] by the acceptance at each depth, over the cost of
the draft and of the pass that checks it. Invariant: with K = 0 the prediction is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

from paceline.engine import costs
from paceline.engine.costs import CostModel
from paceline.measure.tuning.guesses import Account, Step


class Prices(NamedTuple):
    """Seconds."""

    target: CostModel
    host: float  # of a step beside its pass
    asking: float  # a drafter; one that runs a model, for each token
    # in each step: showing it what the pass said, and what the pass takes longer for its being there
    beside: float
    catching_up: float  # of it, where all of its tokens were right: the last one it has not read itself
    is_free: bool

    def plain(self, num_cached: int) -> float:
        return self.target.pass_seconds(1, num_cached, num_cached) + self.host

    def checking(self, step: Step) -> float:
        rows = 1 + step.num_drafted
        return (
            self.target.pass_seconds(rows, step.num_cached, rows * step.num_cached) + self.host + self.beside
        )

    def drafting(self, step: Step) -> float:
        catching_up = self.catching_up if 0 < step.num_drafted == step.num_right else 0.0
        return self.asking * (1 if self.is_free else step.num_drafted) + catching_up


class Prediction(NamedTuple):
    k: int
    speedup: float
    tau: float  # tokens a step
    num_drafted: float  # tokens drafted a step
    draft_cost: float  # of each of the k tokens, relative to a plain step
    verify_cost: float  # relative to a plain step


def predict(accounts: Sequence[Account], k: int, prices: Prices) -> Prediction:
    steps = [step for account in accounts for step in account.steps(k)]
    if k == 0 or not steps:
        return Prediction(k, 1.0, 1.0, 0.0, 0.0, 1.0)
    plain = mean(prices.plain(step.num_cached) for step in steps)
    draft_cost = mean(prices.drafting(step) for step in steps) / plain / k
    verify_cost = mean(prices.checking(step) for step in steps) / plain
    alphas = _alphas(steps, k)
    gain = costs.speedup(alphas, k, draft_cost, verify_cost)
    return Prediction(
        k,
        gain,
        costs.expected_tokens(alphas, k),
        mean(step.num_drafted for step in steps),
        draft_cost,
        verify_cost,
    )


def _alphas(steps: Sequence[Step], k: int) -> list[float]:
    """The chance of a step to get one token further, where nothing was drafted too."""
    reached = [sum(step.num_right >= depth for step in steps) for depth in range(k + 1)]
    return [further / so_far if so_far else 0.0 for so_far, further in pairwise(reached)]
