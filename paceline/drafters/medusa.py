"""Medusa: K heads beside the target's own guess the tokens after the next one, all from one hidden state.

As published that is the target's last, and nothing else is kept of a text. With a trunk, a layer such as
EAGLE's reads the text and the newest token first (head_texts.py), and the heads read what it puts out. A
tree is the best paths by the product of the heads' probabilities: head i offers the same tokens after every
path of length i, but for a request's own options.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.types import Draft
from paceline.drafters.base import DrafterContext
from paceline.drafters.grow import Growth
from paceline.drafters.head_texts import HeadTexts, Text
from paceline.drafters.heads import HeadDrafter, HeadDrafterConfig, Wanted
from paceline.heads.config import TRUNK, MedusaConfig
from paceline.heads.rows import ChainHead, Guesses, Row, Sampler, SideBackend
from paceline.loaders.head_files import Head, HeadInput

CHUNK = 8  # rows, as in eagle.py


class Medusa(HeadDrafter):
    name = "medusa"
    backend: SideBackend

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        super().__init__(config, context)
        head, executor, tensors = self.head.config, context.executor, self.head.tensors
        assert isinstance(head, MedusaConfig)
        self._limit_depth(head.num_heads_ahead)
        blocks = executor.memory.num_blocks
        self.is_eager = head.trunk is not None
        self._trunk: ChainHead | None = None
        if head.trunk is None:
            norm = context.checkpoint.tensor("norm.weight")
        else:
            norm, length = tensors[f"{TRUNK}norm.weight"], len(TRUNK)
            own = {name[length:]: tensor for name, tensor in tensors.items() if name.startswith(TRUNK)}
            trunk = Head(head.trunk, {**own, "lm_head.weight": tensors["lm_head.weight"]}, "", "")
            self._trunk = executor.backend.chain_head(HeadInput(trunk, executor.decoder, blocks, 0))
        given = HeadInput(self.head, executor.decoder, blocks, self.longest_chain, norm)
        self.backend = executor.backend.side_heads(given)
        self.texts = HeadTexts(self._trunk, CHUNK)

    def guess(self, texts: Sequence[Text], samplers: Sequence[Sampler], steps: int) -> Guesses:
        return self.backend.guess(self._ends(texts), samplers)

    def grow(self, wanted: Sequence[Wanted]) -> list[Draft]:
        logits = self.backend.logits(self._ends([w.text for w in wanted]))  # [heads, requests, words]

        def logits_after(growing: Sequence[Growth]) -> torch.Tensor:
            return torch.stack([logits[g.depth, g.number] for g in growing for _ in g.frontier])

        return self.grow_all(wanted, logits_after)

    def _ends(self, texts: Sequence[Text]) -> list[Row]:
        """What the heads read of each text: its last hidden state, or what the trunk makes of all of them."""
        if self._trunk is None:
            return [text.waiting[-1] for text in texts]
        there = {self.head.config.target_layers: self._trunk.outputs(self.texts.feeds(texts))}
        return [Row(len(text.request.tokens) - 1, there, i) for i, text in enumerate(texts)]
