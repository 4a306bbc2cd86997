"""The target writes training text into a folder of shards, with one engine or several that share a GPU.

Shards are saved on the way and counted when a run is taken up again. Invariant: every token in the folder was
chosen by the target; what is asked goes through the engine's own step, with a seed, so a run can be repeated.
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
from paceline.core.params import SamplingParams
from paceline.core.types import FinishReason, Request
from paceline.runtime.backend import resolve
from paceline.train.talk import Ask, Conversation, Style, conversations, varied
from paceline.train.texts import Texts, Written, from_written, load_shard, load_shards, save_shard

MAX_PROMPT = 1400  # tokens
PART = 500_000  # answer tokens of a shard
LOW_WATER = 0.6  # of the batch: below, new conversations are let in
KV_BYTES = 6 << 30  # of each engine where several share a GPU


class Writer:
    """Drives many conversations at once through one engine. New ones are admitted many at a time, so that
    prompts are read together and most passes are plain decoding (on a GPU one recorded graph)."""

    def __init__(self, llm: LLM, batch: int) -> None:
        self.llm, self.batch = llm, batch
        self._open: dict[str, tuple[Request, Ask, Conversation]] = {}

    def write(self, conversations: Iterator[Conversation], is_over: Callable[[], bool]) -> Iterator[Written]:
        """Until the conversations end, or `is_over`: what is unfinished then is dropped."""
        engine = self.llm.engine
        try:
            while not is_over():
                if len(self._open) <= LOW_WATER * self.batch:
                    while len(self._open) < self.batch and (conversation := next(conversations, None)):
                        self._resume(conversation, None)
                if not self._open:
                    return
                for emission in engine.step():
                    if emission.request.is_finished and (written := self._finished(emission.request)):
                        yield written
        finally:
            for request, _, conversation in self._open.values():
                engine.abort(request)
                engine.stats.pop(request.id, None)
                conversation.close()
            self._open.clear()

    def _resume(self, conversation: Conversation, answer: list[int] | None) -> None:
        """Let it go on to its next question, and put that to the engine."""
        try:
            ask = next(conversation) if answer is None else conversation.send(answer)
        except StopIteration:
            return
        if not 0 < len(ask.prompt) <= min(MAX_PROMPT, self.llm.engine.config.max_model_len - 2):
            return conversation.close()  # grew too long
        params = SamplingParams(temperature=ask.temperature, max_tokens=ask.max_tokens, seed=ask.seed)
        (request,) = self.llm._intake.requests(list(ask.prompt), params)
        request.text_stop = None  # no text is streamed, so none is decoded
        self.llm.engine.add(request)
        self._open[request.id] = request, ask, conversation

    def _finished(self, request: Request) -> Written | None:
        """What was written, if it is kept; the conversation goes on."""
        _, ask, conversation = self._open.pop(request.id)
        self.llm.engine.stats.pop(request.id, None)
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            conversation.close()
            return None
        self._resume(conversation, request.output)
        return Written(ask.prompt, request.output, ask.temperature) if ask.is_kept else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteConfig:
    """What the target is to write: a number of answer tokens, or as many as fit a time."""

    model: str
    folder: Path
    device: str = "auto"
    turns: Sequence[Sequence[str]] = ()  # what users ask, turn by turn; none: the target invents it
    is_varied: bool = False  # prompts are also summarized, translated, asked about, ... (talk.py)
    seed: int = 0
    num_tokens: int | None = None
    seconds: float | None = None
    processes: int = 1  # engines


def write_texts(config: WriteConfig, tell: Callable[[int], None]) -> Texts:
    """-> all text of the folder, what earlier calls wrote included; tell: answer tokens so far."""
    config.folder.mkdir(parents=True, exist_ok=True)
    write = _write_part if config.processes == 1 else _write_with_many
    write(config, time.monotonic() + (config.seconds or float("inf")), tell)
    if not any(config.folder.glob("*.npz")):
        raise ConfigError(f"no text was written into {config.folder} in the time given; give more time")
    return load_shards(config.folder)


def _write_part(config: WriteConfig, deadline: float, tell: Callable[[int], None], number: int = 0) -> None:
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
        return time.monotonic() > deadline or done + kept >= wanted

    def save() -> None:
        path = config.folder / f"text-{number:02d}-{parts:04d}.npz"
        save_shard(path, from_written(made, llm.checkpoint.config.vocab_size))
        made.clear()

    if is_over():
        return
    with LLM(config.model, speculative_config=None, max_num_seqs=batch, **options) as llm:
        seed = config.seed + 1000 * parts + 1_000_003 * number  # further shards are other conversations
        if config.is_varied and config.turns and llm.tokenizer.has_chat_template:
            talks = varied(Style(llm.tokenizer, random.Random(seed)), [turns[0] for turns in config.turns])
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
    _write_part(config, deadline, partial(setitem, counts, number), number)


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
