"""The target's own weights in int8 or int4 draft for it: a draft model that needs no second download."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.options import require
from paceline.drafters.base import DrafterContext
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.grow import TreeConfig
from paceline.runtime.executor import LocalExecutor


@dataclass(frozen=True, slots=True)
class QuantizedConfig(TreeConfig):
    bits: int = 4

    def __post_init__(self) -> None:
        TreeConfig.__post_init__(self)
        require(self.bits in (4, 8), "bits", self.bits, "use 4 or 8")


class Quantized(DraftModel):
    name = "quantized"
    Config = QuantizedConfig

    def _load(self, context: DrafterContext) -> LocalExecutor:
        assert isinstance(self.config, QuantizedConfig)
        return context.load_model(context.checkpoint, f"int{self.config.bits}")[2]
