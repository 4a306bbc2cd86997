"""Where passes of a model run: in this process. It alone touches K/V memory; a batch says what to move first.

Target and draft models both have one. Invariant: moves that the driver has written down are applied before
the next pass reads or writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.batch import build
from paceline.core.types import Batch, Burst, Cached, Output, Segment
from paceline.heads.rows import BurstBackend, BurstInput
from paceline.models.config import ModelConfig
from paceline.runtime.backend import Backend, Decoder
from paceline.runtime.kv_cache import KvCache
from paceline.runtime.kv_memory import KvMemory


class LocalExecutor:
    def __init__(self, backend: Backend, decoder: Decoder, memory: KvMemory) -> None:
        self.backend, self.decoder, self.memory = backend, decoder, memory
        self.kv = KvCache(memory.num_blocks)  # the driver's books of that memory

    @classmethod
    def load(
        cls, backend: Backend, source: Any, num_blocks: int, *, dtype: str = "", kv: str = "auto",
        context: int | None = None,
    ) -> LocalExecutor:  # fmt: skip
        """kv: the kv_cache_dtype asked for."""
        dtype = dtype or backend.default_dtype
        decoder, kept = backend.load(source, dtype, context), backend.kv_format(dtype, kv)
        return cls(backend, decoder, KvMemory(source.config, num_blocks, backend.device, kept))

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def forward(
        self, segments: Sequence[Segment], *, num_layers: int | None = None,
        hidden_layers: Sequence[int] = (), top_tokens: int = 0,
    ) -> Output:  # fmt: skip
        """Logits of the rows each segment asks for, in order. Stops after `num_layers` layers if given."""
        batch, kv = self._ready(segments), self.memory.layers
        output = self.decoder.forward(batch, kv, num_layers=num_layers, hidden_layers=hidden_layers)
        return output._replace(top=self.backend.top(output.logits, top_tokens)) if top_tokens else output

    def burst(self, backend: BurstBackend, segments: Sequence[Segment], given: BurstInput) -> Burst:
        """Passes without the host. segments: the longest draft of each request, of which only the root is
        known; slots for all rounds are reserved.
        """
        return backend.launch(self._ready(segments), given)

    def _ready(self, segments: Sequence[Segment]) -> Batch:
        batch = build(segments, self.memory.device, self.kv.take_moves())
        if batch.moves is not None:
            self.memory.apply(batch.moves)
        return batch

    def warm_up(self, top_tokens: int = 0) -> None:
        """One token through all layers: what is compiled or read lazily is done before a request waits."""
        cached = Cached()
        if self.kv.reserve(cached, 1):
            self.forward([Segment([0], cached, num_logits=1)], top_tokens=top_tokens)
            self.kv.free(cached)
