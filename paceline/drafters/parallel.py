"""Heads that guess all places of a draft at once: Medusa and DFlash.

A tree is the best paths by the product of their probabilities: a place has the same tokens after every path
that leads there, but for a request's own options and a Markov head.

Medusa: K heads beside the target's own guess the tokens after the next one, from one hidden state. As
published that is the target's last, and nothing else is kept of a text. With a trunk, a layer such as EAGLE's
reads the text and the newest token first (head_texts.py), and the heads read what it puts out.

DFlash: a small head drafts a block in one pass, with the target's hidden states as keys and values of each of
its layers. Rows of the text are taken in once; the block's own rows lie behind them and are overwritten by
what the target shows next. A Markov head, where there is one, adds to a token's logits what the token before
it makes likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from paceline.drafters.base import DrafterContext
from paceline.drafters.grow import Growth
from paceline.drafters.head_texts import HeadTexts, Text
from paceline.drafters.heads import HeadDrafter, HeadDrafterConfig, Reader
from paceline.heads.config import TRUNK, DflashConfig, MedusaConfig
from paceline.heads.rows import BlockBackend, ChainHead, Guesses, Row, Sampler, SideBackend
from paceline.loaders.head_files import Head, HeadInput

# rows: where more wait, they are read before
TRUNK_CHUNK, BLOCK_CHUNK = 8, 256


def stacked(logits: torch.Tensor, growing: Sequence[Growth]) -> torch.Tensor:
    """[places, requests, words] -> [nodes, words]: what is said of each node of the frontiers."""
    return torch.stack([logits[g.depth, g.number] for g in growing for _ in g.frontier])


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
        self.texts = HeadTexts(self._trunk, TRUNK_CHUNK)

    def guess(self, texts: Sequence[Text], samplers: Sequence[Sampler], steps: int) -> Guesses:
        return self.backend.guess(self._ends(texts), samplers)

    def reader(self, texts: Sequence[Text]) -> Reader:
        return partial(stacked, self.backend.logits(self._ends(texts)))  # [heads, requests, words]

    def _ends(self, texts: Sequence[Text]) -> list[Row]:
        """What the heads read of each text: its last hidden state, or what the trunk makes of all of them."""
        if self._trunk is None:
            return [text.waiting[-1] for text in texts]
        there = {self.head.config.target_layers: self._trunk.outputs(self.texts.feeds(texts))}
        return [Row(len(text.request.tokens) - 1, there, i) for i, text in enumerate(texts)]


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
        self.texts = HeadTexts(self.backend, BLOCK_CHUNK, lookahead=0)
        # the Markov head: a token's row of the first factor, which the second turns into logits
        ids = self.head.tensors.get("draft_ids")
        self._rows = None if ids is None else {int(token): i for i, token in enumerate(ids)}
        names = ["markov_w1.weight", "markov_w2.weight"] if head.markov_rank else []
        self._factors = [self.head.tensors[name].to(executor.device) for name in names]

    def guess(self, texts: Sequence[Text], samplers: Sequence[Sampler], steps: int) -> Guesses:
        return self.backend.guess(self.texts.feeds(texts), samplers, min(steps, self._most))

    def reader(self, texts: Sequence[Text]) -> Reader:
        logits = self.backend.logits(self.texts.feeds(texts), self._most)  # [steps, requests, words]

        def logits_after(growing: Sequence[Growth]) -> torch.Tensor:
            found = stacked(logits, growing)
            if not self._factors:
                return found
            before, after = self._factors
            tokens = [g.tokens[node] for g in growing for node in g.frontier]
            if self._rows is not None:  # the last row stands for any other token
                tokens = [self._rows.get(token, len(self._rows)) for token in tokens]
            return found + (before[torch.tensor(tokens, device=found.device)] @ after.T).to(found)

        return logits_after
