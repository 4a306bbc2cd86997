"""Exact enumeration: runs a random program once for every combination of its chances and adds up the
probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from paceline.core.noise import Noise, Purpose


@dataclass
class Scripted:
    """Stands where Noise stands; takes the branches it is told to and reports those it did not take."""

    script: tuple[int, ...]
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    open: list[tuple[int, ...]] = field(default_factory=list)

    def _branch(self, weights: list[float]) -> int:
        options = [i for i, w in enumerate(weights) if w > 0]
        index = len(self.taken)
        if index < len(self.script):
            choice = self.script[index]
        else:
            choice = options[0]
            self.open.extend((*self.taken, other) for other in options[1:])
        self.taken.append(choice)
        self.probability *= weights[choice]
        return choice

    def draw(self, logits: np.ndarray, position: int, purpose: Purpose) -> int:
        weights = np.exp(logits - logits.max())
        return self._branch(list(weights / weights.sum()))

    def flip(self, probability: float, position: int, order: int = 0) -> bool:
        p = min(max(probability, 0.0), 1.0)
        return self._branch([p, 1 - p]) == 0


def enumerate_law(program: Callable[[Noise], Hashable]) -> dict[Hashable, float]:
    """The exact distribution of the program's result."""
    law: dict[Hashable, float] = {}
    todo: list[tuple[int, ...]] = [()]
    while todo:
        chance = Scripted(todo.pop())
        result = program(chance)  # type: ignore[arg-type]
        law[result] = law.get(result, 0.0) + chance.probability
        todo.extend(chance.open)
    return law
