"""MLP speculator: EAGLE's place in a step with a smaller machine, a state that starts as the target's hidden state and takes in tokens."""

from __future__ import annotations

from dataclasses import replace

from paceline.models.other_heads import MlpSpeculatorConfig
from paceline.proposers.base import Surroundings
from paceline.proposers.eagle import Eagle
from paceline.proposers.heads import HeadDrafterConfig


class MlpSpeculator(Eagle):
    name = "mlp_speculator"
    kinds = ("mlp_speculator",)

    def __init__(self, config: HeadDrafterConfig, surroundings: Surroundings) -> None:
        super().__init__(config, surroundings)
        assert isinstance(self.head.config, MlpSpeculatorConfig)
        most = self.head.config.num_predict
        self._tree = replace(config, tree_depth=min(config.tree_depth or most, most))
