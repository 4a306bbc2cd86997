"""Held-out acceptance: what a greedy chain of the head's drafts would gain on answers that the target wrote
greedily.

Along such an answer the text's own tokens are what the target chooses, so a head that reads them drafts as it
would in use, up to its first mistake, which is all that counts. Invariant: τ walks through each answer as
decoding would, from one accepted token to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.train.losses import Mix, agreement
from paceline.train.students import Student
from paceline.train.texts import Batch


class Acceptance(NamedTuple):
    tau: float  # tokens a step, the target's own counted
    by_position: tuple[float, ...]  # chance that the first k + 1 drafted tokens are all right, over all rows


@torch.no_grad()
def hits(head: Student, batch: Batch, num_steps: int, dtype: torch.dtype) -> Tensor:
    """[N, K] bool: is step k of the draft from each row the target's choice?"""
    seen, teacher = head.target.observe(batch, head.config.hidden_layers, head.draft_ids)
    found = torch.zeros((len(batch.rows), num_steps), dtype=torch.bool, device=batch.ids.device)
    with torch.autocast(batch.ids.device.type, dtype, enabled=dtype != torch.float32):
        guesses = head.guesses(batch, seen, num_steps)
    for guess in guesses:
        hidden, nothing = guess.hidden.to(dtype), torch.zeros(len(guess.rows), device=guess.rows.device)
        _, guessed = agreement(hidden, guess.weight, teacher, guess.rows, nothing, Mix(soft=0.0))
        is_right = (guess.rows >= 0) & (guessed == teacher.best[guess.rows.clamp(min=0)])
        found[guess.base, guess.step] = is_right
    return found


def measure(head: Student, batches: Iterable[Batch], num_steps: int, dtype: torch.dtype) -> Acceptance:
    steps = gained = 0
    accepted: list[np.ndarray] = []
    for batch in batches:
        there = batch.to(head.draft_ids.device)
        lengths = hits(head, there, num_steps, dtype).long().cumprod(1).sum(1).cpu().numpy()
        accepted.append(lengths)
        for first, size in zip(batch.first.tolist(), batch.size.tolist(), strict=True):
            count, tokens = walk(lengths[first : first + size])
            steps, gained = steps + count, gained + tokens
    every = np.concatenate(accepted) if accepted else np.zeros(1)
    return Acceptance(gained / max(steps, 1), tuple(float((every > k).mean()) for k in range(num_steps)))


def walk(accepted: np.ndarray) -> tuple[int, int]:
    """Decode one answer; accepted [rows]: drafted tokens that would be accepted at each. -> steps, tokens.
    The last row has nothing to add."""
    row = steps = tokens = 0
    while row < len(accepted) - 1:
        advance = 1 + int(accepted[row])
        steps, tokens, row = steps + 1, tokens + advance, row + advance
    return steps, tokens
