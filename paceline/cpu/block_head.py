"""DFlash on the CPU: what the calls of cpu/blocks.py are given.

Invariant: the kernels read and write where they are told, so every address handed to them lies in memory that
this call keeps alive, and a sequence has room for its context and a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.cpu.blocks import Block, draft_blocks
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_call import Capacity, HeadCall, Turn
from paceline.cpu.head_memory import CHUNK, GREEDY, NOTHING, LayeredHead, Tensors
from paceline.heads.config import DflashConfig
from paceline.heads.rows import BlockFeed, Guesses, Row, Speaker


class BlockHead(LayeredHead):
    def __init__(self, config: DflashConfig, tensors: Tensors, target: CpuDecoder) -> None:
        super().__init__(config, tensors, target)
        self.config, memory, size, rank = config, self._memory, config.block_size, config.markov_rank
        self._words = {int(token): i for i, token in enumerate(self._ids)}
        markov, before = NOTHING, 0
        if rank:
            markov = memory.output(tensors["markov_w2.weight"], fill=0.0)
            before = memory.vector(tensors["markov_w1.weight"])
        norm, first = memory.vector(tensors["hidden_norm.weight"]), 0 if config.sample_from_anchor else 1
        block = Block(size, config.mask_token_id, first, norm, rank, before, markov)
        scratch, steps = 4 * self.model.head.n + 16 * self.threads, config.num_drafts
        sizes = {"num_speaking": steps, "block": size, "scratch": scratch}
        self._call = HeadCall(self._kernel(draft_blocks, block, **sizes), Capacity(steps=steps))
        # What is compiled on first use is not the first request's to wait for, nor a cost of drafting.
        row = Row(0, dict.fromkeys(self.layers, torch.zeros(1, config.hidden_size)), 0)
        self.guess([BlockFeed(self.place(), 0, [row], 0)], [GREEDY], 1)

    def read(self, feed: BlockFeed) -> None:
        """Take features into a sequence; nothing is guessed."""
        for first in range(0, len(feed.rows), CHUNK):
            part = feed._replace(start=feed.start + first, rows=feed.rows[first : first + CHUNK])
            self._run([part], [GREEDY], 0, 0)

    def guess(self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int) -> Guesses:
        return self._run(feeds, speakers, steps, steps).guesses

    def logits(self, feeds: Sequence[BlockFeed], steps: int) -> torch.Tensor:
        """[steps, requests, draft vocabulary], without the Markov head."""
        found = self._run(feeds, [GREEDY] * len(feeds), steps, 0).logits.copy()
        return torch.from_numpy(found.reshape(steps, len(feeds), -1))

    def word(self, token: int) -> int:
        """A token of the target as a draft id; the last one is for all others."""
        return self._words.get(token, self.config.draft_vocab_size) if len(self._ids) else token

    def _run(
        self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], speaking: int, steps: int
    ) -> HeadCall:
        """speaking: rows of a block whose logits are wanted; of the first `steps` tokens are guessed."""
        ahead, requests = self.config.block_size if speaking else 0, []
        for feed, speaker in zip(feeds, speakers, strict=True):
            root = feed.root, self.word(feed.root)
            requests.append(self._request(feed, len(feed.rows), ahead, speaker, *root))
        rows, count = [row for feed in feeds for row in feed.rows], len(feeds)
        return self._open(Turn(count, len(rows), count * speaking, steps), requests, [], rows, ahead).run()
