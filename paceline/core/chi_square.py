"""Pearson's chi-square test against known probabilities: how `paceline verify` and the tests judge unseeded
sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

Outcome = TypeVar("Outcome")
SMALLEST_CELL = 5.0  # expected counts below it are pooled: the test is not to be trusted on them


def chi_square_p_value(counts: Mapping[Outcome, int], exact: Mapping[Outcome, float]) -> float:
    """How often a faithful sampler would be at least this far off. 0 if something impossible happened."""
    total = sum(counts.values())
    if any(exact.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    cells = [(counts.get(outcome, 0), total * mass) for outcome, mass in exact.items()]
    large = [cell for cell in cells if cell[1] >= SMALLEST_CELL]
    small = [cell for cell in cells if cell[1] < SMALLEST_CELL]
    if small:
        large.append((sum(seen for seen, _ in small), sum(expected for _, expected in small)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in large)
    freedom, half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half))
