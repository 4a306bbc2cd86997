"""Medusa: K heads beside the target's own guess the tokens after the next one, all from one hidden state (and some from that next token).

Nothing is kept of a text but its last hidden state. A tree is the best paths by the product of the heads' probabilities: head i offers the
same tokens after every path of length i, but for a request's own options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.models.head_config import MedusaConfig
from paceline.models.head_rows import Guesses, Row
from paceline.proposers.base import Surroundings
from paceline.proposers.grow import Growth
from paceline.proposers.head_backends import side_backend
from paceline.proposers.heads import Asked, HeadDrafter, HeadDrafterConfig, Pairs
from paceline.types import Draft


class Medusa(HeadDrafter):
    name = "medusa"
    kinds = ("medusa",)
    most_waiting = 1

    def __init__(self, config: HeadDrafterConfig, surroundings: Surroundings) -> None:
        super().__init__(config, surroundings)
        assert isinstance(self.head.config, MedusaConfig)
        self._backend = side_backend(self.head, surroundings, self.longest_chain)
        most = self.head.config.num_heads_ahead
        self._tree = replace(config, tree_depth=min(config.tree_depth or most, most))

    def can_guess(self, temperature: float) -> bool:
        return self._backend.can_guess(temperature)

    def guess(self, asked: Sequence[Asked]) -> Guesses:
        return self._backend.guess(*_ends(asked), [a.speaker for a in asked if a.speaker is not None])

    def grow(self, asked: Sequence[Asked]) -> list[Draft]:
        logits = self._backend.logits(*_ends(asked))  # [heads, requests, words]

        def speak(growths: list[Growth], pairs: Pairs) -> torch.Tensor:
            return torch.stack([logits[growths[i].depth, i] for i, _ in pairs])

        return self.grow_all(asked, speak, self._tree)


def _ends(asked: Sequence[Asked]) -> tuple[list[Row], list[int]]:
    """The last hidden state of each text, and the token that was chosen after it."""
    return [a.text.waiting[-1] for a in asked], [a.text.request.tokens[-1] for a in asked]
