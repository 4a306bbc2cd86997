"""The target as a teacher: the same transformer as models/decoder.py over whole sequences, without a cache.

Sequences are filled up on the right, so causal attention needs no other mask. On a GPU it runs in bfloat16.
Invariant: nothing here is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.decoder import Transformer
from paceline.models.layer import causal
from paceline.train.losses import Teacher, teach
from paceline.train.stream import Batch


class Seen(NamedTuple):
    """What the target shows of a batch."""

    hidden: dict[int, Tensor]  # layer -> [B, S, hidden]: the residual stream after that many layers
    last: Tensor  # [B, S, hidden]: after the last layer, before the final norm

    def features(self, taps: Sequence[int]) -> Tensor:
        """[B, S, taps * hidden]: the stream after those layers, side by side."""
        return torch.cat([self.hidden[tap] for tap in taps], -1)


class Target(Transformer):
    @property
    def head(self) -> Tensor:
        """[vocabulary, hidden]: weights of the output layer."""
        return self.lm_head.weight

    @torch.no_grad()
    def read(self, ids: Tensor, taps: Sequence[int]) -> Seen:
        """ids [B, S]."""

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal(q, k, v, self.masking[i].scale, self.masking[i].window)

        positions = torch.arange(ids.shape[1], device=ids.device)
        x, hidden = self.run(self.embed(ids), positions, attend, self.config.num_layers, taps)
        return Seen(hidden, x)

    def observe(self, batch: Batch, taps: Sequence[int], draft_ids: Tensor) -> tuple[Seen, Teacher]:
        """One pass: what it shows, and its word on every row."""
        seen = self.read(batch.ids, taps)
        return seen, teach(self.final(seen.last.flatten(0, 1)[batch.rows]), self.head, draft_ids)
