"""DFlash on the CPU: its weights in int8, its sequences, and what the calls of cpu/blocks.py are given.

Invariant: the kernels read and write where they are told, so every address handed to them lies in memory that
this call keeps alive, and a sequence has room for its context and a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.cpu.block_attention import SHARED
from paceline.cpu.block_call import BlockCall, Constants
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_memory import NOTHING, Memory, Place, Tensors, Workspace, describe, sources_of
from paceline.heads.config import DflashConfig
from paceline.heads.rows import BlockFeed, Guesses, Row, Speaker

CHUNK = 256  # rows read in one pass
MOST_ROWS = 16  # usually, beside those of a prompt
GREEDY = Speaker(0.0, 0, 0)


class BlockHead:
    def __init__(self, config: DflashConfig, tensors: Tensors, target: CpuDecoder) -> None:
        self.config, self._memory = config, Memory()
        memory = self._memory
        rows = [
            memory.layer(tensors, f"layers.{i}.", config.intermediate_size) for i in range(config.num_layers)
        ]
        fuse, balance = memory.balanced(tensors["fc.weight"])
        markov = memory.output(tensors["markov_w2.weight"], fill=0.0) if config.markov_rank else NOTHING
        self.shape = describe(config, rows, tensors, target, memory, fuse, markov)
        widest = max(fuse.k, config.intermediate_size, config.num_heads * config.head_dim, config.markov_rank)
        self._workspace = Workspace(self.shape, widest, config.hidden_size, SHARED)
        ids = tensors.get("draft_ids")
        self._ids = np.empty(0, np.int64) if ids is None else ids.to(torch.int64).numpy()
        self._words = {int(token): i for i, token in enumerate(self._ids)}
        self._layers = config.hidden_layers
        self._constants = Constants(
            config.block_size, config.mask_token_id, 0 if config.sample_from_anchor else 1, config.num_drafts, self._ids,
            config.markov_rank, memory.vector(tensors["markov_w1.weight"]) if config.markov_rank else 0, len(config.taps), balance,
            memory.vector(tensors["hidden_norm.weight"]),
        )  # fmt: skip
        self._call = BlockCall(self._constants, self.shape, 1, MOST_ROWS)
        self._warm_up()

    def _warm_up(self) -> None:
        """What is compiled on first use is not the first request's to wait for, nor to be taken for a
        cost.
        """
        nothing = torch.zeros(1, self.config.hidden_size)
        row = Row(0, dict.fromkeys(self._layers, nothing), 0)
        self.guess([BlockFeed(self.place(), 0, [row], 0)], [GREEDY], 1)

    def place(self) -> Place:
        return Place(self.shape.num_layers * self.config.num_kv_heads, self.config.head_dim)

    def fork(self, place: Place, length: int) -> Place:
        return place.fork(length)

    def can_guess(self, temperature: float) -> bool:
        return True

    def read(self, feed: BlockFeed) -> None:
        """Take features into a sequence; nobody speaks."""
        for first in range(0, len(feed.rows), CHUNK):
            self._run(
                [feed._replace(start=feed.start + first, rows=feed.rows[first : first + CHUNK])],
                [GREEDY],
                0,
                is_guessing=False,
            )

    def guess(self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int) -> Guesses:
        return self._run(feeds, speakers, steps, is_guessing=True).guesses(len(feeds), steps)

    def logits(self, feeds: Sequence[BlockFeed], steps: int) -> torch.Tensor:
        """[steps, requests, draft vocabulary], without the Markov head."""
        found = self._run(feeds, [GREEDY] * len(feeds), steps, is_guessing=False).logits(len(feeds), steps)
        return torch.from_numpy(found[:, :, : self.config.draft_vocab_size].copy())

    def word(self, token: int) -> int:
        """A token of the target as a draft id; the last one is for all others."""
        return self._words.get(token, self.config.draft_vocab_size) if len(self._ids) else token

    def _run(
        self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int, *, is_guessing: bool
    ) -> BlockCall:
        """The call that was made, which knows what came of it."""
        size = self.config.block_size if steps else 0
        rows = longest = 0
        for feed in feeds:
            end = feed.start + len(feed.rows) + size
            feed.place.reserve(end)
            rows, longest = rows + len(feed.rows), max(longest, end)
        sources = sources_of(
            [row for feed in feeds for row in feed.rows], self._layers, self.config.hidden_size
        )
        call, work = (
            self._call_for(len(feeds), rows),
            self._workspace.get(max(rows, len(feeds) * size), longest),
        )
        call.run(
            feeds,
            [self.word(feed.root) for feed in feeds],
            sources,
            speakers,
            steps,
            work,
            is_guessing=is_guessing,
        )
        return call

    def _call_for(self, requests: int, rows: int) -> BlockCall:
        """The one that there is, or a larger one."""
        if requests > self._call.most_requests or rows > self._call.most_rows:
            most_requests, most_rows = (
                max(requests, self._call.most_requests),
                max(rows, self._call.most_rows),
            )
            self._call = BlockCall(self._constants, self.shape, most_requests, most_rows)
        return self._call
