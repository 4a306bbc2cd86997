"""From a drafting model's logits at one node to the tokens it offers there, each with the chance that the
target agrees.

Invariant: what is sampled comes with the q it was sampled from, after every option of the request; what is
not sampled has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline.core.noise import Noise, Purpose
from paceline.core.sampling import choose, noise_of, processed, warped
from paceline.core.types import Request

# tokens this far behind the best, in nats, are left out of a softmax: most of the vocabulary, and little of
# its mass
FAR = 8.0


class Candidate(NamedTuple):
    token: int
    chance: float  # that the target chooses it too, by the drafting model's own account


class Sampling(NamedTuple):
    """What the children of a node are sampled from."""

    logits: np.ndarray  # [vocab] float64, after every option
    q: torch.Tensor  # [vocab] float64, their probabilities


def is_sampled(request: Request) -> bool:
    """Whether drafts for it are sampled from q. Greedy and seeded requests are offered what the target would
    choose instead.
    """
    return not request.params.is_greedy and not request.is_seeded


def likeliest(request: Request, path: Sequence[int], logits: torch.Tensor, width: int) -> list[Candidate]:
    """The best `width` tokens after `request.tokens + path` for a greedy or seeded request, best first.

    The chance is a softmax at temperature 1. With a seed the noise that the target will add at this position
    is known, and is added.
    """
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


def sampling_of(request: Request, path: Sequence[int], logits: torch.Tensor) -> Sampling:
    warm = warped(request.params, processed(request, path, logits))
    return Sampling(warm.cpu().numpy(), warm.softmax(0))


def draw(sampling: Sampling, position: int, count: int, noise: Noise) -> list[int]:
    """Up to `count` different tokens, sampled without replacement: the best of one noisy row, in the order of
    their noisy logits.
    """
    left, tokens = sampling.logits, []
    for _ in range(count):
        tokens.append(noise.draw(left, position, Purpose.DRAFT))
        if len(tokens) == count:
            break
        left = left.copy()
        left[tokens[-1]] = -np.inf
        if not np.isfinite(left.max()):
            break
    return tokens
