"""Medusa's heads in torch on any device. The interface of cpu/medusa.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from paceline.heads.config import MedusaConfig
from paceline.heads.rows import Guesses, Row, Speaker
from paceline.models.attention import rms_norm


class TorchMedusaHead:
    def __init__(
        self,
        config: MedusaConfig,
        tensors: Mapping[str, torch.Tensor],
        norm: torch.Tensor,
        device: torch.device,
    ) -> None:
        """norm: the target's last, or the trunk's."""
        self.config, self.device, self._norm = config, device, norm.to(device)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._tensors = {
            name: t.to(device) if name == "draft_ids" else t.to(device, dtype) for name, t in tensors.items()
        }
        self._dtype = dtype

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    def guess(self, rows: Sequence[Row], speakers: Sequence[Speaker]) -> Guesses:
        """The likeliest token of each head."""
        chances, best = self.logits(rows).float().softmax(-1).max(-1)
        ids = self._tensors.get("draft_ids")
        return Guesses((best if ids is None else ids[best]).tolist(), chances.cumprod(0).tolist())

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """[heads, requests, draft vocabulary]."""
        last, found = (
            torch.stack([row.hidden[self.config.target_layers][row.at] for row in rows]).to(self._dtype),
            [],
        )
        h = rms_norm(last, self._norm, self.config.rms_eps)
        for head in range(self.config.num_heads_ahead):
            y = h
            for block in range(self.config.num_blocks):
                name = f"blocks.{head}.layers.{block}"
                y = y + functional.silu(
                    functional.linear(y, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])
                )
            found.append(y)
        if "lm_head.weight" in self._tensors:
            return functional.linear(torch.stack(found), self._tensors["lm_head.weight"])
        return torch.stack(
            [functional.linear(y, self._tensors[f"lm_heads.{i}.weight"]) for i, y in enumerate(found)]
        )
