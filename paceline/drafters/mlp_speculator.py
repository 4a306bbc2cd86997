"""MLP speculator: EAGLE's place in a step with a smaller machine, a state that starts as the target's hidden
state and takes in tokens.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.drafters.base import DrafterContext
from paceline.drafters.eagle import Eagle
from paceline.drafters.heads import HeadDrafterConfig
from paceline.heads.mlp import TorchMlpHead
from paceline.heads.others import MlpSpeculatorConfig
from paceline.heads.rows import ChainHead


class MlpSpeculator(Eagle):
    name = "mlp_speculator"
    kinds = ("mlp_speculator",)

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        super().__init__(config, context)
        assert isinstance(self.head.config, MlpSpeculatorConfig)
        most = self.head.config.num_predict
        self._tree = replace(config, tree_depth=min(config.tree_depth or most, most))

    def _load(self, context: DrafterContext) -> ChainHead:
        config, norm = self.head.config, context.checkpoint.tensor("norm.weight")
        assert isinstance(config, MlpSpeculatorConfig)
        return TorchMlpHead(config, self.head.tensors, norm, context.executor.device)
