"""Medusa: K heads beside the target's own guess the tokens after the next one, all from one hidden state.

As published that is the target's last, and nothing else is kept of a text. With a trunk, a layer such as
EAGLE's reads the text and the newest token first (pairs.py), and the heads read what it puts out. A
tree is the best paths by the product of the heads' probabilities: head i offers the same tokens after every
path of length i, but for a request's own options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.core.types import Draft, Request, Seen
from paceline.drafters.base import DrafterContext
from paceline.drafters.grow import Growth
from paceline.drafters.heads import Asked, HeadDrafter, HeadDrafterConfig, Numbered
from paceline.drafters.pairs import Pairs
from paceline.heads.config import TRUNK, MedusaConfig
from paceline.heads.rows import ChainHead, Guesses, Row


class Medusa(HeadDrafter):
    name = "medusa"
    kinds = ("medusa",)

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        super().__init__(config, context)
        head = self.head.config
        assert isinstance(head, MedusaConfig)
        executor, tensors = context.executor, self.head.tensors
        norm = (
            context.checkpoint.tensor("norm.weight") if head.trunk is None else tensors[f"{TRUNK}norm.weight"]
        )
        self._backend = executor.backend.side_heads(self.head, executor.decoder, norm, self.longest_chain)
        self._trunk: ChainHead | None = None
        if head.trunk is not None:
            own = {
                name.removeprefix(TRUNK): tensor for name, tensor in tensors.items() if name.startswith(TRUNK)
            }
            given, blocks = {**own, "lm_head.weight": tensors["lm_head.weight"]}, executor.memory.num_blocks
            self._trunk = executor.backend.chain_head(head.trunk, given, executor.decoder, blocks, None, 0)
        self._pairs = None if self._trunk is None else Pairs(self._trunk)
        self.most_waiting = 1 if self._trunk is None else None
        self._tree = replace(
            config, tree_depth=min(config.tree_depth or head.num_heads_ahead, head.num_heads_ahead)
        )

    def can_guess(self, temperature: float) -> bool:
        return self._backend.can_guess(temperature)

    def guess(self, asked: Sequence[Asked]) -> Guesses:
        return self._backend.guess(self._ends(asked), [a.speaker for a in asked if a.speaker is not None])

    def grow(self, asked: Sequence[Asked]) -> list[Draft]:
        logits = self._backend.logits(self._ends(asked))  # [heads, requests, words]

        def speak(growths: list[Growth], pairs: Numbered) -> torch.Tensor:
            return torch.stack([logits[growths[i].depth, i] for i, _ in pairs])

        return self.grow_all(asked, speak, self._tree)

    def _ends(self, asked: Sequence[Asked]) -> list[Row]:
        """What the heads read of each text: its last hidden state, or what the trunk makes of all of them."""
        if self._trunk is None or self._pairs is None:
            return [a.text.waiting[-1] for a in asked]
        outputs = self._trunk.outputs(self._pairs.feeds([a.text for a in asked]))
        there = {self.head.config.target_layers: outputs}
        return [Row(len(a.text.request.tokens) - 1, there, i) for i, a in enumerate(asked)]

    def observe(self, seen: Sequence[Seen]) -> None:
        super().observe(seen)
        if self._pairs is not None:
            self._pairs.read_ahead(seen, self._texts)

    def release(self, request: Request) -> None:
        super().release(request)
        if self._pairs is not None:
            self._pairs.library.finish(request.id)
