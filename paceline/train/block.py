"""DFlash: a block of tokens in one pass, the target's features as keys and values of every layer; DSpark's
low-rank Markov head.

While training, a few rows of each sequence are anchors of blocks; all blocks of a sequence are one attention
under a mask.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from paceline.heads.config import DflashConfig
from paceline.train.layers import Layer, Norm, Rotary, linear
from paceline.train.modules import Guess, Head
from paceline.train.stream import Batch
from paceline.train.target import Seen, Target

ANCHORS, MOST_ANCHORS = (
    8192,
    128,
)  # of a batch, drawn anew in every one, and of a sequence: what is read is read for all of them


class Dflash(Head):
    config: DflashConfig

    def __init__(
        self, config: DflashConfig, target: Target, draft_ids: torch.Tensor, max_length: int
    ) -> None:
        super().__init__(config, target, draft_ids)
        d = config.hidden_size
        self.fc = linear(len(config.taps) * d, d)
        self.hidden_norm, self.norm = Norm(d, config.rms_eps), Norm(d, config.rms_eps)
        self.layers = nn.ModuleList(Layer(config, d, has_norms=True) for _ in range(config.num_layers))
        self.rotary = Rotary(config, max_length + config.block_size + 64)
        if config.markov_rank:
            self.markov_w1 = nn.Embedding(config.draft_vocab_size + 1, config.markov_rank)
            self.markov_w2 = linear(config.markov_rank, config.draft_vocab_size, 1e-3)
            nn.init.normal_(self.markov_w1.weight, std=0.02)
        draft_of = torch.full(
            (config.vocab_size,), config.draft_vocab_size, dtype=torch.int64, device=self.draft_ids.device
        )
        draft_of[self.draft_ids] = torch.arange(len(self.draft_ids), device=draft_of.device)
        self.register_buffer("_draft_of", draft_of, persistent=False)

    def start_from(self, seen: Seen, batch: Batch) -> None:
        features = seen.taps.flatten(0, 1)[batch.rows].float()
        self.fc.weight.data /= features.square().mean(0).sqrt().clamp(min=1e-6)

    def guesses(
        self, batch: Batch, seen: Seen, num_steps: int, draw: torch.Generator | None = None
    ) -> list[Guess]:
        config, device = self.config, batch.ids.device
        anchors, is_real = self._anchors(batch, draw)  # [B, A]: rows, and which of them count
        places = batch.position[anchors]  # [B, A]: t
        size, (num, length) = config.block_size, batch.ids.shape
        tokens = torch.full((*anchors.shape, size), config.mask_token_id, device=device)
        tokens[..., 0] = batch.token_after(1)[anchors]
        x = self.target.embed(tokens.flatten(1)).to(self.norm.weight.dtype)  # [B, A * size, hidden]
        positions = (places[..., None] + 1 + torch.arange(size, device=device)).flatten(1)
        context = self.hidden_norm(self.fc(seen.taps))  # [B, S, hidden]
        visible = self._visible(places, length, size)
        context_places = torch.arange(length, device=device).expand(num, length)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = self._layer(layer, x, positions, context, context_places, visible)
        hidden = self.norm(x).view(*anchors.shape, size, -1)
        return [
            self._guess(batch, hidden, anchors, is_real, step)
            for step in range(min(num_steps, config.num_drafts))
        ]

    def _anchors(self, batch: Batch, draw: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that blocks hang from, as many for every sequence; all of them where nothing is drawn."""
        first, count = batch.first[:, None], batch.size[:, None].clamp(min=1)
        if draw is None:
            index = torch.arange(int(batch.size.max()), device=first.device)[None]
            is_real = index < batch.size[:, None]
            return torch.where(is_real, first + index, 0), is_real
        number = max(min(ANCHORS // len(first), MOST_ANCHORS, int(batch.size.max())), 1)
        number -= number % 8 if number > 8 else 0  # masks of such widths need not be filled up
        within = torch.rand((len(first), number), generator=draw, device=draw.device)
        part = ((torch.arange(number) + within) / number).to(
            first.device
        )  # one in each of as many equal parts of the answer
        chosen = first + torch.minimum((part * count).long(), count - 1)
        return chosen.clamp(max=len(batch.rows) - 1), (batch.size > 0)[:, None].expand(-1, number)

    @staticmethod
    def _visible(places: torch.Tensor, length: int, size: int) -> torch.Tensor:
        """[B, 1, A * size, S + A * size]: the context up to t, then the rows of one's own block."""
        num, anchors = places.shape
        upto = torch.arange(length, device=places.device) <= places[..., None]  # [B, A, S]
        block = torch.arange(anchors, device=places.device).repeat_interleave(size)
        own = (block[:, None] == block).expand(num, -1, -1)
        return torch.cat([upto.repeat_interleave(size, 1), own], -1)[:, None]

    def _layer(
        self,
        layer: Layer,
        x: torch.Tensor,
        positions: torch.Tensor,
        context: torch.Tensor,
        context_places: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        q = self.rotary(attention.queries(normed), positions)
        k, v = attention.keys_values(normed)
        far_k, far_v = attention.keys_values(context)
        keys = torch.cat([self.rotary(far_k, context_places), self.rotary(k, positions)], 1)
        values = torch.cat([far_v, v], 1)
        q, keys, values = (
            y.transpose(1, 2) for y in (q, attention.for_all_heads(keys), attention.for_all_heads(values))
        )
        attended = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, scale=attention.scale
        )
        return layer.after_attention(x, attended.transpose(1, 2))

    def _guess(
        self, batch: Batch, hidden: torch.Tensor, anchors: torch.Tensor, is_real: torch.Tensor, step: int
    ) -> Guess:
        """hidden [B, A, size, hidden]. The Markov head's part is a product with the token before: both are
        one product.
        """
        base = anchors[is_real]
        x = hidden[:, :, step if self.config.sample_from_anchor else step + 1][is_real]
        weight = self.output
        if self.config.markov_rank:
            before = self.markov_w1(self._draft_of[batch.token_after(1 + step)[base]])  # type: ignore[index]
            x = torch.cat([x, before.to(x.dtype)], -1)
            weight = torch.cat([weight.to(x.dtype), self.markov_w2.weight.to(x.dtype)], 1)
        return Guess(x, weight, batch.row_after(1 + step)[base], base, step)
