"""Some layers of a checkpoint as a model of its own, counted from zero: those that a stage of a pipeline
holds, or a draft model but for some that it can do without.

Invariant: the stages' layers follow each other and are all of the model's; the first stage embeds, the last
has the final norm and the output layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.kept import Kept

ALL = slice(None)


class Stage(NamedTuple):
    rank: int = 0
    size: int = 1

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def layers(self, config: ModelConfig) -> range:
        """Of the whole model."""
        return bounds(config, self.size)[self.rank]

    def own(self, config: ModelConfig) -> ModelConfig:
        """The stage as a model: of another than the last, passes end with the residual stream."""
        if self.size == 1:
            return config
        mine = _with_layers(config, self.layers(config))
        return replace(mine, has_embedding=self.rank == 0, has_head=self.is_last, tie_embeddings=False)

    def check(self, config: ModelConfig) -> None:
        """Refuse what cannot be split so."""
        asked = f"pipeline_parallel_size is {self.size} and the model has"
        if self.size > config.num_layers:
            raise ConfigError(f"{asked} {config.num_layers} layers; use at most that many")
        if self.size > 1 and config.recurrent is not None:
            raise ConfigError(f"{asked} recurrent layers, whose states stay in one process; use 1")


def _with_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    experts = config.experts
    if experts is not None:
        dense = tuple(i for i, layer in enumerate(layers) if layer in experts.dense_layers)
        experts = replace(experts, dense_layers=dense)
    flags = config.rope_layers, config.local_layers  # empty where all layers are alike
    rope, local = (tuple(each[i] for i in layers if each) for each in flags)
    return replace(config, num_layers=len(layers), experts=experts, rope_layers=rope, local_layers=local)


@cache
def bounds(config: ModelConfig, size: int) -> list[range]:
    """Each stage's layers: about as many weights in each, the output layer's among the last's."""
    weights = [0] * config.num_layers
    for name, shape in config.weight_names().items():
        if name.startswith("layers."):
            weights[int(name.split(".")[1])] += prod(shape)
    total = sum(weights) + config.vocab_size * config.hidden_size
    ends = [0]
    for number in range(1, size):
        possible = range(ends[-1] + 1, config.num_layers - (size - number) + 1)
        ends.append(min(possible, key=lambda end: abs(sum(weights[:end]) - total * number / size)))
    return [range(*pair) for pair in pairwise([*ends, config.num_layers])]


class SomeLayers:
    """Of a checkpoint."""

    def __init__(self, whole: Any, layers: Sequence[int], config: ModelConfig) -> None:
        """layers: their numbers in the whole; config: of the model that they are."""
        self.whole, self.config, self._layers = whole, config, layers
        self._is_tied = whole.config.tie_embeddings and not config.tie_embeddings
        self.name: str = whole.name
        self.path: Path = whole.path
        self.fingerprint: str = whole.fingerprint
        self.eos_ids, self.bos_id = whole.eos_ids, whole.bos_id

    def name_in_whole(self, name: str) -> str:
        """Of a tensor as files have it, or packed."""
        if self._is_tied and name.startswith(("lm_head.", "head.")):
            return name.replace("lm_head", "embed_tokens").replace("head.", "embedding.")
        return re.sub(r"^layers\.(\d+)", lambda found: f"layers.{self._layers[int(found[1])]}", name)

    def tensor(self, name: str, rows: slice = ALL) -> Tensor:
        found: Tensor = self.whole.tensor(self.name_in_whole(name), rows)
        return found

    def kept(self, name: str, rows: slice = ALL) -> Kept | None:
        found: Kept | None = self.whole.kept(self.name_in_whole(name), rows)
        return found

    def tokenizer_source(self) -> Any:
        return self.whole.tokenizer_source()


def part_of(whole: Any, stage: Stage) -> Any:
    """What a process of this stage opens."""
    if stage.size == 1:
        return whole
    return SomeLayers(whole, stage.layers(whole.config), stage.own(whole.config))


def without_layers(whole: Any, skipped: Collection[int]) -> Any:
    """The model that is left."""
    config = whole.config
    kept = [i for i in range(config.num_layers) if i not in skipped]
    if not kept or not set(skipped) <= set(range(config.num_layers)):
        what = f"skip_layers is {sorted(skipped)} and {whole.name} has {config.num_layers} layers"
        raise ConfigError(f"{what}, counted from 0; leave one at least")
    if skipped and config.recurrent is not None:
        raise ConfigError(
            f"skip_layers is {sorted(skipped)} and {whole.name} has recurrent layers; leave it out"
        )
    return SomeLayers(whole, kept, _with_layers(config, kept)) if skipped else whole
