"""Rounds that a device runs by itself: the text is plain decoding's, whoever ends when, and usual steps may come before and after.

The target's text repeats itself for a while and changes then, and the head drafts what its features say: some drafts are right to the end,
some to the middle, some from the start not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import EngineConfig
from paceline.cuda import rounds
from paceline.cuda.decoder import CudaDecoder
from paceline.engine.costs import CostModel
from paceline.engine.engine import Engine
from paceline.engine.policy import AutoPolicy
from paceline.models.decoder import Decoder
from paceline.models.head_config import target_hash, write_head_config
from paceline.params import SamplingParams
from paceline.proposers import registry
from paceline.proposers.base import Surroundings, chain, empty
from paceline.runtime.kv_cache import KvCache
from paceline.runtime.runner import Runner
from paceline.types import Draft, Needs, Request, Seen
from tests.cuda.recorders import CountingCapture, capture_on
from tests.heads import config_of, random_tensors, write_head
from tests.laws.harness import CONFIG, RandomCheckpoint, request_of, run
from tests.laws.test_flights import ahead

TINY = replace(CONFIG, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.4, seed=3, max_tokens=20, ignore_eos=True)
PROMPTS = ([3, 9, 20, 11], [5, 30, 30, 2, 17, 8, 41], [8, 8, 40], [12, 33, 6, 21, 21])
CPU = torch.device("cpu")


class Calm(RandomCheckpoint):
    def tensor(self, name: str) -> torch.Tensor:
        found = super().tensor(name)
        return found if found.dim() == 1 or "embed" in name else 1.3 * found


TARGET = Calm(TINY, seed=1)


@cache
def head_folder(folder: Path) -> str:
    """It reads the target's last features as they are, and adds little to them."""
    config = config_of("eagle", TINY, target_hash(TARGET))
    tensors = {name: 0.3 * x if x.dim() > 1 else x for name, x in random_tensors(config).items()}
    width = TINY.hidden_size
    tensors["fc.weight"] = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)
    tensors["lm_head.weight"] = TARGET.tensor("embed_tokens.weight")
    return str(write_head(folder, write_head_config(config), tensors))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return head_folder(tmp_path_factory.mktemp("head"))


@cache
def torch_target() -> Decoder:
    return Decoder.load(TARGET)


@cache
def target_on(device: torch.device, exact: bool) -> CudaDecoder:
    return CudaDecoder.load(TARGET, dtype="float32", device=str(device), exact=exact, capture=capture_on(device))


def drafter_of(runner: Runner, head: str, steps: int) -> Any:
    options = {"method": "eagle", "model": head, "num_speculative_tokens": steps}
    return registry.create(*registry.parse(options), Surroundings(runner, TARGET, None, lambda *_: None))  # type: ignore[arg-type]


def engine_on(device: torch.device, head: str, steps: int = 3, num_blocks: int = 16, exact: bool = False, **limits: Any) -> Engine:
    runner = Runner(target_on(device, exact), KvCache(TINY, num_blocks, device=device, has_spare=True))
    config = EngineConfig(**{"max_model_len": 100, "num_speculative_tokens": steps, **limits})
    return ahead(Engine(runner, drafter_of(runner, head, steps), config))


@cache
def plain(prompt: tuple[int, ...], params: SamplingParams, limit: int = 100, seed: int = 0) -> tuple[list[int], Any]:
    engine = Engine(Runner(torch_target(), KvCache(TINY, 16)), None, EngineConfig(max_model_len=limit, num_speculative_tokens=0))
    request = request_of(prompt, params, seed=params.seed or seed)
    run(engine, [request])
    return request.output, request.finish_reason


def said(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, limit: int = 100) -> list[Any]:
    """Run, and compare with plain decoding."""
    requests = [request_of(prompt, params) for prompt in prompts]
    emissions = run(engine, requests)
    for request in requests:
        text, reason = plain(tuple(request.tokens[: request.num_prompt]), params, limit)
        assert request.output == text
        assert request.finish_reason is reason
    return emissions


class Logbook:
    """How many rounds a drafter flew at a time."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flights: list[int] = []
        drafter: Any = engine.policy.drafters[-1]
        fly = drafter.fly

        def noted(requests: Sequence[Request], count: int) -> Any:
            self.flights.append(count)
            return fly(requests, count)

        monkeypatch.setattr(drafter, "fly", noted)


@pytest.mark.parametrize(("steps", "count", "exact"), [(3, 4, False), (1, 3, False), (5, 2, True)])
def test_the_text_is_plain_decodings(
    steps: int, count: int, exact: bool, head: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds.CudaRounds, "most_rounds", count)
    engine = engine_on(device, head, steps, exact=exact)
    logbook = Logbook(engine, monkeypatch)
    said(engine, PROMPTS[:1], GREEDY)
    assert max(logbook.flights) == count
    assert engine.totals.num_accepted > 5
    assert len(set(engine.totals.accepted_at)) > 1 or steps == 1
