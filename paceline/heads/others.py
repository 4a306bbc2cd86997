"""Heads of other projects that Paceline runs and does not train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.heads.config import HeadConfig, Kind, LayeredConfig, MedusaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle1Config(LayeredConfig):
    """EAGLE-1 and -2: one layer without norms at its ends reads the next token's embedding fused with the
    target's last hidden state (after its norm); logits are the target's output layer's."""

    kind: ClassVar[Kind] = "eagle"
    has_fc_bias: bool = False

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.target_layers,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateMedusaConfig(MedusaConfig):
    """Medusa as it was published: every head has an output layer of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpeculatorConfig(HeadConfig):
    """IBM's MLP speculator: a state that starts as the target's last hidden state (after its norm) takes in
    one token a step.
    """

    kind: ClassVar[Any] = "mlp_speculator"
    inner_dim: int
    num_predict: int
    is_tied: bool = False  # all steps but the first share their weights
    is_scaled: bool = False  # the hidden state is normed first

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.target_layers,)
