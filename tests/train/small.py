"""Small recipes, random heads and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.heads import target_hash
from paceline.train.lessons import Target
from paceline.train.recipes import Recipe, head_config, recipe_for
from paceline.train.students import Student, build_student
from paceline.train.texts import Batch, Texts, Written, from_written, make_batch
from tests.make_models import VOCAB

CPU = torch.device("cpu")
KINDS = ("eagle", "medusa", "dflash", "draft")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # kind, and what its recipe changes
    **{kind: (kind, {}) for kind in KINDS},
    "medusa with a trunk": ("medusa", {"has_trunk": True}),
}


def small(kind: str, **changes: Any) -> Recipe:
    sizes: dict[str, Any] = {
        "num_steps": 3,
        "num_layers": 1,
        "num_taps": 3,
        "num_blocks": 1,
        "markov_rank": 8,
        "draft_vocab_size": 180,
    }
    run: dict[str, Any] = {"batch_tokens": 2048, "max_length": 448, "num_held_out": 24}
    return recipe_for(kind, **(sizes | run | changes))


def head_of(kind: str, target: Target, checkpoint: Checkpoint, **changes: Any) -> Student:
    recipe = small(kind, **changes)
    config = head_config(recipe, checkpoint.config, "tiny", target_hash(checkpoint), 5)
    torch.manual_seed(1)
    head = build_student(
        config, target, torch.arange(0, VOCAB, 2)[: config.draft_vocab_size], recipe.max_length
    )
    with torch.no_grad():
        for weight in head.module.parameters():
            weight.add_(0.1 * torch.randn(weight.shape))
    return head


def some_batch(lengths: tuple[int, ...] = (20, 31, 9), prompts: tuple[int, ...] = (5, 12, 1)) -> Batch:
    draw = np.random.default_rng(3)
    written = [
        Written(draw.integers(0, VOCAB, p), draw.integers(0, VOCAB, n - p), 0.0)
        for n, p in zip(lengths, prompts, strict=True)
    ]
    return make_batch(from_written(written, VOCAB), [0, 1, 2], 192)


def piece(texts: Texts, first: int, last: int) -> Texts:
    """Sequences first .. last - 1."""
    begin, end = texts.starts[first], texts.starts[last]
    return Texts(
        texts.tokens[begin:end],
        texts.starts[first : last + 1] - begin,
        texts.num_prompt[first:last],
        texts.temperature[first:last],
    )
