"""Written text on disk: token ids, where each sequence starts, where its answer starts, and at which
temperature it was written.

A shard is one .npz of plain arrays, compressed, small enough to be carried around. Invariant: a sequence lies
whole in one shard, and `starts[i] + num_prompt[i] < starts[i + 1]`: every sequence has an answer.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.core.errors import ConfigError, ModelFileError


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
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.savez_compressed(file, **texts._asdict())
    partial.rename(path)


def load_shard(path: Path) -> Texts:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            texts = Texts(*(stored[name] for name in Texts._fields))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        what = f"{path}: is not a whole shard of written text ({error})"
        raise ModelFileError(f"{what}; write it again") from error
    lengths = np.diff(texts.starts)
    is_sound = (
        len(texts.starts) == len(texts) + 1 == len(texts.temperature) + 1
        and texts.starts[0] == 0
        and texts.starts[-1] == len(texts.tokens)
        and bool((texts.num_prompt >= 0).all() and (lengths > texts.num_prompt).all())
    )
    if not is_sound:
        raise ModelFileError(f"{path}: its index does not fit its tokens; write it again")
    return texts


def load_shards(folder: Path) -> Texts:
    """All shards of a folder, or one file, in the order of their names."""
    paths = sorted(folder.glob("*.npz")) if folder.is_dir() else [folder]
    if not paths or not paths[0].is_file():
        raise ConfigError(f"{folder} holds no written text (.npz); write some first")
    return joined([load_shard(path) for path in paths])
