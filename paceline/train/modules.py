"""The four kinds of heads in torch: what is trained, and the oracle of the compiled kernels.

A head is shown a batch and what the target computed on it, and returns *guesses*: hidden states beside the
output layer they are to be multiplied with, the row of the teacher each is measured against, and the step of
the draft it belongs to. Invariant: `state_dict()` has exactly the names and shapes of the head's config (the
draft ids excepted, which are no weights).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from paceline.heads.config import DflashConfig, DraftConfig, EagleConfig, HeadConfig, MedusaConfig
from paceline.train.chains import chain_attention
from paceline.train.layers import Layer, Norm, Rotary, linear
from paceline.train.stream import Batch
from paceline.train.target import Seen, Target, causal


class Guess(NamedTuple):
    """Predictions of one step of a draft."""

    hidden: torch.Tensor  # [n, width]
    weight: torch.Tensor  # [draft vocabulary, width]
    rows: torch.Tensor  # [n]: the teacher's row, or -1
    base: torch.Tensor  # [n]: the row the draft starts from
    step: int


class Head(nn.Module):
    """What all kinds share: the target's embedding by reference, and the output layer over the draft
    vocabulary.
    """

    draft_ids: torch.Tensor

    def __init__(self, config: HeadConfig, target: Target, draft_ids: torch.Tensor) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.register_buffer("draft_ids", draft_ids.to(target.head.device), persistent=False)
        rows = target.head[self.draft_ids]
        self.lm_head: nn.Linear | None = None
        if config.has_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.lm_head.weight.data.copy_(rows)
        else:
            self.register_buffer("_rows", rows, persistent=False)

    @property
    def output(self) -> torch.Tensor:
        """[draft vocabulary, hidden]."""
        found = self._rows if self.lm_head is None else self.lm_head.weight
        assert isinstance(found, torch.Tensor)
        return found

    def guesses(
        self, batch: Batch, seen: Seen, num_steps: int, draw: torch.Generator | None = None
    ) -> list[Guess]:
        """Without a generator, from every row."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the head's file holds, float32."""
        found = {name: value.detach().float().cpu() for name, value in self.state_dict().items()}
        if self.config.draft_vocab_size < self.config.vocab_size:
            found["draft_ids"] = self.draft_ids.to(torch.int32).cpu()
        return found

    def start_from(self, seen: Seen, batch: Batch) -> None:
        """A look at a first batch before training: nothing by default."""


class EagleLayer(Layer):
    """Reads a token and a feature, each with a norm of its own."""

    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__(config, width)
        self.hidden_norm = Norm(config.hidden_size, config.rms_eps)


