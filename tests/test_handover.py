"""Prefill and decode apart, within one process: what one LLM has read another goes on from, with the same bits
and texts; and frames that are torn, foreign or of another size.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError, HandoverError
from paceline.core.types import BLOCK_SIZE, Cached, Request, Segment
from paceline.drafters import registry
from paceline.engine.engine import Engine
from paceline.engine.handover import Handover, Handovers, received
from tests.heads import random_head
from tests.make_models import tiny_hf, tiny_tokenizer

PROMPT = "In a paceline, cyclists ride one behind the other. The rider in front breaks the wind, " * 4
OTHER = "The rider in front breaks the wind and the line goes on, and on, and on. " * 3
OPTIONS: dict[str, Any] = {"speculative_config": None, "progress": False, "max_model_len": 512, "seed": 7}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, logprobs=2),
    "seeded": SamplingParams(temperature=1, seed=11, max_tokens=24, logprobs=2),
    "unseeded": SamplingParams(temperature=1, max_tokens=24, logprobs=2),
    "cut": SamplingParams(temperature=1, top_p=0.9, frequency_penalty=0.5, max_tokens=24),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("apart")
    tiny_hf(made, "llama", max_position_embeddings=1024)
    tiny_tokenizer(made)
    return made


class Trio:
    """A model that reads prompts, one that goes on from what it has read, and one that does both."""

    def __init__(self, folder: Path, kernels: str, dtype: str) -> None:
        made = [LLM(str(folder), kernels=kernels, dtype=dtype, **OPTIONS) for _ in range(3)]
        self.reader, self.writer, self.alone = made
        self.folder = folder

    def draft(self, method: dict[str, Any] | None) -> None:
        """With fresh engines, which have the same drafter and know nothing."""
        for llm in (self.reader, self.writer, self.alone):
            context = llm.context
            empty = type(context.executor.kv)(context.executor.kv.num_blocks)
            context.executor.kv = empty
            drafter = registry.create(*registry.parse(method), context) if method else None
            config = replace(llm.engine.config, num_speculative_tokens=3 if method else 0)
            llm.engine = Engine(context.executor, drafter, config)
            vars(llm).pop("handovers", None)
            llm._intake.seeds.seed(7)  # unseeded requests of both draw the same

    def close(self) -> None:
        for llm in (self.reader, self.writer, self.alone):
            llm.close()


@pytest.fixture(scope="module", params=[("torch", "float32"), ("exact", "int8")], ids="-".join)
def trio(request: pytest.FixtureRequest, folder: Path) -> Iterator[Trio]:
    made = Trio(folder, *request.param)
    yield made
    made.close()


def methods(trio: Trio) -> dict[str, dict[str, Any] | None]:
    """The kinds of what a drafter keeps: nothing, K/V of a model, rows of a head, and counts of tokens."""
    checkpoint = trio.reader.checkpoint
    return {
        "plain": None,
        "draft model": {"method": "draft_model", "model": str(trio.folder), "num_speculative_tokens": 3},
        "eagle": {"method": "eagle", "model": random_head("eagle", checkpoint), "num_speculative_tokens": 3},
        "dflash": {
            "method": "dflash",
            "model": random_head("dflash", checkpoint),
            "num_speculative_tokens": 3,
        },
        "suffix": {"method": "suffix", "num_speculative_tokens": 3},
    }


def carried(handover: Handover, taker: LLM) -> Handover:
    """Through a frame of bytes."""
    frame = b"".join(bytes(part) for part in handover.frame())
    ours = taker.handovers
    return received(io.BytesIO(frame), handover.tokens, ours.identity, ours.shapes(handover.tokens))


def said(llm: LLM, prompts: list[str], params: SamplingParams) -> list[Any]:
    results = llm.generate(prompts, params)
    assert llm.engine.executor.kv.num_used == 0
    llm.engine.check()
    return [[(out.token_ids, out.logprobs) for out in result.outputs] for result in results]


@pytest.mark.parametrize("name", ["plain", "draft model", "eagle", "dflash", "suffix"])
def test_the_text_is_the_same(trio: Trio, name: str) -> None:
    for sampling, params in SAMPLINGS.items():
        trio.draft(methods(trio)[name])
        for prompt in (PROMPT, OTHER):
            handover = carried(trio.reader.export(prompt), trio.writer)
            assert trio.writer.adopt(handover) == handover.num_tokens > 3 * BLOCK_SIZE
        found = said(trio.writer, [PROMPT, OTHER, "a"], params)
        assert found == said(trio.alone, [PROMPT, OTHER, "a"], params), sampling
        hits = trio.writer.engine.scheduler.num_prefix_hits
        assert hits == sum(trio.writer.handovers.shapes(tokens)["target/0"][1][1] * BLOCK_SIZE
                           for tokens in (trio.writer._intake.encode(p).tokens for p in (PROMPT, OTHER)))  # fmt: skip


def test_the_bits_are_the_same(trio: Trio) -> None:
    trio.draft(None)
    handover = carried(trio.reader.export(PROMPT), trio.writer)
    trio.writer.adopt(handover)
    trio.alone.generate(PROMPT, SAMPLINGS["greedy"])

    def logits(llm: LLM) -> torch.Tensor:
        executor, cached = llm.engine.executor, Cached()
        executor.kv.adopt_prefix(cached, handover.tokens)
        assert cached.num_cached == handover.num_tokens
        rest = handover.tokens[cached.num_cached :]
        assert executor.kv.reserve(cached, len(handover.tokens))
        found = executor.forward([Segment(rest, cached, None, len(rest))]).logits.clone()
        executor.kv.free(cached)
        return found

    assert torch.equal(logits(trio.writer), logits(trio.alone))
    for one, other in zip(trio.writer.export(PROMPT).parts.values(), handover.parts.values(), strict=True):
        assert torch.equal(one, other)


def test_drafters_go_on_where_the_others_were(trio: Trio) -> None:
    """A draft model reads nothing of the prompt again, a head has its rows: both draft what they would have."""
    for name in ("draft model", "eagle"):
        trio.draft(methods(trio)[name])
        handover = carried(trio.reader.export(PROMPT), trio.writer)
        assert any(name.startswith("0.") for name in handover.parts)
        trio.writer.adopt(handover)
        drafts = []
        for llm in (trio.writer, trio.alone):
            result = llm.generate(PROMPT, SAMPLINGS["greedy"])[0]
            drafts.append((result.stats.num_drafted, result.stats.num_accepted))
        assert drafts[0] == drafts[1]
        assert drafts[0][0] > 0
    trio.draft(methods(trio)["suffix"])
    assert list(trio.reader.export(PROMPT).parts) == ["target/0", "target/1"]


def test_what_is_there_already_is_not_taken_twice(trio: Trio) -> None:
    trio.draft(None)
    handover = trio.reader.export(PROMPT)
    before = trio.writer.engine.executor.kv.num_known(handover.tokens)
    assert (before, trio.writer.handovers.num_missing(handover.tokens)) == (0, handover.num_tokens)
    assert trio.writer.adopt(handover) == trio.writer.adopt(handover) == handover.num_tokens
    assert trio.writer.handovers.num_missing(handover.tokens) == 0
    longer = trio.writer._intake.encode(PROMPT + OTHER).tokens
    trio.writer.adopt(trio.reader.export(PROMPT + OTHER))  # begins with blocks that are here
    assert trio.writer.engine.executor.kv.num_known(longer) == (len(longer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert trio.reader.export("a").parts["target/0"].numel() == 0
    assert trio.writer.adopt(trio.reader.export("a")) == 0


def test_a_full_cache_takes_nothing(trio: Trio, folder: Path) -> None:
    trio.draft(None)
    handover = trio.reader.export(PROMPT)
    kv, held = trio.writer.engine.executor.kv, Cached()
    assert kv.reserve(held, (kv.num_blocks - 2) * BLOCK_SIZE)
    assert trio.writer.adopt(handover) == 0
    kv.check([held])
    kv.free(held)
    assert trio.writer.adopt(handover) == handover.num_tokens
    kv.check([])


def test_only_engines_of_one_kind(trio: Trio, folder: Path, tmp_path: Path) -> None:
    trio.draft(None)
    handover = trio.reader.export(PROMPT)
    tiny_hf(tmp_path, "llama", max_position_embeddings=1024, num_hidden_layers=1)
    tiny_tokenizer(tmp_path)
    kernels, dtype = trio.reader.options.kernels, trio.reader.options.dtype
    with LLM(str(tmp_path), kernels=kernels, dtype=dtype, **OPTIONS) as other:
        with pytest.raises(HandoverError, match="the model is"):
            other.adopt(handover)
        with pytest.raises(HandoverError, match="the model is"):
            carried(handover, other)
    forged = handover._replace(parts={n: part[:, :-1] for n, part in handover.parts.items()})
    with pytest.raises(HandoverError, match="another size"):
        trio.writer.adopt(forged)
    with pytest.raises(ConfigError, match="prefix cache"):
        Handovers(Engine(trio.writer.context.executor, None,
                         replace(trio.writer.engine.config, enable_prefix_caching=False)), "", "")  # fmt: skip


def test_frames_that_are_torn_or_lie(trio: Trio) -> None:
    trio.draft(None)
    handover, ours = trio.reader.export(PROMPT), trio.writer.handovers
    frame = b"".join(bytes(part) for part in handover.frame())
    wanted = ours.shapes(handover.tokens)

    def take(data: bytes) -> Handover:
        return received(io.BytesIO(data), handover.tokens, ours.identity, wanted)

    assert take(frame).num_tokens == handover.num_tokens
    for end in (0, 3, 7, 40, len(frame) // 2, len(frame) - 1):
        with pytest.raises(HandoverError, match="its middle"):
            take(frame[:end])
    with pytest.raises(HandoverError, match="no handover"):
        take(b"HTTP/1.1 404 Not Found\r\n\r\n")
    with pytest.raises(HandoverError, match="no handover"):
        take(frame[:4] + b"\xff\xff\xff\xff" + frame[8:])
    header = json.loads(frame[8 : 8 + int.from_bytes(frame[4:8], "little")])
    huge = {**header, "parts": {"target/0": ["torch.float32", [2**40]]}}
    for lie in (
        huge,
        {**header, "tokens": [1, 2, 3]},
        {**header, "parts": [1]},
        [],
        {**header, "identity": 3},
    ):
        packed = json.dumps(lie).encode()
        with pytest.raises(HandoverError):
            take(frame[:4] + len(packed).to_bytes(4, "little") + packed + frame)


def test_moves_that_wait_are_done_before_blocks_are_written(trio: Trio) -> None:
    """A block that was given back may be the target of a copy that no pass has made yet."""
    trio.draft(None)
    handover = trio.reader.export(PROMPT)
    executor = trio.writer.engine.executor
    for slot in range(0, executor.kv.num_blocks * BLOCK_SIZE, BLOCK_SIZE):
        executor.kv._move([slot], [slot + 1])
    trio.writer.adopt(handover)
    assert executor.kv.take_moves() is None
    for name, part in trio.writer.export(PROMPT).parts.items():
        assert torch.equal(part, handover.parts[name])


def test_a_request_alone_keeps_its_seed(trio: Trio) -> None:
    """Exporting draws nothing from the seeds of requests that have none."""
    trio.draft(None)
    state = trio.reader._intake.seeds.getstate()
    trio.reader.export(PROMPT)
    assert trio.reader._intake.seeds.getstate() == state
    assert isinstance(trio.reader.engine.scheduler.requests, list)
    assert not [each for each in trio.reader.engine.scheduler.requests if isinstance(each, Request)]
