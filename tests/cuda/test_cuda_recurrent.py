"""Recurrent layers and gated attention on a GPU: they say what the torch decoder says, a row's bits depend on
its own text alone, and texts are those of plain decoding whatever is drafted, found again or computed twice.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from paceline.core.options import EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.types import Cached, Draft, Request, Segment
from paceline.cuda.backend import CudaBackend
from paceline.drafters.base import Drafter, chain
from paceline.engine.engine import Engine
from paceline.models.config import ExpertsConfig, ModelConfig, RecurrentConfig
from paceline.models.decoder import Decoder
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from tests.cuda.recorders import capture_on
from tests.cuda.test_cuda_decoder import SHAPE
from tests.laws.fakes import Fake
from tests.laws.harness import RandomCheckpoint, request_of, run

pytestmark = pytest.mark.slow  # interpreted where there is no GPU

HYBRID: dict[str, Any] = {
    "num_layers": 2, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
    "num_kv_heads": 1, "qk_norm": True, "gated_attention": True, "rotary_dim": 8,
    "recurrent": RecurrentConfig((True, False), key_heads=1, value_heads=2, key_dim=8, value_dim=8),
}  # fmt: skip
MODELS = {
    "qwen3_5": HYBRID,
    # sizes that are no powers of two, more columns than a program has, and one layer dense
    "qwen3_next": {
        **HYBRID,
        "recurrent": RecurrentConfig((False, True), 1, 3, key_dim=12, value_dim=20, kernel=3),
        "experts": ExpertsConfig(4, 2, 16, shared_inner=24, has_shared_gate=True, dense_layers=(0,)),
    },
}
TREE = [-1, 0, 0, 2]  # a root, a wrong child, the right one and its own
BLOCKS, STATES = 32, 40
CPU = torch.device("cpu")


@cache
def checkpoint(name: str) -> RandomCheckpoint:
    return RandomCheckpoint(ModelConfig(**{**SHAPE, **MODELS[name]}))


def executor_of(
    name: str, device: torch.device, is_exact: bool = True, num_blocks: int = BLOCKS, dtype: str = "float32"
) -> LocalExecutor:
    backend = CudaBackend(device, is_exact, capture_on(device))
    kept = backend.kv_format(dtype, "auto")
    memory = KvMemory(checkpoint(name).config, num_blocks, device, kept, STATES)
    return LocalExecutor(backend, backend.load(checkpoint(name), dtype), memory)


def oracle_of(name: str) -> LocalExecutor:
    memory = KvMemory(checkpoint(name).config, BLOCKS, num_states=STATES)
    return LocalExecutor(TorchBackend(CPU), Decoder.load(checkpoint(name)), memory)


def words(count: int, start: int = 3) -> list[int]:
    return [(start + 7 * i * i) % 40 for i in range(count)]


Part = tuple[Cached, list[int], list[int] | None]  # a sequence, its next tokens, their parents


def read(executor: LocalExecutor, *parts: Part) -> torch.Tensor:
    """Logits of all rows, each of which leaves its state; nothing is committed."""
    for cached, tokens, _ in parts:
        assert executor.kv.reserve(cached, cached.num_cached + len(tokens), len(tokens) - 1)
    output = executor.forward(
        [Segment(tokens, cached, above, len(tokens)) for cached, tokens, above in parts]
    )
    return output.logits.clone().cpu()


def alone(executor: LocalExecutor, tokens: list[int]) -> torch.Tensor:
    cached = Cached()
    logits = read(executor, (cached, tokens, None))
    executor.kv.free(cached)
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_torch_says(name: str, device: torch.device) -> None:
    """Prompts, plain rows, trees of which a side branch is kept, and what follows it."""
    found = []
    for executor in (executor_of(name, device, is_exact=False), oracle_of(name)):
        one, other, said = Cached(), Cached(), []
        said.append(read(executor, (one, words(6), None), (other, words(2, 9), None)))
        executor.kv.commit(one, 0, range(6), words(6))
        executor.kv.commit(other, 0, range(2), words(2, 9))
        said.append(read(executor, (one, words(4), TREE), (other, [6], None)))
        executor.kv.commit(one, 6, (0, 2, 3), [*words(6), *(words(4)[n] for n in (0, 2, 3))])
        said.append(read(executor, (one, [5], None), (other, [7], None)))
        executor.kv.check([one, other])
        found.append(torch.cat(said))
    torch.testing.assert_close(*found, atol=5e-5, rtol=5e-5)


def test_bits_do_not_depend_on_passes_or_company(device: torch.device) -> None:
    """A prompt in one pass, in chunks, token by token as drafts that are kept in part, and beside others."""
    executor, text = executor_of("qwen3_5", device), words(9)
    whole = alone(executor, text)
    for chunks in ([4, 1, 4], [1, 5, 3]):
        cached, start = Cached(), 0
        for size in chunks:
            wrong = [9, 8][: size % 3]  # drafted after what is known, and rejected
            other = (Cached(), words(size, 5), None)
            found = read(executor, other, (cached, [*text[start : start + size], *wrong], None))
            assert torch.equal(found[size : 2 * size], whole[start : start + size])
            executor.kv.commit(cached, start, range(size), text)
            executor.kv.free(other[0])
            start += size
        executor.kv.free(cached)
    executor.kv.check([])


class HalfRight(Fake):
    """Drafts the token that comes next and one that does not."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.texts = texts

    def draft(self, request: Request, budget: int) -> Draft:
        count = request.num_tokens
        text = next(text for text in self.texts if text[:count] == request.tokens)
        tokens = [text[count], (text[count + 1] + 1) % 40] if count + 1 < len(text) else []
        return chain(request, tokens[:budget], self.name)


def engine_of(device: torch.device, num_blocks: int, drafter: Drafter | None = None) -> Engine:
    limits = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=36, num_speculative_tokens=2 if drafter else 0
    )
    return Engine(executor_of("qwen3_5", device, num_blocks=num_blocks), drafter, limits)


def said(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    requests = [request_of(prompt, params) for prompt in prompts]
    run(engine, requests)
    return [request.tokens for request in requests]


def test_texts_are_those_of_plain_decoding(device: torch.device) -> None:
    """With drafts, with blocks for less than both so that one is computed again, and from states that were
    kept at the end of a block."""
    prompts = [words(15), words(15, 4)]
    expected = said(engine_of(device, 8), prompts, 8)
    engine = engine_of(device, 3, HalfRight(expected))
    first = said(engine, prompts, 5)
    assert first == [text[:-3] for text in expected]
    assert engine.scheduler.num_preemptions > 0
    assert engine.totals.num_drafted > engine.totals.num_accepted > 0
    hits = engine.scheduler.num_prefix_hits
    assert said(engine, first[:1], 3) == expected[:1]
    assert engine.scheduler.num_prefix_hits > hits


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.05), ("int8", 0.1)])
def test_narrow_weights_say_nearly_the_same(dtype: str, most: float, device: torch.device) -> None:
    found = alone(executor_of("qwen3_5", device, dtype=dtype), words(5)).float()
    expected = alone(oracle_of("qwen3_5"), words(5))
    assert (found - expected).abs().mean() < most * expected.abs().mean()