class Eagle(Head):
    config: EagleConfig

    def __init__(self, config: EagleConfig, target: Target, draft_ids: torch.Tensor, max_length: int) -> None:
        super().__init__(config, target, draft_ids)
        d = config.hidden_size
        self.fc = linear(len(config.taps) * d, d)
        self.midlayer = EagleLayer(config, 2 * d)
        self.norm = Norm(d, config.rms_eps)
        self.rotary = Rotary(config, max_length + 64)

    def start_from(self, seen: Seen, batch: Batch) -> None:
        """Some channels of a residual stream are a thousand times larger than others: start with all of them
        alike.
        """
        features = seen.taps.flatten(0, 1)[batch.rows].float()
        spread = features.square().mean(0).sqrt().clamp(min=1e-6)
        self.fc.weight.data /= spread

    def guesses(
        self, batch: Batch, seen: Seen, num_steps: int, draw: torch.Generator | None = None
    ) -> list[Guess]:
        attention, rows = self.midlayer.self_attn, batch.rows
        fused = self.fc(seen.taps)  # [B, S, hidden]
        places = torch.arange(batch.ids.shape[1], device=rows.device).expand_as(batch.ids)
        following = functional.pad(batch.ids[:, 1:], (0, 1))
        k, v = self._keys_values(self._inputs(following, fused), places)
        text_k, text_v = (
            attention.for_all_heads(x).transpose(1, 2).contiguous() for x in (k, v)
        )  # [B, H, S, D]
        feature, found = fused.flatten(0, 1)[rows], []
        own_k, own_v = (
            x.new_empty((len(rows), 0, attention.num_heads, attention.head_dim)) for x in (text_k, text_v)
        )
        for step in range(num_steps):
            inputs = self._inputs(batch.token_after(1 + step), feature)
            position = batch.position + step
            q = self.rotary(attention.queries(inputs), position)
            if step:
                extra = [attention.for_all_heads(x)[:, None] for x in self._keys_values(inputs, position)]
                own_k, own_v = torch.cat([own_k, extra[0]], 1), torch.cat([own_v, extra[1]], 1)
            attended = chain_attention(q, own_k, own_v, text_k, text_v, rows, attention.scale)
            residual = self.midlayer.hidden_norm(feature) if self.config.norm_before_residual else feature
            feature = self.midlayer.after_attention(residual, attended)
            normed = self.norm(feature)
            base = torch.arange(len(rows), device=rows.device)
            found.append(Guess(normed, self.output, batch.row_after(1 + step), base, step))
            feature = normed if self.config.norm_output else feature
        return found

    def _inputs(self, tokens: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """The next token's embedding beside the feature, each normed: [..., 2 * hidden]."""
        embedded = self.midlayer.input_layernorm(self.target.embed(tokens))
        return torch.cat([embedded, self.midlayer.hidden_norm(feature)], -1)

    def _keys_values(
        self, inputs: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.midlayer.self_attn.keys_values(inputs)
        return self.rotary(k, positions), v


class Medusa(Head):
    config: MedusaConfig

    def __init__(
        self, config: MedusaConfig, target: Target, draft_ids: torch.Tensor, max_length: int
    ) -> None:
        super().__init__(config, target, draft_ids)
        self.blocks = nn.ModuleList(nn.Module() for _ in range(config.num_heads_ahead))
        for block in self.blocks:
            layers = [nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_blocks)]
            for layer in layers:
                nn.init.zeros_(layer.bias)
                nn.init.normal_(layer.weight, std=0.01)
            block.layers = nn.ModuleList(layers)
        self.trunk = None if config.trunk is None else Eagle(config.trunk, target, draft_ids, max_length)

    def start_from(self, seen: Seen, batch: Batch) -> None:
        if self.trunk is not None:
            self.trunk.start_from(seen, batch)

    def guesses(
        self, batch: Batch, seen: Seen, num_steps: int, draw: torch.Generator | None = None
    ) -> list[Guess]:
        if self.trunk is None:
            start = self.target.final(seen.last.flatten(0, 1)[batch.rows])  # [N, hidden]
        else:
            start = self.trunk.guesses(batch, seen, 1)[0].hidden
        base, found = torch.arange(len(batch.rows), device=start.device), []
        for step, block in enumerate(list(self.blocks)[:num_steps]):
            x = start
            for layer in block.layers:  # type: ignore[union-attr]
                x = x + functional.silu(layer(x))
            found.append(Guess(x, self.output, batch.row_after(1 + step), base, step))
        return found


class Draft(Head):
    config: DraftConfig

    def __init__(self, config: DraftConfig, target: Target, draft_ids: torch.Tensor, max_length: int) -> None:
        super().__init__(config, target, draft_ids)
        self.layers = nn.ModuleList(Layer(config, config.hidden_size) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_eps)
        self.rotary = Rotary(config, max_length + 64)
        self._copy_layers()

    def _copy_layers(self) -> None:
        """Where sizes agree a layer starts as one of the target's, the first and the last among them."""
        own, depth = len(self.layers), self.target.config.num_layers
        for i, layer in enumerate(self.layers):
            source = f"layers.{round(i * (depth - 1) / max(1, own - 1))}."
            for name, weight in layer.named_parameters():
                theirs = self.target.weights.get(source + name)
                if theirs is not None and theirs.shape == weight.shape:
                    weight.data.copy_(theirs)
        self.norm.weight.data.copy_(self.target.norm)

    def guesses(
        self, batch: Batch, seen: Seen, num_steps: int, draw: torch.Generator | None = None
    ) -> list[Guess]:
        """While training one guess a row: later steps are the same function of a longer text."""
        x = self.target.embed(batch.ids).to(self.norm.weight.dtype)
        places = torch.arange(batch.ids.shape[1], device=x.device).expand_as(batch.ids)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            k, v = attention.keys_values(normed)
            q, k = self.rotary(attention.queries(normed), places), self.rotary(k, places)
            attended = causal(q, k, v, attention.scale).unflatten(-1, (attention.num_heads, -1))
            x = layer.after_attention(x, attended)
        hidden = self.norm(x.flatten(0, 1)[batch.rows])  # row t: what comes after the token at t
        base = torch.arange(len(batch.rows), device=x.device)
        if draw is not None:
            return [Guess(hidden, self.output, base, base, 0)]
        after = [batch.row_after(1 + step) for step in range(num_steps)]
        return [
            Guess(hidden[rows.clamp(min=0)], self.output, rows, base, step) for step, rows in enumerate(after)
        ]


def build_head(config: HeadConfig, target: Target, draft_ids: torch.Tensor, max_length: int) -> Head:
    from paceline.train.block import Dflash

    device = target.head.device
    if isinstance(config, EagleConfig):
        return Eagle(config, target, draft_ids, max_length).to(device)
    if isinstance(config, MedusaConfig):
        return Medusa(config, target, draft_ids, max_length).to(device)
    if isinstance(config, DflashConfig):
        return Dflash(config, target, draft_ids, max_length).to(device)
    assert isinstance(config, DraftConfig)
    return Draft(config, target, draft_ids, max_length).to(device)
