"""What several heads can learn from together: the text, the target that reads it, and the tokens that can be
drafted.

The target's pass is half of the work of a small head's training, so heads of all kinds may share it.
Invariant: one batch, one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from paceline.heads.config import target_hash
from paceline.loaders.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.train.recipes import Recipe
from paceline.train.shards import Texts
from paceline.train.stream import ROUND, split
from paceline.train.target import Target

PIECE = 1 << 14  # sequences that are counted together: an index of every token would be larger than the text


@dataclass(frozen=True, slots=True)
class Lessons:
    name: str  # of the target
    config: ModelConfig
    target_hash: str
    target: Target
    texts: Texts
    digest: str  # of the texts
    learned: np.ndarray  # sequences to learn from
    held: np.ndarray  # greedy ones that are held out
    draft_ids: np.ndarray
    blank: int  # the token that stands for one not known yet
    device: torch.device
    dtype: torch.dtype


class Known(NamedTuple):
    """What does not change when a head learns on from other text."""

    draft_ids: np.ndarray
    blank: int


def prepare(
    checkpoint: Checkpoint, texts: Texts, recipe: Recipe, device: torch.device, known: Known | None = None
) -> Lessons:
    """The recipe says how many tokens can be drafted, how long a sequence is and how many answers are held
    out.

    known: what a head that is to learn on knows already; otherwise the commonest tokens of the answers are
    drafted.
    """
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    learned, held = split(texts, recipe.num_held_out)
    frequency = answer_counts(texts, learned, checkpoint.config.vocab_size)
    ids, blank = known or draft_vocabulary(frequency, recipe.draft_vocab_size, checkpoint.eos_ids)
    target = Target.load(checkpoint, dtype=dtype, device=device, context=recipe.max_length + ROUND)
    return Lessons(
        name=checkpoint.name, config=checkpoint.config, target_hash=target_hash(checkpoint), target=target,
        texts=texts, digest=texts.digest(), learned=learned, held=held, draft_ids=ids, blank=blank,
        device=device, dtype=getattr(torch, dtype),
    )  # fmt: skip


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
    stands for a blank.
    """
    rank = frequency.astype(np.float64)
    rank[list(ends)] += frequency.sum() + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[: min(size, len(rank))]).astype(np.int64)
    return Known(chosen, int(np.argmin(frequency)))
