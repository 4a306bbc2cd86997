"""Heads that attend, in torch on any device: EAGLE-3, EAGLE-1 and distilled models draft token by token,
DFlash a block in one pass.

Invariant: keys and values of a row are written at its place and nowhere else; a row sees the first `seen`
places and those listed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from paceline.heads.config import DflashConfig, LayeredConfig
from paceline.heads.modules import Tensors
from paceline.heads.rows import Feed, Guesses, HeadOutput, Node, Row, Sampler
from paceline.heads.torch_heads import TorchHead
from paceline.models.layer import masked, rms_norm
from paceline.models.rope import rotary_tables


@dataclass(slots=True)
class TorchPlace:
    """A sequence's keys and values."""

    kept: Tensor  # [2, layers, room, kv heads, dim]

    def reserve(self, length: int) -> None:
        room = self.kept.shape[2]
        if length > room:
            self.kept = functional.pad(self.kept, (0, 0, 0, 0, 0, max(length, 2 * room, 64) - room))

    def export(self, length: int) -> Tensor:
        return self.kept[:, :, :length].cpu()

    def adopt(self, data: Tensor) -> None:
        self.kept[:, :, : data.shape[2]] = data.to(self.kept.device)


class _Rows(NamedTuple):
    """Rows of one sequence, and what they see of it."""

    place: TorchPlace
    at: Tensor  # [rows]: where their keys and values go, the last one last
    positions: Tensor  # [rows]
    visible: Tensor | None = None  # [rows, places up to the last row's] bool; None: all

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Layer i: q [rows, heads, dim] over the places up to the last row's, whose k and v are written."""
        keys, values = self.place.kept[:, i]
        keys[self.at], values[self.at] = k, v
        end = int(self.at[-1]) + 1
        return masked(q[None], keys[None, :end], values[None, :end], self.visible)[0]


class AttendingHead(TorchHead):
    """What heads that attend share: places for keys and values, and the target's embeddings."""

    most_read = 4

    def __init__(
        self, config: LayeredConfig, tensors: Tensors, decoder: Any, device: torch.device, ahead: int = 0
    ) -> None:
        """decoder: the target's, in torch. ahead: positions beyond its context."""
        self._embed = decoder.embed
        dtype = decoder.embed(torch.zeros(1, dtype=torch.int64, device=device)).dtype
        super().__init__(config, tensors, device, dtype)
        room = decoder.config.max_context + ahead
        self._tables = rotary_tables(config.rope, config.rotary_width, room).to(device)

    def place(self) -> TorchPlace:
        shape = (2, self.module.num_layers, 0, self.config.num_kv_heads, self.config.head_dim)
        return TorchPlace(torch.empty(shape, dtype=self._dtype, device=self.device))

    def fork(self, place: TorchPlace, length: int) -> TorchPlace:
        return TorchPlace(place.kept[:, :, :length].clone())

    def _features(self, rows: Sequence[Row]) -> Tensor:
        """[rows, taps * hidden] of the target; rows of one pass are taken together."""
        layers, parts = self.config.hidden_layers, []
        if not layers:
            return torch.empty((len(rows), 0), device=self.device)
        for _, group in groupby(rows, key=lambda row: id(row.hidden)):
            some = list(group)
            index = [row.at for row in some]
            parts.append(torch.cat([some[0].hidden[layer][index] for layer in layers], -1))
        return torch.cat(parts).to(self._dtype)


