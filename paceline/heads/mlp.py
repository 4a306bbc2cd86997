"""IBM's MLP speculator in torch on any device: a small state takes in one token a step. It keeps nothing of a
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from paceline.heads.others import MlpSpeculatorConfig
from paceline.heads.rows import Feed, Guesses, Node, Said, Speaker
from paceline.models.attention import rms_norm


class TorchMlpHead:
    def __init__(
        self,
        config: MlpSpeculatorConfig,
        tensors: Mapping[str, torch.Tensor],
        norm: torch.Tensor,
        device: torch.device,
    ) -> None:
        """norm: the target's last."""
        self.config, self._norm = config, norm.to(device)
        self._tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._keep = 0.5 ** (0.5 / config.num_predict)  # of the state
        self._take = ((1 - self._keep**2) * config.inner_dim / 2) ** 0.5  # of the token

    def place(self) -> None:
        return None

    def fork(self, place: None, length: int) -> None:
        return None

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    def read(self, feeds: Sequence[Feed]) -> None:
        """Nothing is kept of a text."""

    @torch.inference_mode()
    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        raise AssertionError("an MLP speculator has no layer that others read")

    def begin(self, feeds: Sequence[Feed]) -> Said:
        last = torch.stack(
            [feed.rows[-1].hidden[self.config.target_layers][feed.rows[-1].at] for feed in feeds]
        ).float()
        state = rms_norm(last, self._norm, self.config.rms_eps)
        if self.config.is_scaled:
            state = rms_norm(state, torch.ones_like(self._norm), self.config.rms_eps) * 0.5**0.5
        return self._step(state, [feed.tokens[-1] for feed in feeds], 0)

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> Said:
        return self._step(
            torch.stack([node.source for node in nodes]), [node.token for node in nodes], len(nodes[0].others)
        )

    def guess(self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, least: float) -> Guesses:
        said, tokens, chances = self.begin(feeds), [], []
        for step in range(1, min(steps, self.config.num_predict) + 1):
            chance, best = said.logits.softmax(-1).max(-1)
            tokens.append(best)
            chances.append(chance)
            if step < min(steps, self.config.num_predict):
                with torch.inference_mode():
                    said = self._step(torch.stack(list(said.outputs)), best, step)
        return Guesses(torch.stack(tokens).tolist(), torch.stack(chances).cumprod(0).tolist())

    def _step(self, state: torch.Tensor, tokens: Sequence[int] | torch.Tensor, step: int) -> Said:
        weights = {
            part: f"{part}.{self.config.place_of(part, step)}" for part in ("emb", "proj", "head", "ln")
        }
        ids = torch.as_tensor(tokens, device=state.device)
        token = functional.embedding(ids, self._tensors[f"{weights['emb']}.weight"])
        mixed = (
            functional.linear(state, self._tensors[f"{weights['proj']}.weight"]) * self._keep
            + token * self._take
        )
        normed = (
            rms_norm(mixed, self._tensors[f"{weights['ln']}.weight"], self.config.rms_eps)
            + self._tensors[f"{weights['ln']}.bias"]
        )
        state = functional.gelu(normed)
        return Said(functional.linear(state, self._tensors[f"{weights['head']}.weight"]), list(state))
