"""The formulas of speculative decoding.

α is the probability that a drafted token is accepted given that all before it were: one number for every
depth, or a sequence with one for each. Costs are relative to a pass of the target over one token:
`draft_cost` of drafting one token, `verify_cost` of the pass that checks the draft. Invariant: drafting
nothing gains exactly 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Alpha = float | Sequence[float]
PRECISION = 1e-9  # of a break-even α


def expected_tokens(alpha: Alpha, k: int) -> float:
    """Tokens a pass gives on average when it checks a chain of k, the target's own included: (1 - α^(k+1)) /
    (1 - α) for one α."""
    total, survival = 1.0, 1.0
    for depth in range(k):
        if isinstance(alpha, (int, float)):
            survival *= alpha
        else:
            survival *= alpha[depth] if depth < len(alpha) else 0.0
        total += survival
    return total


def speedup(alpha: Alpha, k: int, draft_cost: float, verify_cost: float) -> float:
    """Over plain decoding: tokens a step gives, over what the step costs."""
    return expected_tokens(alpha, k) / (k * draft_cost + verify_cost)


def best_k(alpha: Alpha, draft_cost: float, verify_cost: Callable[[int], float], most: int) -> int:
    """The length of draft that gains most, 0 if none gains; the shortest of equally good ones. verify_cost:
    of a pass over n tokens."""
    gains = [speedup(alpha, k, draft_cost, verify_cost(k + 1)) for k in range(most + 1)]
    return max(range(most + 1), key=lambda k: (gains[k], -k))


def break_even_alpha(k: int, draft_cost: float, verify_cost: float) -> float | None:
    """The α from which drafting k tokens pays; None where even perfect drafts cost more than they give."""
    if speedup(1.0, k, draft_cost, verify_cost) < 1:
        return None
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, k, draft_cost, verify_cost) >= 1 else (middle, high)
    return high
