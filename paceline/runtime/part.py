"""Some layers of a model, in this process or in several ranks that it leads: what a stage runs of a pass.

Invariant: a pass visits every stage, also those whose layers it leaves out: KV moves travel with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from paceline.models.config import ModelConfig
from paceline.models.stage import Stage, part_of
from paceline.runtime.backend import Backend
from paceline.runtime.executor import KvMemory, LocalExecutor
from paceline.runtime.link import PassInput
from paceline.runtime.ranks import Ranks, RankSetup, RanksExecutor


class Found(NamedTuple):
    """What a stage makes of a pass."""

    # [T, hidden] the residual stream that leaves; of the last [L, vocab] logits, none if picks are enough
    x: torch.Tensor
    hidden: Mapping[int, torch.Tensor]  # by layer of the whole model
    picked: Sequence[int] | None = None


class Part:
    def __init__(self, executor: LocalExecutor, stage: Stage, whole: ModelConfig) -> None:
        self.executor, self.is_last, self.layers = executor, stage.is_last, stage.layers(whole)

    def run(self, given: PassInput) -> Found:
        batch, first = given.batch, self.layers.start
        if batch.moves is not None:
            self.executor.apply(batch.moves)
        depth = min(max(given.num_layers - first, 0), len(self.layers))
        if not depth and not self.is_last:
            assert given.x is not None, "a pass has a layer at least, which is the first stage's"
            return Found(given.x, {})
        # what was before a stage's first layer is the stage's before it, but for the embeddings
        kept = {n - first for n in given.hidden_layers if first < n <= first + depth or n == 0 == first}
        wanted = sorted(kept if self.is_last else kept | {depth})
        batch = batch if self.is_last else replace(batch, picks=None)
        output = self.executor.run(batch, depth, wanted, given.x)
        hidden = {n + first: output.hidden[n] for n in sorted(kept)}
        if self.is_last:
            is_enough = output.picked is not None and not given.needs_logits
            return Found(output.logits[:0] if is_enough else output.logits, hidden, output.picked)
        return Found(output.hidden[depth], hidden)


def load_part(backend: Backend, source: Any, setup: RankSetup, ranks: Ranks | None) -> LocalExecutor:
    """What this process holds of a model: its stage, and of that the part of a rank."""
    mine = part_of(source, setup.stage)
    decoder = backend.load(mine, setup.dtype, setup.context)
    kept = backend.kv_format(setup.dtype, setup.kv_cache_dtype)
    config = mine.config if ranks is None else ranks.shard.own(mine.config)
    memory = KvMemory(config, setup.num_blocks, backend.device, kept)
    if ranks is None:
        return LocalExecutor(backend, decoder, memory)
    return RanksExecutor(backend, decoder, memory, ranks)
