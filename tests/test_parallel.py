"""Tensor parallelism: the same bits and the same text with one, two and four ranks, and ranks that fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError, RankError
from paceline.core.types import BLOCK_SIZE, Cached, Segment
from paceline.cpu import parallel
from paceline.cpu.parallel import CpuGroup
from paceline.drafters import registry
from paceline.engine.engine import Engine
from paceline.loaders.checkpoint import open_checkpoint
from paceline.models.attention import bytes_per_token
from paceline.models.config import ExpertsConfig
from paceline.models.shard import Shard
from paceline.runtime import group
from paceline.runtime.backend import TorchBackend, backend_for
from paceline.runtime.ranks import RanksExecutor
from tests.heads import random_head
from tests.make_models import tiny_hf, tiny_tokenizer

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 256}
PROMPTS = [
    "the wind the wind the",
    "In a paceline, cyclists ride one behind the other. The rider in",
    "a",
    "12 riders",
]
OPTIONS: dict[str, Any] = {
    "speculative_config": None,
    "progress": False,
    "max_model_len": 128,
    "max_num_seqs": 4,
}
KINDS = [
    ("torch", "float32", 2),
    ("exact", "int8", 2),
    pytest.param(("torch", "float32", 4), marks=pytest.mark.slow),
    pytest.param(("exact", "float32", 3), marks=pytest.mark.slow),
    pytest.param(("exact", "int4", 4), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("parallel")
    tiny_hf(made, "llama", **SIZES)
    tiny_tokenizer(made)
    return made


class Run:
    """A model with some ranks; drafters are made for it one after the other."""

    def __init__(self, folder: Path, kernels: str, dtype: str, size: int, stages: int = 1) -> None:
        self.drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
        config = open_checkpoint(str(folder)).config
        kept = backend_for(torch.device("cpu"), kernels).kv_format(dtype, "auto")
        room = 13 * BLOCK_SIZE * bytes_per_token(config, kept)  # for three texts
        memory: dict[str, int] = {"kv_cache_memory": room}
        memory |= {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
        self.llm = LLM(str(folder), kernels=kernels, dtype=dtype, seed=7, **memory, **OPTIONS)
        self.built = self.llm.engine

    def say(self, method: dict[str, Any] | None, params: SamplingParams, prompts: list[str]) -> list[Any]:
        context, config = self.llm.context, self.built.config
        drafter = registry.create(*registry.parse(method), context) if method else None
        config = replace(config, num_speculative_tokens=3 if method else 0)
        self.llm.engine = Engine(context.executor, drafter, config)
        results = self.llm.generate(prompts, params)
        assert self.llm.engine.executor.kv.num_used == 0
        return [[(out.token_ids, out.logprobs) for out in result.outputs] for result in results]


def logits_of(llm: LLM) -> torch.Tensor:
    """Of a prompt and of a tree after it, with hidden states."""
    executor, cached = llm.engine.executor, Cached()
    assert executor.kv.reserve(cached, 40)
    first = executor.forward([Segment(list(range(3, 30)), cached, None, 27)]).logits.clone()
    cached.num_cached = 27
    tree = executor.forward([Segment([5, 6, 7, 8], cached, [-1, 0, 0, 2], 4)], hidden_layers=(1, 2))
    executor.kv.free(cached)
    return torch.cat([first.flatten(), tree.logits.flatten(), *(h.flatten() for h in tree.hidden.values())])


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Run, Run]]:
    kernels, dtype, size = request.param
    one, several = Run(folder, kernels, dtype, 1), Run(folder, kernels, dtype, size)
    yield one, several
    for run in (one, several):
        run.llm.close()


def test_logits_have_the_same_bits(pair: tuple[Run, Run]) -> None:
    one, several = (logits_of(run.llm) for run in pair)
    assert torch.equal(one, several)


@pytest.mark.parametrize("family", ["gpt_oss", "olmo2"])
def test_other_architectures(family: str, tmp_path: Path) -> None:
    """Experts, biases, sinks and windows; norms over all heads."""
    tiny_hf(tmp_path, family)
    tiny_tokenizer(tmp_path)
    found = []
    for size in (1, 2):
        with LLM(str(tmp_path), dtype="int8", tensor_parallel_size=size, **OPTIONS) as llm:
            found.append(logits_of(llm))
    assert torch.equal(*found)


EXPERTS = [("qwen3_moe", "int8", 2), ("mixtral", "float32", 4), ("qwen2_moe", "int4", 3)]


@pytest.mark.parametrize(("family", "dtype", "size"), EXPERTS)
def test_experts_by_rank(family: str, dtype: str, size: int, tmp_path: Path) -> None:
    """An expert is whole on one rank, the shared one of Qwen2 on all."""
    tiny_hf(tmp_path, family, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    tiny_tokenizer(tmp_path)
    found = []
    for options in ({}, {"tensor_parallel_size": size, "enable_expert_parallel": True}):
        with LLM(str(tmp_path), dtype=dtype, **options, **OPTIONS) as llm:
            said = llm.generate(PROMPTS, WAYS["greedy"])
            found.append((logits_of(llm), [result.token_ids for result in said]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_experts_are_needed(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no experts"):
        LLM(str(folder), tensor_parallel_size=2, enable_expert_parallel=True, **OPTIONS)


ENDS_S = 60  # after which requests would hang: 10 s on a machine that does nothing else
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
WAYS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(
        temperature=0.9, top_p=0.9, seed=11, n=2, max_tokens=24, ignore_eos=True, logprobs=1
    ),
    "unseeded": SamplingParams(temperature=1.1, max_tokens=24, ignore_eos=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["plain", "ngram", "eagle", "draft_model", "early_exit"])
def test_texts_are_the_same(pair: tuple[Run, Run], method: str, way: str) -> None:
    """Four requests together, for which there is not enough room, then one that begins like them."""
    one, named = pair[0], {"method": method, "num_speculative_tokens": 3}
    given: dict[str, Any] | None = {"plain": None, "draft_model": one.drafts}.get(method, named)
    if method == "eagle":
        given = {**named, "model": random_head("eagle", one.llm.checkpoint)}
    params, found = WAYS[way], []
    for run in pair:
        said = run.say(given, params, PROMPTS)
        found.append([said, run.say(given, params, PROMPTS[1:2])])
    assert found[0] == found[1]


def test_memory_is_short_and_prefixes_are_found(pair: tuple[Run, Run]) -> None:
    """What the test above relies on."""
    llm = pair[1].llm
    assert isinstance(llm.engine.executor, RanksExecutor)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    requests = [llm._intake.requests(tokens, WAYS["greedy"], 0)[0] for tokens in prompts]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert sum(request.num_preemptions for request in requests) > 0
    (again,) = llm.generate(PROMPTS[1], WAYS["greedy"])
    assert again.num_cached_tokens


def test_a_rank_holds_its_part(pair: tuple[Run, Run], folder: Path) -> None:
    one, several = (run.llm.engine.executor for run in pair)
    config = open_checkpoint(str(folder)).config
    whole = config.vocab_size * config.hidden_size * 4  # the embedding
    assert several.memory.parts[0].shape[2] == config.num_kv_heads // several.num_ranks
    if isinstance(several.backend, TorchBackend):
        assert several.decoder.num_bytes - whole == (one.decoder.num_bytes - whole) / several.num_ranks
    with pytest.raises(ConfigError, match="4 KV heads; use at most that many"):
        Shard(0, 5).check(config)
    with pytest.raises(ConfigError, match="experts, which are not split here; use 1"):
        Shard(0, 2).check(replace(config, experts=ExpertsConfig(8, 2, 32)), "torch")


def test_an_order_that_comes_while_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message, and the pass after it before the rank has seen what the first order was."""
    number = os.memfd_create("orders")
    first, other = (CpuGroup(Shard(rank, 2), number) for rank in range(2))
    os.close(number)
    wait = parallel.wait_for_order

    def late(at: int, seen: int) -> bool:
        has_come = bool(wait(at, seen))
        if seen == 0:
            parallel.give_order(first.at, 5, 6, 7)
        return has_come

    monkeypatch.setattr(parallel, "wait_for_order", late)
    first.call()
    assert other.next_pass() is None
    assert other.next_pass() == (5, 6, 7)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("kernels", ["torch", "exact"])
def test_a_lost_rank_ends_requests(
    folder: Path, kernels: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or stopped for good: in the middle of a text, with an error, and nothing is left."""
    with LLM(str(folder), kernels=kernels, tensor_parallel_size=2, **OPTIONS) as llm:
        ranks = llm.engine.executor.ranks  # type: ignore[attr-defined]
        (process,) = ranks._processes
        next(llm.stream("the wind", LONG))
        monkeypatch.setattr(group, "LOST_S", 2.0)  # from now on: a start may take its time
        threading.Timer(0.2, process.send_signal, [number]).start()
        started = time.monotonic()
        with pytest.raises(RankError, match="make a new LLM"):
            llm.generate(["the wind"] * 400, LONG)  # more than it can have said by then
        assert time.monotonic() - started < ENDS_S
        with pytest.raises(RankError):
            llm.generate("again", LONG)
        assert process.poll() is not None
