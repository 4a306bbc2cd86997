"""A model and its KV cache: the one thing that runs forward passes. Target and draft models are both Runners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.runtime.batch import build
from paceline.runtime.kv_cache import KvCache
from paceline.types import Output, Segment


@dataclass(frozen=True, slots=True)
class Runner:
    decoder: Decoder
    kv: KvCache

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    def forward(self, segments: Sequence[Segment], *, num_layers: int | None = None, hidden_layers: Sequence[int] = ()) -> Output:
        """Logits of the rows each segment asks for, in order. Stops after `num_layers` layers if given."""
        batch = build(segments, self.kv)
        return self.decoder.forward(batch, self.kv.layers, num_layers=num_layers, hidden_layers=hidden_layers)
