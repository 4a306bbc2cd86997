"""Medusa's heads in torch on any device. The interface of cpu/medusa.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from paceline.models.attention import rms_norm
from paceline.models.chain_head import embedder
from paceline.models.head_config import MedusaConfig
from paceline.models.head_rows import Guesses, Row, Speaker


class TorchMedusaHead:
    def __init__(
        self, config: MedusaConfig, tensors: Mapping[str, torch.Tensor], norm: torch.Tensor, decoder: Any, device: torch.device
    ) -> None:
        """norm: the target's last."""
        self.config, self.device, self._norm, self._embed = config, device, norm.to(device), embedder(decoder)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._tensors = {name: t.to(device) if name == "draft_ids" else t.to(device, dtype) for name, t in tensors.items()}
        self._dtype = dtype

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    def guess(self, rows: Sequence[Row], roots: Sequence[int], speakers: Sequence[Speaker]) -> Guesses:
        """The likeliest token of each head."""
        chances, best = self.logits(rows, roots).float().softmax(-1).max(-1)
        ids = self._tensors.get("draft_ids")
        return Guesses((best if ids is None else ids[best]).tolist(), chances.cumprod(0).tolist())

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row], roots: Sequence[int]) -> torch.Tensor:
        """[heads, requests, draft vocabulary]."""
        h, found = self._start(rows, roots), []
        for head in range(self.config.num_heads_ahead):
            y = h
            for block in range(self.config.num_blocks):
                name = f"blocks.{head}.layers.{block}"
                y = y + functional.silu(functional.linear(y, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]))
            found.append(y)
        if "lm_head.weight" in self._tensors:
            return functional.linear(torch.stack(found), self._tensors["lm_head.weight"])
        return torch.stack([functional.linear(y, self._tensors[f"lm_heads.{i}.weight"]) for i, y in enumerate(found)])

    def _start(self, rows: Sequence[Row], roots: Sequence[int]) -> torch.Tensor:
        """[requests, hidden]: what the first block of every head reads."""
        last = torch.stack([row.hidden[self.config.target_layers][row.at] for row in rows]).to(self._dtype)
        h = rms_norm(last, self._norm, self.config.rms_eps)
        if not self.config.reads_token:
            return h
        embedded = self._embed(torch.tensor(roots, device=self.device)).to(self._dtype)
        return h + functional.linear(embedded, self._tensors["token.weight"])
