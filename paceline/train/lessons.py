"""The target as a teacher: the same transformer as models/decoder.py over whole sequences, without a cache;
and what several heads learn from together: its text, its passes, and the tokens that can be drafted.

A pass of the target is half of the work of a small head's training, so heads of all kinds may share it.
Sequences are filled up on the right, so causal attention needs no other mask. On a GPU it runs in bfloat16.
Invariant: nothing here is trained; one batch, one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.heads import target_hash
from paceline.models.decoder import Transformer
from paceline.models.layer import causal
from paceline.train.losses import Teacher, teach
from paceline.train.recipes import Recipe
from paceline.train.texts import ROUND, Batch, Texts, split

PIECE = 1 << 14  # sequences that are counted together: an index of every token would be larger than the text


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


@dataclass(frozen=True, slots=True)
class Lessons:
    target: Target
    name: str  # of the target
    target_hash: str
    texts: Texts
    digest: str  # of the texts
    learned: np.ndarray  # sequences to learn from
    held: np.ndarray  # greedy ones that are held out
    draft_ids: np.ndarray
    blank: int  # the token that stands for one not known yet


class Known(NamedTuple):
    """What does not change when a head learns on from other text."""

    draft_ids: np.ndarray
    blank: int


def prepare(
    checkpoint: Checkpoint, texts: Texts, recipe: Recipe, device: torch.device, known: Known | None = None
) -> Lessons:
    """The recipe says how many tokens can be drafted, how long a sequence is and how many answers are held
    out. known: what a head that is to learn on knows already; otherwise the commonest tokens of the answers
    are drafted."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    learned, held = split(texts, recipe.num_held_out)
    frequency = answer_counts(texts, learned, checkpoint.config.vocab_size)
    ids, blank = known or draft_vocabulary(frequency, recipe.draft_vocab_size, checkpoint.eos_ids)
    target = Target.load(checkpoint, dtype=dtype, device=device, context=recipe.max_length + ROUND)
    name, digest = checkpoint.name, texts.digest()
    return Lessons(target, name, target_hash(checkpoint), texts, digest, learned, held, ids, blank)


def answer_counts(texts: Texts, chosen: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each token stands in the answers of the chosen sequences, [vocab_size]."""
    is_chosen = np.zeros(len(texts), bool)
    is_chosen[chosen] = True
    lengths = np.diff(texts.starts)
    found = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(texts), PIECE):
        part = slice(begin, min(begin + PIECE, len(texts)))
        tokens = texts.tokens[texts.starts[part.start] : texts.starts[part.stop]]
        size = lengths[part]
        within = np.arange(len(tokens)) - np.repeat(texts.starts[part] - texts.starts[part.start], size)
        keep = (within >= np.repeat(texts.num_prompt[part], size)) & np.repeat(is_chosen[part], size)
        found += np.bincount(tokens[keep], minlength=vocab_size)[:vocab_size]
    return found


def draft_vocabulary(frequency: np.ndarray, size: int, ends: tuple[int, ...]) -> Known:
    """The most frequent tokens, the end tokens always among them, in ascending order; and the token that
    stands for a blank."""
    rank = frequency.astype(np.float64)
    rank[list(ends)] += frequency.sum() + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[: min(size, len(rank))]).astype(np.int64)
    return Known(chosen, int(np.argmin(frequency)))
