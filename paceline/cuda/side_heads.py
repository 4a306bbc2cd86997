"""Medusa's heads on a GPU: a draft is one CUDA graph, from the target's hidden state to the tokens. The
interface of cpu/medusa.py.

Invariant: all heads are computed together, rows in the order of heads and then of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from paceline.cuda.batch import REQUESTS, next_size
from paceline.cuda.enter import gather
from paceline.cuda.graphs import Graphs, Recording
from paceline.cuda.guess import Guessing, guess
from paceline.cuda.head_inputs import (
    Buffer,
    Column,
    addresses_of,
    guesses_of,
    speaker_columns,
    speaker_values,
)
from paceline.cuda.head_weights import HeadReader
from paceline.heads.config import MedusaConfig
from paceline.heads.rows import Guesses, Row, Speaker

if TYPE_CHECKING:
    from paceline.cuda.decoder import CudaDecoder


class Bucket(NamedTuple):
    requests: int
    is_guessed: bool  # else logits are wanted


class CudaMedusaHead:
    def __init__(
        self,
        config: MedusaConfig,
        tensors: Mapping[str, torch.Tensor],
        norm: torch.Tensor,
        decoder: CudaDecoder,
    ) -> None:
        """norm: the target's last, or the trunk's."""
        self.config, self.device = config, decoder.device
        reader, heads = HeadReader(tensors, decoder), range(config.num_heads_ahead)
        self._dtype, self._ids, self._norm = reader.dtype, reader.ids(), norm.to(self.device)
        names = [[f"blocks.{head}.layers.{block}" for head in heads] for block in range(config.num_blocks)]
        biases = [
            torch.stack([tensors[f"{name}.bias"] for name in each])[:, None].to(self.device, self._dtype)
            for each in names
        ]
        self._blocks = [  # weights [heads, inputs, outputs] and biases [heads, 1, outputs]
            (torch.stack([reader.table(name) for name in each]).transpose(1, 2), bias)
            for each, bias in zip(names, biases, strict=True)
        ]
        # One output layer for all heads, or [heads, hidden, words] of their own.
        self._speak = (
            reader.matrix("lm_head")
            if reader.has("lm_head")
            else torch.stack([reader.table(f"lm_heads.{head}") for head in heads]).transpose(1, 2)
        )
        self._graphs = Graphs(decoder.capture)
        self._nowhere = torch.zeros(config.hidden_size, dtype=self._dtype, device=self.device)

    def can_guess(self, temperature: float) -> bool:
        return True

    @torch.inference_mode()
    def guess(self, rows: Sequence[Row], speakers: Sequence[Speaker]) -> Guesses:
        return guesses_of(self._launch(rows, speakers), len(rows))

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        found: torch.Tensor = self._launch(rows, ())
        return found[:, : len(rows)]

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need; all heads speak, however many tokens are wanted."""
        self._recorded(Bucket(1, is_guessed=True))

    def _recorded(self, bucket: Bucket) -> tuple[Recording, Buffer]:
        return self._graphs.get(bucket, lambda: self._prepare(bucket))

    def _launch(self, rows: Sequence[Row], speakers: Sequence[Speaker]) -> Any:
        bucket = Bucket(next_size(REQUESTS, len(rows)), bool(speakers))
        values = {"addresses": addresses_of(rows, (self.config.target_layers,)), **speaker_values(speakers)}
        recording, buffer = self._recorded(bucket)
        buffer.fill(values)
        recording.replay()
        return recording.outputs

    def _prepare(self, bucket: Bucket) -> tuple[Callable[[], Any], Buffer]:
        addresses = Column((bucket.requests, 1), np.int64, self._nowhere.data_ptr())
        buffer = Buffer({"addresses": addresses, **speaker_columns(bucket.requests)}, self.device)
        buffer.fill({})
        return partial(self._run, bucket, buffer.on_device), buffer

    def _run(self, bucket: Bucket, at: dict[str, torch.Tensor]) -> torch.Tensor:
        """-> results [2, heads, requests] of guesses, or logits [heads, requests, words]."""
        config = self.config
        h = torch.empty((bucket.requests, config.hidden_size), dtype=self._dtype, device=self.device)
        gather(at["addresses"], self._norm, config.rms_eps, config.hidden_size, h)
        y = h.expand(config.num_heads_ahead, -1, -1)
        for weight, bias in self._blocks:
            y = y + functional.silu(torch.baddbmm(bias, y, weight))
        if isinstance(self._speak, torch.Tensor):
            logits = torch.bmm(y, self._speak).flatten(0, 1)
        else:
            logits = self._speak(y.flatten(0, 1))
        if not bucket.is_guessed:
            return logits.view(config.num_heads_ahead, bucket.requests, -1)
        how = Guessing(at["temperatures"], at["seeds"], at["places"], self._ids)
        results = torch.empty(
            (2, config.num_heads_ahead, bucket.requests), dtype=torch.int32, device=self.device
        )
        guess(logits, how, 0, results.flatten(1))
        return results
