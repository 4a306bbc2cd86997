"""DFlash: a small head drafts a whole block in one pass, with the target's hidden states as keys and values
of each of its layers.

Rows of the text are taken in once; the block's own rows lie behind them and are overwritten by what the
target shows next. A Markov head, where there is one, adds to a token's logits what the token before it makes
likely, so a tree's nodes differ with their parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.core.types import Draft, Request
from paceline.drafters.base import DrafterContext
from paceline.drafters.features import Library, Read
from paceline.drafters.grow import Growth
from paceline.drafters.heads import Asked, HeadDrafter, HeadDrafterConfig, Numbered
from paceline.heads.config import DflashConfig
from paceline.heads.rows import BlockFeed, Guesses

CHUNK = 256  # rows: where more wait, they are taken in before


class Dflash(HeadDrafter):
    name = "dflash"
    kinds = ("dflash",)

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        super().__init__(config, context)
        assert isinstance(self.head.config, DflashConfig)
        self._most = self.head.config.num_drafts
        executor, steps = context.executor, min(self.longest_chain, self._most)
        blocks = executor.memory.num_blocks
        self._backend = executor.backend.block_head(self.head, executor.decoder, blocks, steps)
        self._library = Library(self._backend.place, self._backend.fork, self._read_most, lookahead=0)
        self._tree = replace(config, tree_depth=min(config.tree_depth or self._most, self._most))
        self._factors: list[torch.Tensor] | None = None  # the Markov head's, where the logits are
        self._words = None if self._ids is None else {int(token): i for i, token in enumerate(self._ids)}

    def can_guess(self, temperature: float) -> bool:
        return self._backend.can_guess(temperature)

    def guess(self, asked: Sequence[Asked]) -> Guesses:
        steps = min(max(a.limit for a in asked), self._most)
        return self._backend.guess(
            self._feeds(asked), [a.speaker for a in asked if a.speaker is not None], steps
        )

    def grow(self, asked: Sequence[Asked]) -> list[Draft]:
        logits = self._backend.logits(self._feeds(asked), self._most)  # [steps, requests, words]

        def speak(growths: list[Growth], pairs: Numbered) -> torch.Tensor:
            found = torch.stack([logits[growths[i].depth, i] for i, _ in pairs])
            return found + self._markov([growths[i].tokens[node] for i, node in pairs], found)

        return self.grow_all(asked, speak, self._tree)

    def _markov(self, tokens: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """What each token adds to the logits of the next: [n, words]."""
        config = self.head.config
        if not isinstance(config, DflashConfig) or not config.markov_rank:
            return torch.zeros((), device=like.device)
        if self._factors is None:
            self._factors = [self.head.tensors[f"markov_w{i}.weight"].to(like.device) for i in (1, 2)]
        before, after = self._factors
        words = (
            tokens
            if self._words is None
            else [self._words.get(token, config.draft_vocab_size) for token in tokens]
        )
        return (before[torch.tensor(list(words), device=like.device)] @ after.T).to(like)

    def _feeds(self, asked: Sequence[Asked]) -> list[BlockFeed]:
        """What the head has not read of each text."""
        reads = [self._library.reading(text, CHUNK) for text, _, _ in asked]
        return [self._take(read, len(read.text.waiting), read.tokens[-1]) for read in reads]

    def _take(self, read: Read, count: int, root: int = 0) -> BlockFeed:
        start = read.count
        return BlockFeed(read.place, start, read.take(count), root)

    def _read_most(self, read: Read) -> None:
        self._backend.read(self._take(read, len(read.text.waiting) - 1))

    def release(self, request: Request) -> None:
        super().release(request)
        self._library.finish(request.id)
