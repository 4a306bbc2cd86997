"""Pearson's chi-square test against known probabilities, small cells pooled. torch has the incomplete gamma function it needs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch


def chi_square_p_value(counts: Mapping[Hashable, int], law: Mapping[Hashable, float], smallest: float = 5.0) -> float:
    total = sum(counts.values())
    if any(law.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0  # something impossible happened
    cells = [(counts.get(o, 0), total * mass) for o, mass in law.items()]
    large = [c for c in cells if c[1] >= smallest]
    small = [c for c in cells if c[1] < smallest]
    if small:
        large.append((sum(c[0] for c in small), sum(c[1] for c in small)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in large)
    half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
