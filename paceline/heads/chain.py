"""A head that drafts token by token, in torch on any device: EAGLE-3, EAGLE-1 or a distilled model. The
interface of cpu/chain_head.py.

Invariant: keys and values of a row are written at its place and nowhere else; a row sees the first `seen`
places and those listed for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from paceline.heads.config import LayeredConfig
from paceline.heads.modules import load_module
from paceline.heads.rows import Feed, Guesses, Node, Row, Said, Speaker
from paceline.models.layer import masked, rms_norm
from paceline.models.rope import rotary_tables


class TorchPlace:
    """Keys and values of a sequence, [layers, room, kv heads, dim]."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def reserve(self, length: int) -> None:
        room = self.keys.shape[1]
        if length > room:
            more = (0, 0, 0, 0, 0, max(length, 2 * room, 64) - room)
            self.keys, self.values = functional.pad(self.keys, more), functional.pad(self.values, more)

    def extend(self, i: int, at: slice | list[int], k: Tensor, v: Tensor) -> None:
        """Layer i: k and v [rows, kv heads, dim] at their places."""
        self.keys[i, at], self.values[i, at] = k, v

    def attend(self, i: int, q: Tensor, length: int, visible: Tensor | None) -> Tensor:
        """Layer i: q [rows, heads, dim] over the first places; visible [rows, length], all where None."""
        return masked(q[None], self.keys[None, i, :length], self.values[None, i, :length], visible)[0]


class TorchHead:
    """What heads that attend share: the definition with its weights, and places for keys and values."""

    def __init__(
        self,
        config: LayeredConfig,
        tensors: Mapping[str, Tensor],
        decoder: Any,
        device: torch.device,
        ahead: int = 0,
    ) -> None:
        """decoder: the target's, in torch. ahead: positions beyond its context."""
        self.config, self.device, self._embed = config, device, decoder.embed
        self._dtype = decoder.embed(torch.zeros(1, dtype=torch.int64, device=device)).dtype
        self.module = load_module(config, tensors, device, self._dtype)
        self._ids = tensors["draft_ids"].to(device) if "draft_ids" in tensors else None
        room = decoder.config.max_context + ahead
        self._tables = rotary_tables(config.rope, config.head_dim, room).to(device)

    def place(self) -> TorchPlace:
        shape = (self.module.num_layers, 0, self.config.num_kv_heads, self.config.head_dim)
        empty = torch.empty(shape, dtype=self._dtype, device=self.device)
        return TorchPlace(empty, empty)

    def fork(self, place: TorchPlace, length: int) -> TorchPlace:
        return TorchPlace(place.keys[:, :length].clone(), place.values[:, :length].clone())

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    def _features(self, rows: Sequence[Row]) -> Tensor:
        """[rows, taps * hidden] of the target."""
        layers = self.config.hidden_layers
        if not layers:
            return torch.empty((len(rows), 0), device=self.device)
        return features_of(rows, layers).to(self._dtype)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _tokens(self, words: Tensor) -> Tensor:
        """Draft ids -> tokens."""
        return words if self._ids is None else self._ids[words]


class _Span(NamedTuple):
    """Rows of one sequence, and what they see of it."""

    place: TorchPlace
    first: int  # row
    at: list[int]
    visible: Tensor  # [rows, places] bool


