"""Medusa's heads on a GPU: a draft is one CUDA graph, from the target's hidden state to the tokens. The
interface of cpu/medusa.py.

Invariant: all heads are computed together, rows in the order of heads and then of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from paceline.cuda.batch import Buffer, Column
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.head_inputs import addresses_of, choice_columns, choice_values, guesses_of, requests_for
from paceline.cuda.pick import guess
from paceline.cuda.recorded_head import RecordedHead
from paceline.cuda.weights import head_reader
from paceline.heads.config import TRUNK, MedusaConfig
from paceline.heads.rows import Guesses, Row, Sampler
from paceline.loaders.head_files import Head


class SideShape(NamedTuple):
    requests: int
    is_guessed: bool  # else logits are wanted


class CudaMedusaHead(RecordedHead):
    def __init__(self, head: Head, decoder: CudaDecoder) -> None:
        super().__init__(head, decoder)
        config, reader = head.config, head_reader(head, decoder.weights)
        assert isinstance(config, MedusaConfig)
        self.config, heads = config, range(config.num_heads_ahead)
        norm = decoder.weights.norm if config.trunk is None else reader.norm(f"{TRUNK}norm")
        self._norm = norm  # the target's last, or the trunk's
        names = [[f"blocks.{i}.layers.{block}" for i in heads] for block in range(config.num_blocks)]
        self._blocks = []  # weights [heads, inputs, outputs] and biases [heads, 1, outputs]
        for each in names:
            bias = torch.stack([head.tensors[f"{name}.bias"] for name in each])[:, None]
            weight = torch.stack([reader.table(name) for name in each]).transpose(1, 2)
            self._blocks.append((weight, bias.to(self.device, self.dtype)))
        # One output layer for all heads, or [heads, hidden, words] of their own.
        self._output_layer = (
            reader.matrix("lm_head")
            if reader.has("lm_head")
            else torch.stack([reader.table(f"lm_heads.{i}") for i in heads]).transpose(1, 2)
        )

    @torch.inference_mode()
    def guess(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> Guesses:
        return guesses_of(self._run_rows(rows, samplers), len(rows))

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        return self._run_rows(rows, ())[:, : len(rows)]

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need; all heads are computed, however many tokens are wanted."""
        self._recorded(SideShape(1, is_guessed=True))

    def _run_rows(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> torch.Tensor:
        shape = SideShape(requests_for(len(rows)), bool(samplers))
        values = {"addresses": addresses_of(rows, (self.config.target_layers,)), **choice_values(samplers)}
        found: torch.Tensor = self._launch(shape, values, is_recorded=True)
        return found

    def prepare(self, shape: SideShape) -> tuple[Callable[[], Any], Buffer]:
        addresses = Column((shape.requests, 1), np.int64, self.nowhere)
        buffer = Buffer({"addresses": addresses, **choice_columns(shape.requests)}, self.device)
        buffer.fill({})
        return partial(self._run, shape, buffer.on_device), buffer

    def _run(self, shape: SideShape, at: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """-> results [2, heads, requests] of guesses, or logits [heads, requests, words]."""
        count = self.config.num_heads_ahead
        y = self._gathered(at["addresses"], self._norm).expand(count, -1, -1)
        for weight, bias in self._blocks:
            y = y + functional.silu(torch.baddbmm(bias, y, weight))
        if isinstance(self._output_layer, torch.Tensor):
            logits = torch.bmm(y, self._output_layer).flatten(0, 1)
        else:
            logits = self._output_layer(y.flatten(0, 1))
        if not shape.is_guessed:
            return logits.view(count, shape.requests, -1)
        results = torch.empty((2, count, shape.requests), dtype=torch.int32, device=self.device)
        guess(logits, self._guessing(at), 0, results.flatten(1))
        return results
