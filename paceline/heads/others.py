"""Heads of other projects that Paceline runs and does not train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.heads.config import HeadConfig, Kind, LayeredConfig, MedusaConfig, Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle1Config(LayeredConfig):
    """EAGLE-1 and -2: one layer without norms at its ends reads the next token's embedding fused with the
    target's last hidden state (after its norm); the target's output layer speaks."""

    kind: ClassVar[Kind] = "eagle"
    has_fc_bias: bool = False

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.target_layers,)

    def _own_shapes(self) -> Shapes:
        d = self.hidden_size
        shapes = {"fc.weight": (d, 2 * d), **self._layer_shapes("midlayer.", d)}
        del shapes["midlayer.input_layernorm.weight"]
        return {**shapes, "fc.bias": (d,)} if self.has_fc_bias else shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateMedusaConfig(MedusaConfig):
    """Medusa as it was published: every head has an output layer of its own."""

    def _own_shapes(self) -> Shapes:
        own = {
            f"lm_heads.{i}.weight": (self.draft_vocab_size, self.hidden_size)
            for i in range(self.num_heads_ahead)
        }
        return {**MedusaConfig._own_shapes(self), **own}


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

    def place_of(self, part: str, step: int) -> int:
        """The number in the names of a step's weights."""
        return (min(step, 1) if part == "proj" else 0) if self.is_tied else step

    def _own_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for step in range(self.num_predict):
            n = {part: self.place_of(part, step) for part in ("emb", "proj", "head", "ln")}
            shapes[f"emb.{n['emb']}.weight"] = (self.vocab_size, self.inner_dim)
            shapes[f"proj.{n['proj']}.weight"] = (
                self.inner_dim,
                self.inner_dim if step else self.hidden_size,
            )
            shapes[f"head.{n['head']}.weight"] = (self.vocab_size, self.inner_dim)
            shapes[f"ln.{n['ln']}.weight"] = shapes[f"ln.{n['ln']}.bias"] = (self.inner_dim,)
        return shapes