class TorchChainHead(AttendingHead):
    """EAGLE or a distilled model. Sequences, and nodes of a tree, run one after the other."""

    def __init__(
        self, config: LayeredConfig, tensors: Tensors, decoder: Any, norm: Tensor | None, device: torch.device
    ) -> None:
        """norm: the target's last, for heads that read what comes out of it."""
        super().__init__(config, tensors, decoder, device)
        self._feature_norm = None if norm is None else norm.to(device)

    def read(self, *feeds: Feed) -> None:
        self.outputs(feeds)

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> HeadOutput:
        return self._predict(self.outputs(feeds))

    @torch.inference_mode()
    def outputs(self, feeds: Sequence[Feed]) -> Tensor:
        """[feeds, hidden] after the last row of each."""
        found = []
        for feed in feeds:
            features = self._features(feed.rows)
            if self._feature_norm is not None:
                features = rms_norm(features, self._feature_norm, self.config.rms_eps)
            places = torch.arange(feed.start + len(feed.tokens), device=self.device)
            own, tokens = places[feed.start :], self._tensor(feed.tokens)
            rows = _Rows(feed.place, own, own, places <= own[:, None])
            found.append(self._run(rows, tokens, self.module.source(features))[-1])
        return torch.stack(found)

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> HeadOutput:
        found = []
        for node in nodes:
            visible = torch.zeros((1, node.at + 1), dtype=torch.bool)
            visible[0, : node.seen] = True
            visible[0, list(node.others)] = True
            at, position = self._tensor([node.at]), self._tensor([node.position])
            rows = _Rows(node.place, at, position, visible.to(self.device))
            found.append(self._run(rows, self._tensor([node.token]), node.source[None]))
        return self._predict(torch.cat(found))

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, least: float) -> Guesses:
        def following(tokens: Tensor, sources: Tensor, step: int) -> HeadOutput:
            found = []
            for i, feed in enumerate(feeds):
                at = self._tensor([feed.start + len(feed.tokens) + step - 1])
                found.append(self._run(_Rows(feed.place, at, at), tokens[i : i + 1], sources[i : i + 1]))
            return self._predict(torch.cat(found))

        return self._chain(self.begin(feeds), steps, following)

    def _run(self, rows: _Rows, tokens: Tensor, source: Tensor) -> Tensor:
        """Outputs [rows, hidden]."""
        rows.place.reserve(int(rows.at[-1]) + 1)
        embedded = self._embed(tokens).to(self._dtype)
        found: Tensor = self.module(embedded, source, self._tables.at(rows.positions), rows.attend)
        return found

    def _predict(self, x: Tensor) -> HeadOutput:
        hidden, source = self.module.finish(x)
        return HeadOutput(self.module.lm_head(hidden), source)


class TorchBlockHead(AttendingHead):
    """DFlash: a block of tokens in one pass. What it wrote beyond its text is overwritten by the next one."""

    def __init__(self, config: DflashConfig, tensors: Tensors, decoder: Any, device: torch.device) -> None:
        super().__init__(config, tensors, decoder, device, config.block_size)
        self._words = torch.full((config.vocab_size,), config.draft_vocab_size, device=device)
        ids = torch.arange(config.vocab_size, device=device) if self._ids is None else self._ids
        self._words[ids] = torch.arange(len(ids), device=device)

    @torch.inference_mode()
    def read(self, *feeds: Feed) -> None:
        """Features, fused and normed, as keys and values of every layer."""
        for feed in feeds:
            end = feed.start + len(feed.rows)
            feed.place.reserve(end + self.config.block_size)
            angles = self._tables.at(torch.arange(feed.start, end, device=self.device))
            for i, (k, v) in enumerate(self.module.keys_values(self._features(feed.rows), angles)):
                feed.place.kept[0, i, feed.start : end], feed.place.kept[1, i, feed.start : end] = k, v

    @torch.inference_mode()
    def logits(self, feeds: Sequence[Feed], steps: int) -> Tensor:
        self.read(*feeds)
        hidden = torch.stack([self._block(feed) for feed in feeds], 1)  # [size, requests, hidden]
        first = 0 if self.config.sample_from_anchor else 1
        found: Tensor = self.module.lm_head(hidden[first : first + steps])
        return found

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int) -> Guesses:
        """The likeliest tokens, from left to right."""
        logits, module = self.logits(feeds, steps), self.module

        def following(tokens: Tensor, _: Any, step: int) -> HeadOutput:
            if not self.config.markov_rank:
                return HeadOutput(logits[step], ())
            return HeadOutput(logits[step] + module.markov_w2(module.markov_w1.rows(self._words[tokens])), ())

        roots = self._tensor([feed.tokens[-1] for feed in feeds])
        return self._chain(following(roots, (), 0), steps, following)

    def _block(self, feed: Feed) -> Tensor:
        """[size, hidden]: rows that see the whole context and each other."""
        start, size = feed.start + len(feed.rows), self.config.block_size
        tokens = self._tensor([feed.tokens[-1], *[self.config.mask_token_id] * (size - 1)])
        at = torch.arange(start, start + size, device=self.device)
        rows, angles = _Rows(feed.place, at, at), self._tables.at(at)
        found: Tensor = self.module(self._embed(tokens).to(self._dtype), angles, rows.attend)
        return found
