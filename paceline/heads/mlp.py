"""IBM's MLP speculator in torch on any device: a small state takes in one token a step. It keeps nothing of a
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.heads.modules import load_module
from paceline.heads.others import MlpSpeculatorConfig
from paceline.heads.rows import Feed, Guesses, Node, Said, Speaker
from paceline.models.layer import rms_norm


class TorchMlpHead:
    def __init__(
        self, config: MlpSpeculatorConfig, tensors: Mapping[str, Tensor], norm: Tensor, device: torch.device
    ) -> None:
        """norm: the target's last."""
        self.config, self._norm = config, norm.to(device)
        self.module = load_module(config, tensors, device, torch.float32)

    def place(self) -> None:
        return None

    def fork(self, place: None, length: int) -> None:
        return None

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    def read(self, feeds: Sequence[Feed]) -> None:
        """Nothing is kept of a text."""

    def outputs(self, feeds: Sequence[Feed]) -> Tensor:
        raise AssertionError("an MLP speculator has no layer that others read")

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> Said:
        rows, eps = [feed.rows[-1] for feed in feeds], self.config.rms_eps
        last = torch.stack([row.hidden[self.config.target_layers][row.at] for row in rows]).float()
        state = rms_norm(last, self._norm, eps)
        if self.config.is_scaled:
            state = rms_norm(state, torch.ones_like(self._norm), eps) * 0.5**0.5
        return self._step(state, torch.tensor([feed.tokens[-1] for feed in feeds], device=state.device), 0)

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> Said:
        state = torch.stack([node.source for node in nodes])
        tokens = torch.tensor([node.token for node in nodes], device=state.device)
        return self._step(state, tokens, len(nodes[0].others))

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, least: float) -> Guesses:
        said, tokens, chances = self.begin(feeds), [], []
        for step in range(1, min(steps, self.config.num_predict) + 1):
            chance, best = said.logits.softmax(-1).max(-1)
            tokens.append(best)
            chances.append(chance)
            if step < min(steps, self.config.num_predict):
                said = self._step(torch.stack(list(said.outputs)), best, step)
        return Guesses(torch.stack(tokens).tolist(), torch.stack(chances).cumprod(0).tolist())

    def _step(self, state: Tensor, tokens: Tensor, step: int) -> Said:
        logits, state = self.module(state, tokens, step)
        return Said(logits, list(state))
