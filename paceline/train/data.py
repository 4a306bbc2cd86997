"""The target writes training text into a folder of shards, with one engine or several that share a GPU.

Shards are saved on the way, and they and the time they took are counted when a run is taken up again.
Invariant: every token in the folder was chosen by the target; what is asked goes through the engine's own
step, with a seed, so a run can be repeated.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import setitem
from pathlib import Path
from typing import Any, NamedTuple

from paceline.api.llm import LLM
from paceline.core.errors import ConfigError
from paceline.core.options import require
from paceline.core.params import SamplingParams
from paceline.core.types import FinishReason, Request
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.fetch import whole
from paceline.loaders.fields import read_json
from paceline.loaders.tokenizer import Tokenizer
from paceline.models.attention import bytes_per_token
from paceline.models.config import ModelConfig
from paceline.runtime.backend import SPARE_ON_GPU, backend_for, free_memory, resolve, weight_bytes
from paceline.train.programs import with_programs
from paceline.train.talk import Ask, Conversation, Style, conversations, varied
from paceline.train.texts import Texts, Written, from_written, load_shard, load_shards, save_shard

MAX_PROMPT = 1400  # tokens
PART = 500_000  # answer tokens of a shard
LOW_WATER = 0.6  # of the batch: below, new conversations are let in
LONGEST, USUAL = 2048, 800  # tokens of a prompt and its answer: what there may be, and what room is made for
BATCHES = {"cpu": 16, "cuda": 256}  # conversations that an engine carries on at once
BESIDE = 2 * SPARE_ON_GPU  # bytes of an engine beside its weights and KV cache: context, graphs, logits
MOST_ENGINES, SHARE = 14, 100_000  # more wait for each other; answer tokens for which one is started
SPENT = "spent.json"  # in the text's folder: seconds of writing so far


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
    seconds: float | None = None  # those of earlier calls counted
    deadline: float = float("inf")  # of time.monotonic(): a later call goes on from there
    processes: int | None = None  # engines; None: as many as the device has room for
    code: float = 0.0  # share of conversations that are about programs


class Engines(NamedTuple):
    """What writes on a device."""

    number: int
    kv_bytes: int | None  # of each; None: the engine's own choice


def engines_for(config: WriteConfig, model: ModelConfig) -> Engines:
    """As asked, or as many as memory and cores of a GPU's machine allow: an engine is bound by Python."""
    device = resolve(config.device)
    if device.type == "cpu":
        return Engines(config.processes or 1, None)
    weights = weight_bytes(model, "bfloat16")
    room = 0.95 * (free_memory(device, model, "bfloat16") + weights + SPARE_ON_GPU)
    per_token = bytes_per_token(model, backend_for(device).kv_format("bfloat16", "auto"))
    useful = MOST_ENGINES if config.num_tokens is None else -(-config.num_tokens // SHARE)
    return shared_gpu(room, weights + BESIDE, BATCHES["cuda"] * per_token, config.processes, useful)


def shared_gpu(
    room: float, fixed: float, per_position: int, asked: int | None = None, useful: int = MOST_ENGINES
) -> Engines:
    """room: bytes of the GPU; fixed: of an engine without its KV cache; per_position: of the KV cache, one
    token of every conversation."""
    most = max(int(room / (fixed + USUAL * per_position)), 1)
    count = asked or min(most, max((os.cpu_count() or 1) - 2, 1), MOST_ENGINES, useful)
    kv_bytes = int(min(room / count - fixed, LONGEST * per_position))
    each, total = (fixed + USUAL * per_position) / 1e9, room / 1e9
    remedy = f"of the GPU {total:.0f} GB can be used and each takes {each:.0f}; give fewer"
    require(kv_bytes >= USUAL / 4 * per_position, "processes", count, remedy)
    return Engines(count, kv_bytes)


def write_texts(config: WriteConfig, tell: Callable[[int], None]) -> Texts:
    """-> all text of the folder, what earlier calls wrote included; tell: answer tokens so far."""
    config.folder.mkdir(parents=True, exist_ok=True)
    began, noted = time.monotonic(), config.folder / SPENT
    before = float(read_json(noted).get("seconds", 0)) if noted.is_file() else 0.0
    left = float("inf") if config.seconds is None else config.seconds - before
    deadline = min(began + left, config.deadline)
    try:
        if began < deadline:
            engines = engines_for(config, open_checkpoint(config.model, progress=False).config)
            write = _write_part if engines.number == 1 else _write_with_many
            write(config, engines, deadline, tell)
    finally:
        with whole(noted) as part:
            part.write_text(json.dumps({"seconds": round(before + time.monotonic() - began, 1)}))
    if not any(config.folder.glob("*.npz")):
        raise ConfigError(f"no text was written into {config.folder} in the time given; give more time")
    return load_shards(config.folder)


def _write_part(
    config: WriteConfig, engines: Engines, deadline: float, tell: Callable[[int], None], number: int = 0
) -> None:
    """The part of one engine: shards are saved on the way, and counted when a run is taken up again."""
    earlier = [load_shard(path) for path in config.folder.glob(f"text-{number:02d}-*.npz")]
    parts, done = len(earlier), sum(texts.num_answer_tokens for texts in earlier)
    wanted = float("inf") if config.num_tokens is None else config.num_tokens / engines.number
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
    options = _options(config, engines)
    with LLM(config.model, **options) as llm:
        # further shards are other conversations
        talks = _talks(config, llm.tokenizer, config.seed + 1000 * parts + 1_000_003 * number)
        try:
            for written in Writer(llm, options["max_num_seqs"]).write(talks, is_over):
                made.append(written)
                kept += len(written.answer)
                tell(done + kept)
                if kept >= PART:
                    save()
                    parts, done, kept = parts + 1, done + kept, 0
        finally:  # interrupted, too: what is written stays
            if made:
                save()


def _options(config: WriteConfig, engines: Engines) -> dict[str, Any]:
    """Of an engine that writes."""
    kind = resolve(config.device).type
    own = open_checkpoint(config.model, progress=False).config.max_context
    found: dict[str, Any] = {"device": config.device, "enable_prefix_caching": False}
    found |= {"speculative_config": None, "max_num_seqs": BATCHES[kind], "max_model_len": min(own, LONGEST)}
    if kind != "cpu":
        found |= {"max_num_batched_tokens": 8192, "kv_cache_memory": engines.kv_bytes}
    return found | {"progress": engines.number == 1}


def _talks(config: WriteConfig, tokenizer: Tokenizer, seed: int) -> Iterator[Conversation]:
    style = Style(tokenizer, random.Random(seed))
    if config.is_varied and config.turns and tokenizer.has_chat_template:
        talks = varied(style, [turns[0] for turns in config.turns])
    else:
        talks = conversations(tokenizer, config.turns, seed)
    return with_programs(style, talks, config.code) if tokenizer.has_chat_template else talks


def _write_with_many(
    config: WriteConfig, engines: Engines, deadline: float, tell: Callable[[int], None]
) -> None:
    """A process that dies costs its own text since it last saved, and no other's."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", engines.number)
    shares = [(config, engines, number, deadline, counts) for number in range(engines.number)]
    workers = [context.Process(target=_work, args=share) for share in shares]
    for worker in workers:
        worker.start()
        time.sleep(0.5)  # the first compiles, later ones find more and more compiled
    while any(worker.is_alive() for worker in workers):
        time.sleep(1.0)
        tell(sum(counts[:]))


def _work(config: WriteConfig, engines: Engines, number: int, deadline: float, counts: Any) -> None:
    import torch

    torch.set_num_threads(1)
    _write_part(config, engines, deadline, partial(setitem, counts, number), number)
