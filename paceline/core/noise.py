"""The only source of random numbers: Philox 4x32-10, a pure function of (seed, position, purpose, round).

Invariant: no two purposes share a stream, so a draft, the coin that accepts it and the draw after a rejection
are independent. The one exception is the coupled rule, where a drafter reads TARGET noise: there a draft is
accepted only if it *equals* the target's own choice, so the drafter cannot change the text. TARGET noise
belongs to a position and ignores the round: therefore a seed gives the same text with and without drafts.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


class Purpose(enum.IntEnum):
    TARGET = 0  # the target's own draw at a position
    DRAFT = 1  # what a drafter samples
    ACCEPT = 2  # the coin against min(1, p/q)
    RESAMPLE = 3  # the draw from the residual after a rejection


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox 4x32-10. counter: [n, 4] uint64 holding 32-bit words; returns [n, 4] likewise."""
    c0, c1, c2, c3 = (counter[:, i].copy() for i in range(4))
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (b >> _SHIFT) ^ c1 ^ np.uint64(k0), (a >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = b & _MASK, a & _MASK
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(seed: int, position: int, purpose: Purpose, ids: np.ndarray, round: int = 0) -> np.ndarray:
    """One float64 strictly inside (0, 1) for each id."""
    ids = ids.astype(np.uint64)
    largest = int(ids.max(initial=0))
    dense = ids.size * 4 > largest  # cheaper to compute the whole range, four words a counter, and index it
    blocks = np.arange(largest // 4 + 1, dtype=np.uint64) if dense else ids // np.uint64(4)
    counter = np.empty((blocks.size, 4), np.uint64)
    counter[:, 0] = blocks
    counter[:, 1:] = (position & 0xFFFFFFFF, int(purpose), round & 0xFFFFFFFF)
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    picked = words.reshape(-1)[ids] if dense else words[np.arange(ids.size), ids % np.uint64(4)]
    return (picked.astype(np.float64) + 0.5) * 2.0**-32


def gumbel(seed: int, position: int, purpose: Purpose, ids: np.ndarray, round: int = 0) -> np.ndarray:
    """Standard Gumbel noise for each id: argmax(log p + gumbel) over the ids is a draw from p."""
    return -np.log(-np.log(uniform(seed, position, purpose, ids, round)))


GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))  # no draw exceeds it: tokens further behind cannot win


@dataclass(frozen=True, slots=True)
class Noise:
    """The random numbers of one request in one verify round."""

    seed: int
    round: int = 0

    def draw(self, logits: np.ndarray, position: int, purpose: Purpose) -> int:
        """argmax(logits + gumbel): a draw from float64 logits [vocab], -inf for tokens that cannot come."""
        ids, noisy = self.contest(logits, position, purpose)
        return int(ids[noisy.argmax()])

    def contest(self, logits: np.ndarray, position: int, purpose: Purpose) -> tuple[np.ndarray, np.ndarray]:
        """The ids that can have the maximum of a draw, and their logits with noise: the other tokens are too
        far below the best, so computing no noise for them changes no result."""
        round = 0 if purpose is Purpose.TARGET else self.round
        best = int(logits.argmax())
        lead = logits[best] + gumbel(self.seed, position, purpose, np.array([best]), round)[0]
        ids = np.flatnonzero(logits >= lead - GUMBEL_MAX)
        return ids, logits[ids] + gumbel(self.seed, position, purpose, ids, round)

    def flip(self, probability: float, position: int, order: int = 0) -> bool:
        """True with this probability: the coin of the `order`-th candidate at a position."""
        return self.coin(position, order) < probability

    def coin(self, position: int, order: int = 0) -> float:
        """What `flip` compares with: uniform in (0, 1)."""
        return float(uniform(self.seed, position, Purpose.ACCEPT, np.array([order]), self.round)[0])


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with n > 1 (splitmix64); completion 0 has the request's."""
    if index == 0:
        return seed & (2**64 - 1)
    z = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)
