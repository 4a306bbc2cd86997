"""Written text: as shards on disk (.npz of plain arrays), and as the batches that heads learn from.

A *row* is a position t whose hidden state the drafter starts from, once the target has read up to t and
chosen the token at t + 1: from the last token of the prompt to the last but one of the text. Steps predict
the tokens at t + 2, t + 3, ..., so the teacher's word on step k of row i is row i + 1 + k of the sequence.
Invariants: a sequence has an answer and lies whole in one shard; seed and round give the order of batches.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigError, ModelFileError
from paceline.loaders.fetch import whole

ROUND = 32  # lengths are filled up to a multiple of this
SORTED_TOGETHER = 8192  # sequences


class Written(NamedTuple):
    """A prompt and the target's answer to it."""

    prompt: Sequence[int]
    answer: Sequence[int]
    temperature: float


class Texts(NamedTuple):
    """Many sequences, one after the other."""

    tokens: np.ndarray  # [N] uint16 or uint32
    starts: np.ndarray  # [S + 1] int64
    num_prompt: np.ndarray  # [S] int32: tokens before the answer
    temperature: np.ndarray  # [S] float32: 0 where the answer is greedy

    def __len__(self) -> int:
        return len(self.num_prompt)

    @property
    def num_answer_tokens(self) -> int:
        return int(self.starts[-1] - self.num_prompt.sum())

    def digest(self) -> str:
        """Names the data a head was trained on."""
        found = hashlib.sha256()
        for part in self:
            found.update(np.ascontiguousarray(part).tobytes())
        return found.hexdigest()


def from_written(written: Sequence[Written], vocab_size: int) -> Texts:
    lengths = [len(w.prompt) + len(w.answer) for w in written]
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    tokens = np.fromiter((t for w in written for t in (*w.prompt, *w.answer)), dtype, sum(lengths))
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    num_prompt = np.array([len(w.prompt) for w in written], np.int32)
    return Texts(tokens, starts, num_prompt, np.array([w.temperature for w in written], np.float32))


def joined(parts: Sequence[Texts]) -> Texts:
    starts = [np.zeros(1, np.int64)]
    for part in parts:
        starts.append(part.starts[1:] + starts[-1][-1])
    tokens, _, num_prompt, temperature = map(np.concatenate, zip(*parts, strict=True))
    return Texts(tokens, np.concatenate(starts), num_prompt, temperature)


def save_shard(path: Path, texts: Texts) -> None:
    with whole(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **texts._asdict())


def load_shard(path: Path) -> Texts:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            texts = Texts(*(stored[name] for name in Texts._fields))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ModelFileError(f"{path}: is not a whole shard of text ({error}); write it again") from error
    is_sound = len(texts.starts) == len(texts) + 1 == len(texts.temperature) + 1
    is_sound = is_sound and texts.starts[0] == 0 and texts.starts[-1] == len(texts.tokens)
    if not is_sound or (texts.num_prompt < 0).any() or (np.diff(texts.starts) <= texts.num_prompt).any():
        raise ModelFileError(f"{path}: its index does not fit its tokens; write it again")
    return texts


def load_shards(folder: Path) -> Texts:
    """All shards of a folder, or one file, in the order of their names."""
    paths = sorted(folder.glob("*.npz")) if folder.is_dir() else [folder]
    if not paths or not paths[0].is_file():
        raise ConfigError(f"{folder} holds no written text (.npz); write some first")
    return joined([load_shard(path) for path in paths])


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
        return Batch._make([*(part.to(device, non_blocking=True) for part in self[:5]), self.num_tokens])

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
    """Sequences to learn from, and greedy ones that are held out: spread evenly, the same for every seed."""
    greedy = np.flatnonzero(texts.temperature == 0)
    if len(greedy) < 2:
        raise ConfigError(f"the text has {len(greedy)} greedy answers, to measure acceptance on; write more")
    held = greedy[:: max(1, len(greedy) // max(1, min(num_held_out, len(greedy) // 8 or 1)))]
    return np.setdiff1d(np.arange(len(texts)), held), held


def batches(
    texts: Texts, chosen: np.ndarray, batch_tokens: int, max_length: int, draw: np.random.Generator | None
) -> Iterator[Batch]:
    """All chosen sequences once whose answers begin within the length; sorted where nothing is drawn."""
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
