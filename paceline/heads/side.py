"""Medusa's heads in torch on any device. The interface of cpu/medusa.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.heads.config import MedusaConfig
from paceline.heads.modules import load_module
from paceline.heads.rows import Guesses, Row, Speaker
from paceline.models.layer import rms_norm


class TorchMedusaHead:
    def __init__(
        self, config: MedusaConfig, tensors: Mapping[str, Tensor], norm: Tensor, device: torch.device
    ) -> None:
        """norm: the target's last, or the trunk's."""
        self.config, self.device, self._norm = config, device, norm.to(device)
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.module = load_module(config, tensors, device, self._dtype)
        self._ids = tensors["draft_ids"].to(device) if "draft_ids" in tensors else None

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    def guess(self, rows: Sequence[Row], speakers: Sequence[Speaker]) -> Guesses:
        """The likeliest token of each head."""
        chances, best = self.logits(rows).float().softmax(-1).max(-1)
        tokens = best if self._ids is None else self._ids[best]
        return Guesses(tokens.tolist(), chances.cumprod(0).tolist())

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """[heads, requests, draft vocabulary]."""
        last = torch.stack([row.hidden[self.config.target_layers][row.at] for row in rows]).to(self._dtype)
        found: Tensor = self.module.logits(self.module(rms_norm(last, self._norm, self.config.rms_eps)))
        return found
