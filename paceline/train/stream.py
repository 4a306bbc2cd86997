"""From written text to batches: sequences of like length together, filled up on the right, and the rows that
are learned from.

A *row* is a position t whose hidden state the drafter starts from, once the target has read up to t and
chosen the token at t + 1: from the last token of the prompt to the last but one of the text. What is
predicted from it step by step are the tokens at t + 2, t + 3, ... Rows of a sequence follow one another, so
the teacher's word on step k of row i is row i + 1 + k, if that is still the same sequence. Invariant: the
order of batches is a function of the seed and the round.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.train.shards import Texts

ROUND = 32  # lengths are filled up to a multiple of this
SORTED_TOGETHER = 8192  # sequences


class Batch(NamedTuple):
    """Sequences filled up to one length."""

    ids: Tensor  # [B, S] int64, zeros behind the end
    rows: Tensor  # [N]: b * S + t
    sequence: Tensor  # [N]: b
    first: Tensor  # [B]: index of a sequence's first row among the N
    size: Tensor  # [B]: rows of a sequence
    num_tokens: int  # of the texts, filling not counted

    @property
    def numbers(self) -> Tensor:
        """[N]: 0, 1, 2, ..."""
        return torch.arange(len(self.rows), device=self.rows.device)

    @property
    def position(self) -> Tensor:
        """[N]: t."""
        return self.rows % self.ids.shape[1]

    def to(self, device: torch.device) -> Batch:
        ids, rows, sequence, first, size = (part.to(device, non_blocking=True) for part in self[:5])
        return Batch(ids, rows, sequence, first, size, self.num_tokens)

    def token_after(self, distance: int) -> Tensor:
        """[N]: the token at t + distance, or any beyond the end."""
        flat = self.ids.flatten()
        return flat[(self.rows + distance).clamp(max=len(flat) - 1)]

    def row_after(self, distance: int) -> Tensor:
        """[N]: the row of t + distance, or -1 where the sequence has none."""
        index = self.numbers + distance
        inside = index < (self.first + self.size)[self.sequence]
        return torch.where(inside, index, -1)


def split(texts: Texts, num_held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of sequences to learn from, and of greedy ones that are held out: spread evenly over the data,
    so the same for every seed."""
    greedy = np.flatnonzero(texts.temperature == 0)
    if len(greedy) < 2:
        remedy = "acceptance is measured on such, so write more text"
        raise ConfigError(f"the text has {len(greedy)} greedy answers; {remedy}")
    held = greedy[:: max(1, len(greedy) // max(1, min(num_held_out, len(greedy) // 8 or 1)))]
    return np.setdiff1d(np.arange(len(texts)), held), held


def batches(
    texts: Texts, chosen: np.ndarray, batch_tokens: int, max_length: int, draw: np.random.Generator | None
) -> Iterator[Batch]:
    """All chosen sequences once whose answers begin within the length; in random order, or sorted where
    nothing is drawn."""
    chosen = chosen[texts.num_prompt[chosen] < max_length - 1]
    order = chosen if draw is None else draw.permutation(chosen)
    groups: list[list[int]] = []
    for begin in range(0, len(order), SORTED_TOGETHER):
        part = order[begin : begin + SORTED_TOGETHER]
        lengths = texts.starts[part + 1] - texts.starts[part]
        groups.append([])
        for index in part[np.argsort(lengths, kind="stable")].tolist():
            if groups[-1] and (len(groups[-1]) + 1) * _length(texts, index, max_length) > batch_tokens:
                groups.append([])  # another sequence would make the batch too large
            groups[-1].append(index)
    for index in range(len(groups)) if draw is None else draw.permutation(len(groups)):
        batch = make_batch(texts, groups[index], max_length)
        if len(batch.rows):
            yield batch


def _length(texts: Texts, index: int, max_length: int) -> int:
    length = min(int(texts.starts[index + 1] - texts.starts[index]), max_length)
    return -(-length // ROUND) * ROUND


def make_batch(texts: Texts, indices: list[int], max_length: int) -> Batch:
    length = max(_length(texts, i, max_length) for i in indices)
    ids = np.zeros((len(indices), length), np.int64)
    rows, counts, num_tokens = [], [], 0
    for b, i in enumerate(indices):
        begin = int(texts.starts[i])
        stop = min(int(texts.starts[i + 1]) - begin, max_length)
        ids[b, :stop] = texts.tokens[begin : begin + stop]
        own = np.arange(max(int(texts.num_prompt[i]) - 1, 0), stop - 1)
        rows.append(b * length + own)
        counts.append(len(own))
        num_tokens += stop
    size = np.array(counts, np.int64)
    sequence = np.repeat(np.arange(len(indices)), size)
    first = np.cumsum(size) - size
    columns = [torch.from_numpy(x) for x in (ids, np.concatenate(rows), sequence, first, size)]
    return Batch._make([*columns, num_tokens])


def prefetched(made: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches in the same order, the next made by a thread while one is computed on."""
    with ThreadPoolExecutor(1, "batches") as pool:
        following = pool.submit(next, made, None)
        while (batch := following.result()) is not None:
            following = pool.submit(next, made, None)
            yield batch
