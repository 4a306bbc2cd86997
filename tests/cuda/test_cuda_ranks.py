"""Ranks that have a part each of the weights: the bits of one process, in exact mode."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.batch import build
from paceline.core.types import Batch, Cached, Segment
from paceline.models.shard import Shard
from paceline.runtime.executor import KvMemory, LocalExecutor
from paceline.runtime.group import TorchGroup, device_of
from tests.cuda import conftest  # noqa: F401 - a rank's process has the interpreter mended, too
from tests.cuda.recorders import capture_on
from tests.make_models import tiny_hf, tiny_tokenizer

pytestmark = pytest.mark.slow
SIZE, NUM_BLOCKS = 2, 8
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 192}


def executor_of(folder: str, dtype: str, group: TorchGroup | None, device: torch.device) -> LocalExecutor:
    from paceline.cuda.backend import CudaBackend
    from paceline.loaders.checkpoint import open_checkpoint

    source: Any = open_checkpoint(folder)
    backend = CudaBackend(device, True, capture_on(device), group)
    decoder = backend.load(source, dtype)
    config = source.config if group is None else group.shard.own(source.config)
    return LocalExecutor(
        backend, decoder, KvMemory(config, NUM_BLOCKS, device, backend.kv_format(dtype, "auto"))
    )


def passes(executor: LocalExecutor) -> list[torch.Tensor]:
    """Of a prompt, and of a chain after it."""
    cached, found = Cached(), []
    assert executor.kv.reserve(cached, 48)
    for tokens in (list(range(3, 24)), [5, 6, 7]):
        batch: Batch = build([Segment(tokens, cached, None, 3)])
        output = executor.decoder.forward(Batch(batch.columns), executor.memory.layers, hidden_layers=(1,))
        found += [output.logits.float().cpu(), output.hidden[1].float().cpu()]
        cached.num_cached += len(tokens)
    return found


def as_rank(rank: int, folder: str, dtype: str, meeting: str, place: str) -> list[torch.Tensor]:
    device = device_of(place, rank)
    return passes(executor_of(folder, dtype, TorchGroup(Shard(rank, SIZE), meeting, device), device))


@pytest.mark.parametrize(("dtype", "has_head"), [("float32", False), ("fp8", True), ("int4", False)])
def test_two_ranks_have_the_bits_of_one(
    dtype: str, has_head: bool, device: torch.device, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    tiny_hf(folder, "llama", tie_word_embeddings=not has_head, **SIZES)
    tiny_tokenizer(folder)
    given = (str(folder), dtype, str(tmp_path), str(device))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other = pool.apply_async(as_rank, (1, *given))
        found = as_rank(0, *given)
        assert all(map(torch.equal, found, other.get(60)))
    alone = passes(executor_of(str(folder), dtype, None, device))
    assert all(map(torch.equal, found, alone))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["plain", "ngram", "early_exit"])
def test_texts_on_a_gpu(method: str, tmp_path: Path) -> None:
    tiny_hf(tmp_path, "llama", **SIZES)
    tiny_tokenizer(tmp_path)
    drafts = None if method == "plain" else {"method": method, "num_speculative_tokens": 3}
    options: dict[str, Any] = {"speculative_config": drafts, "max_model_len": 128, "progress": False}
    said = []
    for size in (1, SIZE):
        with LLM(str(tmp_path), device="cuda", exact=True, tensor_parallel_size=size, **options) as llm:
            params = [SamplingParams(temperature=t, seed=3, max_tokens=40, ignore_eos=True) for t in (0, 0.8)]
            results = [llm.generate(["the wind the wind", "12 riders"], each) for each in params]
            said.append([result.token_ids for some in results for result in some])
    assert said[0] == said[1]