class TorchChainHead(TorchHead):
    def __init__(
        self,
        config: LayeredConfig,
        tensors: Mapping[str, Tensor],
        decoder: Any,
        feature_norm: Tensor | None,
        device: torch.device,
    ) -> None:
        super().__init__(config, tensors, decoder, device)
        self._feature_norm = None if feature_norm is None else feature_norm.to(device)

    def read(self, feeds: Sequence[Feed]) -> None:
        self.outputs(feeds)

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> Said:
        return self._predict(self.outputs(feeds))

    @torch.inference_mode()
    def outputs(self, feeds: Sequence[Feed]) -> Tensor:
        """[feeds, hidden] after the last row of each."""
        spans, first = [], 0
        for feed in feeds:
            at = torch.arange(feed.start + len(feed.tokens), device=self.device)
            spans.append(_Span(feed.place, first, at[feed.start :].tolist(), at <= at[feed.start :, None]))
            first += len(feed.tokens)
        tokens = self._tensor([t for feed in feeds for t in feed.tokens])
        positions = self._tensor([at for span in spans for at in span.at])
        features = self._features([row for feed in feeds for row in feed.rows])
        if self._feature_norm is not None:
            features = rms_norm(features, self._feature_norm, self.config.rms_eps)
        out = self._run(tokens, positions, self.module.source(features), spans)
        return out[[span.first + len(span.at) - 1 for span in spans]]

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> Said:
        order = sorted(range(len(nodes)), key=lambda i: id(nodes[i].place))
        rows, spans = [nodes[i] for i in order], []  # type: list[Node], list[_Span]
        for i, node in enumerate(rows):
            if not i or node.place is not rows[i - 1].place:
                together = [n for n in rows[i:] if n.place is node.place]
                spans.append(_Span(node.place, i, [n.at for n in together], self._visible(together)))
        tokens, positions = self._tensor([n.token for n in rows]), self._tensor([n.position for n in rows])
        out = self._run(tokens, positions, torch.stack([n.source for n in rows]), spans)
        back = torch.empty_like(out)
        back[order] = out
        return self._predict(back)

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, least: float) -> Guesses:
        """The likeliest tokens; the device is waited for once, after the last step."""
        said, tokens, chances = self.begin(feeds), [], []
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        for step in range(steps):
            chance, best = said.logits.float().softmax(-1).max(-1)
            tokens.append(self._tokens(best))
            chances.append(chance)
            if step + 1 == steps:
                break
            at = [end + step for end in ends]
            seen = [torch.ones((1, place + 1), dtype=torch.bool, device=self.device) for place in at]
            spans = [_Span(feed.place, i, [at[i]], seen[i]) for i, feed in enumerate(feeds)]
            said = self._predict(
                self._run(tokens[-1], self._tensor(at), torch.stack(list(said.outputs)), spans)
            )
        return Guesses(torch.stack(tokens).tolist(), torch.stack(chances).cumprod(0).tolist())

    def _visible(self, nodes: Sequence[Node]) -> Tensor:
        seen = torch.zeros((len(nodes), max(n.at for n in nodes) + 1), dtype=torch.bool)
        for i, node in enumerate(nodes):
            seen[i, : node.seen] = True
            seen[i, list(node.others)] = True
        return seen.to(self.device)

    def _run(self, tokens: Tensor, positions: Tensor, source: Tensor, spans: Sequence[_Span]) -> Tensor:
        """Outputs [T, hidden]."""
        for span in spans:
            span.place.reserve(max(span.at) + 1)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = []
            for place, first, at, visible in spans:
                rows = slice(first, first + len(at))
                place.extend(i, at, k[rows], v[rows])
                parts.append(place.attend(i, q[rows], visible.shape[1], visible))
            return torch.cat(parts)

        embedded = self._embed(tokens).to(self._dtype)
        found: Tensor = self.module(embedded, source, self._tables.at(positions), attend)
        return found

    def _predict(self, x: Tensor) -> Said:
        hidden, source = self.module.finish(x)
        return Said(self.module.lm_head(hidden), list(source))


def features_of(rows: Sequence[Row], layers: Sequence[int]) -> Tensor:
    """[rows, layers * hidden]; rows of one pass are taken together."""
    parts, first = [], 0
    while first < len(rows):
        hidden = rows[first].hidden
        last = next((i for i in range(first, len(rows)) if rows[i].hidden is not hidden), len(rows))
        index = [row.at for row in rows[first:last]]
        parts.append(torch.cat([hidden[layer][index] for layer in layers], -1))
        first = last
    return torch.cat(parts)
