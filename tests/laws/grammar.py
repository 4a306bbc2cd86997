"""A grammar small enough to check by eye: no token may be followed by one that leaves the same rest when
divided by 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def allowed_after(output: Sequence[int], vocab: int) -> np.ndarray:
    return np.array([not output or token % 3 != output[-1] % 3 for token in range(vocab)])


class NoEqualRests:
    """The constraint an engine sees; `allowed_after` is the same as the reference sees it."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.output: list[int] = []

    def allowed(self) -> torch.Tensor:
        return torch.from_numpy(allowed_after(self.output, self.vocab))

    def advance(self, token: int) -> None:
        assert self.allowed()[token], "advanced by a token that is not allowed"
        self.output.append(token)

    def rollback(self, num_tokens: int) -> None:
        del self.output[len(self.output) - num_tokens :]
