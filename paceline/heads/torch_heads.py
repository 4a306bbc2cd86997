"""Learned heads in torch on any device: what all of them share, and those that keep nothing of a text. The
interfaces of heads/rows.py.

Invariant: only greedy drafts are guessed here, and the device is waited for once a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.heads.config import HeadConfig, MedusaConfig
from paceline.heads.modules import Tensors, load_module
from paceline.heads.rows import Feed, Guesses, HeadOutput, Node, Row, Sampler
from paceline.models.layer import rms_norm

Following = Callable[[Tensor, Any, int], HeadOutput]  # (tokens, the sources of their rows, step)


class TorchHead:
    """A definition with its weights."""

    def __init__(self, config: Any, tensors: Tensors, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self._dtype = config, device, dtype
        self.module = load_module(config, tensors, device, dtype)
        self._ids = tensors["draft_ids"].to(device) if "draft_ids" in tensors else None

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _tokens(self, words: Tensor) -> Tensor:
        """Draft ids -> tokens."""
        return words if self._ids is None else self._ids[words]

    def _chain(self, output: HeadOutput, steps: int, following: Following) -> Guesses:
        """The likeliest tokens, step by step."""
        tokens, chances = [], []
        for step in range(1, steps + 1):
            chance, best = output.logits.float().softmax(-1).max(-1)
            tokens.append(self._tokens(best))
            chances.append(chance)
            if step < steps:
                output = following(tokens[-1], output.outputs, step)
        return Guesses(torch.stack(tokens).tolist(), torch.stack(chances).cumprod(0).tolist())


class NormedHead(TorchHead):
    """Reads the target's last hidden state alone, or a trunk's output, after a norm."""

    def __init__(self, config: HeadConfig, tensors: Tensors, norm: Tensor, device: torch.device) -> None:
        is_half = isinstance(config, MedusaConfig) and device.type != "cpu"
        super().__init__(config, tensors, device, torch.bfloat16 if is_half else torch.float32)
        self._norm = norm.to(device)

    def _normed(self, rows: Sequence[Row]) -> Tensor:
        """[rows, hidden]."""
        last = torch.stack([row.hidden[self.config.target_layers][row.at] for row in rows]).to(self._dtype)
        return rms_norm(last, self._norm, self.config.rms_eps)


class TorchMedusaHead(NormedHead):
    def guess(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> Guesses:
        """The likeliest token of each head."""
        chances, best = self.logits(rows).float().softmax(-1).max(-1)
        return Guesses(self._tokens(best).tolist(), chances.cumprod(0).tolist())

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """[heads, requests, draft vocabulary]."""
        found: Tensor = self.module.logits(self.module(self._normed(rows)))
        return found


class TorchMlpHead(NormedHead):
    """IBM's MLP speculator: a small state takes in one token a step."""

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> HeadOutput:
        state = self._normed([feed.rows[-1] for feed in feeds])
        if self.config.is_scaled:
            state = rms_norm(state, torch.ones_like(self._norm), self.config.rms_eps) * 0.5**0.5
        return self._step(self._tensor([feed.tokens[-1] for feed in feeds]), state, 0)

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> HeadOutput:
        tokens = self._tensor([node.token for node in nodes])
        return self._step(tokens, torch.stack([node.source for node in nodes]), len(nodes[0].others))

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, least: float) -> Guesses:
        return self._chain(self.begin(feeds), min(steps, self.config.num_predict), self._step)

    def _step(self, tokens: Tensor, state: Tensor, step: int) -> HeadOutput:
        logits, state = self.module(state, tokens, step)
        return HeadOutput(logits, state)
