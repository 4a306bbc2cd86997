"""The target writes training text into a folder of shards, with one engine or with several that share a GPU,
since one is bound by Python.

Shards are saved on the way and counted when a run is taken up again. Invariant: every token in the folder was
chosen by the target.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import setitem
from pathlib import Path
from typing import Any

from paceline.api.llm import LLM
from paceline.core.errors import ConfigError
from paceline.runtime.device import resolve
from paceline.train.shards import Texts, Written, from_written, load_shard, load_shards, save_shard
from paceline.train.talk import Style, conversations
from paceline.train.variations import varied
from paceline.train.writing import Writer

PART = 500_000  # answer tokens of a shard
KV_BYTES = 6 << 30  # of each engine where several share a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteConfig:
    """What the target is to write: a number of answer tokens, or as many as fit a time."""

    model: str
    folder: Path
    device: str = "auto"
    turns: Sequence[Sequence[str]] = ()  # what users ask, turn by turn; none: the target invents it
    is_varied: bool = False  # prompts are also summarized, translated, asked about, ... (variations.py)
    seed: int = 0
    num_tokens: int | None = None
    seconds: float | None = None
    processes: int = 1  # engines


def write_texts(config: WriteConfig, tell: Callable[[int], None]) -> Texts:
    """-> all text of the folder, what earlier calls wrote included; tell: answer tokens so far."""
    config.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + (config.seconds or float("inf"))
    if config.processes == 1:
        _write_part(config, 0, deadline, tell)
    else:
        _write_with_many(config, deadline, tell)
    if not any(config.folder.glob("*.npz")):
        raise ConfigError(f"no text was written into {config.folder} in the time given; give more time")
    return load_shards(config.folder)


def _write_part(config: WriteConfig, number: int, deadline: float, tell: Callable[[int], None]) -> None:
    """The part of one engine: shards are saved on the way, and counted when a run is taken up again."""
    earlier = [load_shard(path) for path in config.folder.glob(f"text-{number:02d}-*.npz")]
    parts, done = len(earlier), sum(texts.num_answer_tokens for texts in earlier)
    wanted = float("inf") if config.num_tokens is None else config.num_tokens / config.processes
    batch, is_alone = 16, config.processes == 1
    options: dict[str, Any] = {"device": config.device, "enable_prefix_caching": False, "progress": is_alone}
    if resolve(config.device).type == "cuda":
        batch = 256
        options |= {"max_num_batched_tokens": 8192} | ({} if is_alone else {"kv_cache_memory": KV_BYTES})
    made: list[Written] = []
    kept = 0  # answer tokens in `made`

    def is_over() -> bool:
        return time.time() > deadline or done + kept >= wanted

    def save() -> None:
        path = config.folder / f"text-{number:02d}-{parts:04d}.npz"
        save_shard(path, from_written(made, llm.checkpoint.config.vocab_size))
        made.clear()

    if is_over():
        return
    with LLM(config.model, speculative_config=None, max_num_seqs=batch, **options) as llm:
        seed = config.seed + 1000 * parts + 1_000_003 * number  # further shards are other conversations
        if config.is_varied and config.turns and llm.tokenizer.has_chat_template:
            style, prompts = Style(llm.tokenizer, random.Random(seed)), [turns[0] for turns in config.turns]
            talks = varied(style, prompts)
        else:
            talks = conversations(llm.tokenizer, config.turns, seed)
        try:
            for written in Writer(llm, batch).write(talks, is_over):
                made.append(written)
                kept += len(written.answer)
                tell(done + kept)
                if kept >= PART:
                    save()
                    parts, done, kept = parts + 1, done + kept, 0
        finally:  # interrupted, too: what is written stays
            if made:
                save()


def _write_with_many(config: WriteConfig, deadline: float, tell: Callable[[int], None]) -> None:
    """A process that dies costs its own text since it last saved, and no other's."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", config.processes)
    shares = [(config, number, deadline, counts) for number in range(config.processes)]
    workers = [context.Process(target=_work, args=share) for share in shares]
    with _shared_gpu(resolve(config.device).type == "cuda"):
        for worker in workers:
            worker.start()
            time.sleep(0.5)  # the first compiles, later ones find more and more compiled
        while any(worker.is_alive() for worker in workers):
            time.sleep(1.0)
            tell(sum(counts[:]))


def _work(config: WriteConfig, number: int, deadline: float, counts: Any) -> None:
    import torch

    torch.set_num_threads(1)
    _write_part(config, number, deadline, partial(setitem, counts, number))


@contextmanager
def _shared_gpu(is_gpu: bool) -> Iterator[None]:
    """While inside, NVIDIA's daemon, if it works here, lets processes run on a GPU together, not in turns."""
    control = shutil.which("nvidia-cuda-mps-control") if is_gpu else None
    is_started = control is not None and _is_done([control, "-d"])
    trial = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
    if is_started and not _is_done(trial):  # it starts where it cannot be used: in a container, say
        _is_done([str(control)], b"quit\n")
        is_started = False
    try:
        yield
    finally:
        if is_started:
            _is_done([str(control)], b"quit\n")


def _is_done(command: Sequence[str], typed: bytes | None = None) -> bool:
    try:
        return subprocess.run(command, input=typed, capture_output=True, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False
