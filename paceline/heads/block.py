"""DFlash in torch on any device. The interface of cpu/block_head.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from paceline.heads.chain import TorchPlace, embedder, features_of
from paceline.heads.config import DflashConfig
from paceline.heads.rows import BlockFeed, Guesses, Row, Speaker
from paceline.models.attention import rms_norm
from paceline.models.rope import rotary_tables, rotate


class TorchBlockHead:
    def __init__(
        self, config: DflashConfig, tensors: Mapping[str, torch.Tensor], decoder: Any, device: torch.device
    ) -> None:
        self.config, self.device, self._embed = config, device, embedder(decoder)
        self._dtype = self._embed(torch.zeros(1, dtype=torch.int64, device=device)).dtype
        self._tensors = {
            name: t.to(device) if name == "draft_ids" else t.to(device, self._dtype)
            for name, t in tensors.items()
        }
        self._tables = [
            t.to(device)
            for t in rotary_tables(
                config.rope, config.head_dim, decoder.config.max_context + config.block_size
            )
        ]
        self._words = torch.full((config.vocab_size,), config.draft_vocab_size, device=device)
        ids = self._tensors.get("draft_ids", torch.arange(config.vocab_size, device=device))
        self._words[ids] = torch.arange(len(ids), device=device)

    def place(self) -> TorchPlace:
        shape = (self.config.num_layers, 0, self.config.num_kv_heads, self.config.head_dim)
        return TorchPlace(torch.empty(shape, dtype=self._dtype, device=self.device))

    def fork(self, place: TorchPlace, length: int) -> TorchPlace:
        fresh = self.place()
        fresh.keys, fresh.values = place.keys[:, :length].clone(), place.values[:, :length].clone()
        return fresh

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    @torch.inference_mode()
    def read(self, feed: BlockFeed) -> None:
        """Features, fused and normed, as keys and values of every layer."""
        end = feed.start + len(feed.rows)
        feed.place.reserve(end + self.config.block_size)
        fused = self._product(self._features(feed.rows), "fc")
        context = self._norm(fused, "hidden_norm")
        positions = torch.arange(feed.start, end, device=self.device)
        for i in range(self.config.num_layers):
            k, v = self._keys_values(i, context, positions)
            feed.place.keys[i, feed.start : end], feed.place.values[i, feed.start : end] = k, v

    @torch.inference_mode()
    def logits(self, feeds: Sequence[BlockFeed], steps: int) -> torch.Tensor:
        for feed in feeds:
            self.read(feed)
        hidden = torch.stack([self._block(feed) for feed in feeds], 1)  # [size, requests, hidden]
        first = 0 if self.config.sample_from_anchor else 1
        return self._product(self._norm(hidden[first : first + steps], "norm"), "lm_head")

    @torch.inference_mode()
    def guess(self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int) -> Guesses:
        """The likeliest tokens, from left to right; the device is waited for once."""
        ids, tokens, chances = self._tensors.get("draft_ids"), [], []
        words = self._words[torch.tensor([feed.root for feed in feeds], device=self.device)]
        for logits in self.logits(feeds, steps):
            if self.config.markov_rank:
                logits = logits + self._product(self._tensors["markov_w1.weight"][words], "markov_w2")
            chance, words = logits.float().softmax(-1).max(-1)
            tokens.append(words if ids is None else ids[words])
            chances.append(chance)
        return Guesses(torch.stack(tokens).tolist(), torch.stack(chances).cumprod(0).tolist())

    def _features(self, rows: Sequence[Row]) -> torch.Tensor:
        return features_of(rows, self.config.hidden_layers).to(self._dtype)

    def _block(self, feed: BlockFeed) -> torch.Tensor:
        """[size, hidden]: rows that see the whole context and each other."""
        config, start = self.config, feed.start + len(feed.rows)
        end, group = start + config.block_size, config.num_heads // config.num_kv_heads
        positions = torch.arange(start, end, device=self.device)
        x = self._embed(
            torch.tensor([feed.root, *[config.mask_token_id] * (config.block_size - 1)], device=self.device)
        ).to(self._dtype)
        for i in range(config.num_layers):
            prefix = f"layers.{i}."
            normed = self._norm(x, f"{prefix}input_layernorm")
            feed.place.keys[i, start:end], feed.place.values[i, start:end] = self._keys_values(
                i, normed, positions
            )
            q = self._product(normed, f"{prefix}self_attn.q_proj").unflatten(-1, (-1, config.head_dim))
            q = self._turn(self._norm(q, f"{prefix}self_attn.q_norm"), positions)
            keys, values = (
                t[i, :end].repeat_interleave(group, 1).transpose(0, 1)[None]
                for t in (feed.place.keys, feed.place.values)
            )
            out = functional.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values)[0].transpose(
                0, 1
            )
            x = x + self._product(out.flatten(1), f"{prefix}self_attn.o_proj")
            z = self._norm(x, f"{prefix}post_attention_layernorm")
            gated = functional.silu(self._product(z, f"{prefix}mlp.gate_proj")) * self._product(
                z, f"{prefix}mlp.up_proj"
            )
            x = x + self._product(gated, f"{prefix}mlp.down_proj")
        return x

    def _keys_values(
        self, i: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = f"layers.{i}.self_attn."
        k, v = (
            self._product(x, f"{prefix}{name}_proj").unflatten(-1, (-1, self.config.head_dim))
            for name in "kv"
        )
        return self._turn(self._norm(k, f"{prefix}k_norm"), positions), v

    def _turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, *(table[positions].to(x.dtype) for table in self._tables))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._tensors[f"{name}.weight"], self.config.rms_eps)

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._tensors[f"{name}.weight"])
