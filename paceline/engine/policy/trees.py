"""Whether a head drafts chains or trees in bursts, of batches of one size. No clock and no tensors.

A round of a tree tells what a chain would have gained on the same text: as many tokens as its likeliest path
has right. So a tree's gain is known relative to chains, whatever the text, and the best choice is the one
with most gain a second. Invariant: each choice is tried at first, and again after AGAIN bursts without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.stats import Median
from paceline.heads.rows import TreeShape

AGAIN = 32
MEMORY = 0.99  # of a round's tokens, from one round to the next


class Trees:
    """None stands for a chain."""

    def __init__(self) -> None:
        self._num_bursts = 0
        self._tried: dict[TreeShape | None, int] = {}  # in which burst
        self._seconds: dict[TreeShape | None, Median] = {}  # of a round
        self._tokens: dict[TreeShape | None, tuple[float, float]] = {}  # of rounds: emitted, and a chain's

    def choose(self, shapes: Sequence[TreeShape | None]) -> TreeShape | None:
        self._num_bursts += 1
        longest_ago = min(shapes, key=lambda shape: self._tried.get(shape, 0))
        is_due = self._num_bursts - self._tried.get(longest_ago, -AGAIN) >= AGAIN
        chosen = longest_ago if is_due else max(shapes, key=self._speed)
        self._tried[chosen] = self._num_bursts
        return chosen

    def note(self, shape: TreeShape | None, seconds: float, tokens: float, of_chain: float) -> None:
        """What a round took and emitted, and what it would have emitted of a chain."""
        self._seconds.setdefault(shape, Median(seconds)).add(seconds)
        before = self._tokens.get(shape, (0.0, 0.0))
        self._tokens[shape] = MEMORY * before[0] + tokens, MEMORY * before[1] + of_chain

    def _speed(self, shape: TreeShape | None) -> float:
        if shape not in self._seconds:
            return 0.0
        tokens, of_chain = self._tokens[shape]
        return tokens / of_chain / self._seconds[shape].value
