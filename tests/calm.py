"""A target whose text repeats itself for a while and changes then, and a head that drafts what its features
say: some drafts are right to the end, some to the middle, some from the start not. For whoever lets both go
on by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.options import EngineConfig
from paceline.core.types import Request
from paceline.drafters import registry
from paceline.drafters.base import DrafterContext
from paceline.engine.commit import Emission
from paceline.engine.engine import Engine
from paceline.heads.config import target_hash, write_head_config
from paceline.runtime.executor import LocalExecutor
from tests.heads import config_of, random_tensors, write_head
from tests.laws.harness import CONFIG, RandomCheckpoint

TINY = replace(CONFIG, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)


class Calm(RandomCheckpoint):
    def tensor(self, name: str) -> torch.Tensor:
        found = super().tensor(name)
        return found if found.dim() == 1 or "embed" in name else 1.3 * found


TARGET = Calm(TINY, seed=1)
CHANGING, STEADY = [3, 9, 20, 11], [5, 30, 30, 2, 17]


@cache
def head_folder(folder: Path) -> str:
    """It reads the target's last features as they are, and adds little to them."""
    config = config_of("eagle", TINY, target_hash(TARGET))
    tensors = {name: 0.3 * x if x.dim() > 1 else x for name, x in random_tensors(config).items()}
    width = TINY.hidden_size
    tensors["fc.weight"] = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)
    tensors["lm_head.weight"] = TARGET.tensor("embed_tokens.weight")
    return str(write_head(folder, write_head_config(config), tensors))


def drafter_of(runner: LocalExecutor, head: str, steps: int) -> Any:
    options = {"method": "eagle", "model": head, "num_speculative_tokens": steps}
    return registry.create(*registry.parse(options), DrafterContext(runner, TARGET, None, lambda *_: None))  # type: ignore[arg-type]


def config_with(steps: int, limit: int) -> EngineConfig:
    return EngineConfig(max_model_len=limit, num_speculative_tokens=steps)


def agree(ours: Sequence[Emission], theirs: Sequence[Emission], one: Request, other: Request) -> None:
    """Draft for draft, but the last: a round does not know how many tokens are still wanted."""
    assert (one.output, one.finish_reason) == (other.output, other.finish_reason)
    mine, other_s = (
        [(e.tokens, e.num_accepted) for e in said if e.request is r]
        for said, r in ((ours, one), (theirs, other))
    )
    assert mine[:-1] == other_s[:-1]
    assert len(mine) == len(other_s)


def flights_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets how many rounds are flown at a time."""
    flights: list[int] = []
    drafter: Any = engine.policy.drafters[0]
    fly = drafter.fly

    def noted(requests: Sequence[Request], count: int, *rest: Any) -> Any:
        flights.append(count)
        return fly(requests, count, *rest)

    monkeypatch.setattr(drafter, "fly", noted)
    return flights
