"""DFlash: a small head drafts a whole block in one pass, with the target's hidden states as keys and values
of each of its layers.

Rows of the text are taken in once; the block's own rows lie behind them and are overwritten by what the
target shows next. A Markov head, where there is one, adds to a token's logits what the token before it makes
likely, so a tree's nodes differ with their parents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.types import Draft
from paceline.drafters.base import DrafterContext
from paceline.drafters.grow import Growth
from paceline.drafters.head_texts import HeadTexts, Text
from paceline.drafters.heads import HeadDrafter, HeadDrafterConfig, Wanted
from paceline.heads.config import DflashConfig
from paceline.heads.rows import BlockBackend, Guesses, Sampler
from paceline.loaders.head_files import HeadInput

CHUNK = 256  # rows: where more wait, they are taken in before


class Dflash(HeadDrafter):
    name = "dflash"
    is_eager = False
    backend: BlockBackend

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        super().__init__(config, context)
        head, executor = self.head.config, context.executor
        assert isinstance(head, DflashConfig)
        self._limit_depth(head.num_drafts)
        self._most, steps = head.num_drafts, min(self.longest_chain, head.num_drafts)
        given = HeadInput(self.head, executor.decoder, executor.memory.num_blocks, steps)
        self.backend = executor.backend.block_head(given)
        self.texts = HeadTexts(self.backend, CHUNK, lookahead=0)
        # the Markov head: a token's row of the first factor, which the second turns into logits
        ids = self.head.tensors.get("draft_ids")
        self._rows = None if ids is None else {int(token): i for i, token in enumerate(ids)}
        names = ["markov_w1.weight", "markov_w2.weight"] if head.markov_rank else []
        self._factors = [self.head.tensors[name].to(executor.device) for name in names]

    def guess(self, texts: Sequence[Text], samplers: Sequence[Sampler], steps: int) -> Guesses:
        return self.backend.guess(self.texts.feeds(texts), samplers, min(steps, self._most))

    def grow(self, wanted: Sequence[Wanted]) -> list[Draft]:
        feeds = self.texts.feeds([w.text for w in wanted])
        logits = self.backend.logits(feeds, self._most)  # [steps, requests, words]

        def logits_after(growing: Sequence[Growth]) -> torch.Tensor:
            found = torch.stack([logits[g.depth, g.number] for g in growing for _ in g.frontier])
            if not self._factors:
                return found
            before, after = self._factors
            tokens = [g.tokens[node] for g in growing for node in g.frontier]
            if self._rows is not None:  # the last row stands for any other token
                tokens = [self._rows.get(token, len(self._rows)) for token in tokens]
            return found + (before[torch.tensor(tokens, device=found.device)] @ after.T).to(found)

        return self.grow_all(wanted, logits_after)
