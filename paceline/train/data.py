"""The target writes training text into a folder of shards, until there is enough.

Shards are saved on the way and counted when a run is taken up again. Invariant: every token in the folder was
chosen by the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paceline.api.llm import LLM
from paceline.train.shards import Texts, Written, from_written, joined, load_shard, save_shard
from paceline.train.talk import conversations
from paceline.train.writing import Writer

PART = 500_000  # answer tokens of a shard


def read_shards(folder: Path) -> Texts | None:
    """What was written so far."""
    paths = sorted(folder.glob("*.npz"))
    return joined([load_shard(path) for path in paths]) if paths else None


def write(
    llm: LLM,
    prompts: Sequence[Sequence[str]],
    folder: Path,
    *,
    seed: int,
    tell: Callable[[int], None],  # answer tokens so far
    num_tokens: int | None = None,
    seconds: float | None = None,
) -> Texts:
    """Answers of so many tokens in all, or as many as can be written in the time; prompts: turn by turn, or
    none at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = read_shards(folder)
    done = before.num_answer_tokens if before is not None else 0
    number = len(list(folder.glob("*.npz")))
    writer, deadline = Writer(llm, llm.engine.config.max_num_seqs), time.monotonic() + (seconds or np.inf)
    made: list[Written] = []
    kept = 0  # answer tokens in `made`

    def is_over() -> bool:
        return time.monotonic() > deadline or (num_tokens is not None and done + kept >= num_tokens)

    talks = conversations(
        llm.tokenizer, prompts, seed + 1000 * number
    )  # further shards are other conversations

    def save() -> None:
        save_shard(folder / f"text-{number:04d}.npz", from_written(made, llm.checkpoint.config.vocab_size))
        made.clear()

    try:
        for written in () if is_over() else writer.write(talks, is_over):
            made.append(written)
            kept += len(written.answer)
            tell(done + kept)
            if kept >= PART:
                save()
                number, done, kept = number + 1, done + kept, 0
    finally:  # interrupted, too: what is written stays
        if made:
            save()
    found = read_shards(folder)
    assert found is not None, "nothing was written"
    return found
