"""The weigher: what a drafted node is worth, and how many nodes to check. Called by the policy, and compiled
into CPU bursts.

A drafter *claims* for each node the probability that it is accepted given that its parent is. Claims are
calibrated in cells (by depth, claimed probability and agreement with another drafter); a node's score is the
calibrated probability of its whole path. Invariant: plain loops over numbers and sequences, so that numba
compiles the same source: there is one weigher.
"""

from __future__ import annotations

from collections.abc import Sequence

BINS = 12  # of claimed probabilities
DEPTHS = 3  # told apart: 1, 2, and all deeper ones
# no other drafter says anything here, another says the same, another says otherwise
ALONE, AGREED, CONTRADICTED = (0, 1, 2)
NUM_CELLS = BINS * DEPTHS * 3
SURE = 0.995  # no node is believed more
MARGIN = 1.005  # a draft must be expected to give this many times the tokens a second of none


def cell_of(depth: int, claim: float, agreement: int) -> int:
    """depth: 1 for the root's children."""
    return BINS * (min(depth, DEPTHS) - 1 + DEPTHS * agreement) + int(claim * (BINS - 0.001))


def acceptance(claim: float, seen: float, factor: float) -> float:
    """The probability that a node is accepted if its parent is. seen: the calibrated rate of its cell, below
    0 if there is none yet and the claim is taken at its word; factor: how much better than others this
    request goes, above 1 applied to the odds, so that likely does not become certain."""
    rate = seen if seen >= 0.0 else claim
    better = rate * factor
    if factor > 1.0:
        better /= 1.0 - rate + better
    return min(better, SURE)


def best_count(
    scores: Sequence[float], num: int, tokens: float, seconds: float, added: Sequence[float]
) -> tuple[int, float]:
    """How many of the first `num` nodes to check so that tokens a second are most, and the tokens they add.

    scores: by node, best first. Without any, a pass gives `tokens` in `seconds`; added[n]: seconds that n
    nodes add. Costs have steps, so every count is looked at."""
    best, gained, total = 0, 0.0, 0.0
    rate = MARGIN * tokens / seconds
    for node in range(num):
        total += scores[node]
        here = (tokens + total) / (seconds + added[node + 1])
        if here > rate:
            best, gained, rate = node + 1, total, here
    return best, gained
