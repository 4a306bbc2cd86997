"""A target whose text repeats itself for a while and changes then, and a head that drafts what its features
say: some drafts are right to the end, some to the middle, some from the start not. For tests of bursts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.core.options import EngineConfig
from paceline.core.types import Burst, Request
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterContext
from paceline.engine.commit import Emission
from paceline.engine.engine import Engine
from paceline.heads.config import write_head_config
from paceline.heads.rows import BurstInput
from paceline.loaders.fields import ALL
from paceline.loaders.heads import target_hash
from paceline.runtime.executor import LocalExecutor
from tests.heads import config_of, random_tensors, write_head
from tests.laws.harness import CONFIG, RandomCheckpoint

TINY = replace(CONFIG, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)


class Calm(RandomCheckpoint):
    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        found = super().tensor(name, rows)
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


def drafter_of(executor: LocalExecutor, head: str, steps: int) -> Drafter:
    options = {"method": "eagle", "model": head, "num_speculative_tokens": steps}
    context = DrafterContext(executor, TARGET, None, lambda *_: None)  # type: ignore[arg-type]
    return registry.create(*registry.parse(options), context)


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


class Launched(NamedTuple):
    given: BurstInput
    burst: Burst


def bursts_of(engine: Engine) -> list[Launched]:
    """Gets every burst that the engine launches."""
    launched: list[Launched] = []
    burst = engine.executor.burst

    def noted(backend: Any, segments: Any, given: BurstInput) -> Burst:
        launched.append(Launched(given, burst(backend, segments, given)))
        return launched[-1].burst

    engine.executor.burst = noted  # type: ignore[method-assign]
    return launched


def burst_every_second_time(drafter: Drafter) -> None:
    """Every second step is a usual one."""
    length, may = drafter.burst_length, cycle((True, False))
    drafter.burst_length = lambda *given: length(*given) if next(may) else 0  # type: ignore[method-assign]
