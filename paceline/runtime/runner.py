"""A model and its KV cache: the one thing that runs forward passes. Target and draft models are both Runners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.runtime.batch import build
from paceline.runtime.kv_cache import KvCache
from paceline.types import Batch, Cached, Output, Segment


class Decoder(Protocol):
    """What runs a pass: models/decoder.py in torch, cpu/decoder.py compiled."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def num_bytes(self) -> int: ...
    def forward(self, batch: Batch, kv: Any, *, num_layers: int | None = None, hidden_layers: Sequence[int] = ()) -> Output: ...


def load_decoder(source: Any, *, kernels: str = "exact", dtype: str = "auto", context: int | None = None, **options: Any) -> Decoder:
    """`dtype` is of the weights: "auto" is int8 with the compiled kernels ("exact") and float32 with torch's."""
    if kernels not in ("exact", "torch"):
        raise ConfigError(f"unknown kernels {kernels!r}; choose 'exact' or 'torch'")
    if kernels == "torch":
        from paceline.models.decoder import Decoder as TorchDecoder

        return TorchDecoder.load(source, dtype="float32" if dtype == "auto" else dtype, context=context)
    from paceline.cpu.decoder import CpuDecoder

    return CpuDecoder.load(source, dtype="int8" if dtype == "auto" else dtype, context=context, **options)


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

    def warm_up(self) -> None:
        """One token through all layers: what is compiled or read lazily is done before anybody waits for an answer."""
        cached = Cached()
        if self.kv.reserve(cached, 1):
            self.forward([Segment([0], cached, num_logits=1)])
            self.kv.free(cached)
