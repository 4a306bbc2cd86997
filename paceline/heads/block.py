"""DFlash in torch on any device: a block of tokens in one pass. The interface of cpu/block_head.py.

Invariant: what a block wrote beyond its text is overwritten by the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.heads.chain import TorchHead
from paceline.heads.config import DflashConfig
from paceline.heads.rows import BlockFeed, Guesses, Speaker


class TorchBlockHead(TorchHead):
    config: DflashConfig

    def __init__(
        self, config: DflashConfig, tensors: Mapping[str, Tensor], decoder: Any, device: torch.device
    ) -> None:
        super().__init__(config, tensors, decoder, device, config.block_size)
        self._words = torch.full((config.vocab_size,), config.draft_vocab_size, device=device)
        ids = torch.arange(config.vocab_size, device=device) if self._ids is None else self._ids
        self._words[ids] = torch.arange(len(ids), device=device)

    @torch.inference_mode()
    def read(self, feed: BlockFeed) -> None:
        """Features, fused and normed, as keys and values of every layer."""
        end = feed.start + len(feed.rows)
        feed.place.reserve(end + self.config.block_size)
        angles = self._tables.at(torch.arange(feed.start, end, device=self.device))
        for i, (k, v) in enumerate(self.module.keys_values(self._features(feed.rows), angles)):
            feed.place.extend(i, slice(feed.start, end), k, v)

    @torch.inference_mode()
    def logits(self, feeds: Sequence[BlockFeed], steps: int) -> Tensor:
        for feed in feeds:
            self.read(feed)
        hidden = torch.stack([self._block(feed) for feed in feeds], 1)  # [size, requests, hidden]
        first = 0 if self.config.sample_from_anchor else 1
        found: Tensor = self.module.lm_head(hidden[first : first + steps])
        return found

    @torch.inference_mode()
    def guess(self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int) -> Guesses:
        """The likeliest tokens, from left to right; the device is waited for once."""
        tokens, chances, module = [], [], self.module
        words = self._words[self._tensor([feed.root for feed in feeds])]
        for logits in self.logits(feeds, steps):
            if self.config.markov_rank:
                logits = logits + module.markov_w2(module.markov_w1.rows(words))
            chance, words = logits.float().softmax(-1).max(-1)
            tokens.append(self._tokens(words))
            chances.append(chance)
        return Guesses(torch.stack(tokens).tolist(), torch.stack(chances).cumprod(0).tolist())

    def _block(self, feed: BlockFeed) -> Tensor:
        """[size, hidden]: rows that see the whole context and each other."""
        start = feed.start + len(feed.rows)
        end = start + self.config.block_size
        tokens = [feed.root, *[self.config.mask_token_id] * (self.config.block_size - 1)]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            feed.place.extend(i, slice(start, end), k, v)
            found: Tensor = feed.place.attend(i, q, end, None)
            return found

        angles = self._tables.at(torch.arange(start, end, device=self.device))
        found: Tensor = self.module(self._embed(self._tensor(tokens)).to(self._dtype), angles, attend)
        return found
