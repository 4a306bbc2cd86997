"""How a drafting model reads a request: its place in the text, the request's grammar moved along guesses and
back, and from logits at a node the tokens that are offered there.

Invariants: the request is only read, and a grammar is where it was once `GrammarWalk.go` is given no path.
What is sampled comes with the q it was sampled from, after every option of the request; what is not has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from paceline.core.noise import Noise, Purpose
from paceline.core.sampling import choose, noise_of, processed, warped
from paceline.core.types import Cached, Constraint, Request
from paceline.drafters.base import num_same

FAR = 8.0  # tokens that many nats behind the best are left out of a softmax: most of them, and little mass


@dataclass(slots=True)
class Reading:
    """One request as a drafting model sees it, slots reserved for the unread text and guesses."""

    request: Request
    cache: Cached  # the model's K/V of the text so far; num_cached moves on as it reads
    unread: list[int]  # text it has not read; the last token is the root of what will be drafted
    budget: int


@dataclass(slots=True)
class GrammarWalk:
    """Moves a grammar from one path of guesses to another, undoing and redoing as little as possible. Where a
    guess proves too complex for the grammar, `go` raises and stays before it."""

    constraint: Constraint | None
    path: list[int] = field(default_factory=list)

    def go(self, path: Sequence[int]) -> None:
        if self.constraint is None:
            return
        same = num_same(self.path, path)
        if same < len(self.path):
            self.constraint.rollback(len(self.path) - same)
            del self.path[same:]
        for token in path[same:]:
            self.constraint.advance(token)
            self.path.append(token)


class Candidate(NamedTuple):
    token: int
    chance: float  # that the target chooses it too, by the drafting model's own account


def likeliest(request: Request, path: Sequence[int], logits: torch.Tensor, width: int) -> list[Candidate]:
    """The best `width` tokens after `request.tokens + path` for a greedy or seeded request, best first.

    The chance is a softmax at temperature 1. With a seed the noise that the target will add at this position
    is known, and is added."""
    logits = processed(request, path, logits)
    position, noise = request.num_tokens + len(path), noise_of(request)
    if not request.params.is_greedy:
        warm = warped(request.params, logits).cpu().numpy()
        ids, noisy = noise.contest(warm, position, Purpose.TARGET)
        return _best(noisy * request.params.temperature, width, ids)
    best = choose(request, logits, position, noise)  # refuses logits that are not finite
    if logits.device.type == "cpu":
        scores = logits.numpy()
        near = np.flatnonzero(scores > scores[best] - FAR)
        return _best(scores[near], width, near)
    values, tokens = logits.topk(min(width, logits.numel()))
    chances = (values - logits.logsumexp(0)).exp()
    return [Candidate(t, c) for t, c in zip(tokens.tolist(), chances.tolist(), strict=True) if c > 0]


def _best(scores: np.ndarray, width: int, ids: np.ndarray) -> list[Candidate]:
    """Of equal scores the lower id comes first, as in `choose`."""
    weights = np.exp(scores - scores.max())
    order = [int(weights.argmax())] if width == 1 else np.argsort(-weights, kind="stable")[:width].tolist()
    total = float(weights.sum())
    return [Candidate(int(ids[i]), float(weights[i]) / total) for i in order if weights[i] > 0]


def draw(logits: np.ndarray, position: int, count: int, noise: Noise) -> list[int]:
    """Up to `count` different tokens, sampled without replacement from float64 logits [vocab]: the best of
    one noisy row, in the order of their noisy logits."""
    left, tokens = logits, []
    for _ in range(count):
        tokens.append(noise.draw(left, position, Purpose.DRAFT))
        if len(tokens) == count:
            break
        left = left.copy()
        left[tokens[-1]] = -np.inf
        if not np.isfinite(left.max()):
            break
    return tokens
