"""A head that drafts token by token, in torch on any device: EAGLE-3, EAGLE-1 or a distilled model. The
interface of cpu/chain_head.py.

Invariant: keys and values of a row are written at its place and nowhere else; a row sees the first `seen`
places and those listed for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from paceline.heads.config import DraftConfig, EagleConfig, LayeredConfig
from paceline.heads.others import Eagle1Config
from paceline.heads.rows import Feed, Guesses, Node, Row, Said, Speaker
from paceline.models.attention import rms_norm
from paceline.models.rope import rotary_tables, rotate


class TorchPlace:
    """Keys and values of a sequence, [layers, room, kv heads, dim]."""

    __slots__ = ("keys", "values")

    def __init__(self, empty: torch.Tensor) -> None:
        self.keys = self.values = empty

    def reserve(self, length: int) -> None:
        if length > self.keys.shape[1]:
            more = max(length, 2 * self.keys.shape[1], 64) - self.keys.shape[1]
            self.keys, self.values = (
                functional.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.keys, self.values)
            )


class _Span(NamedTuple):
    """Rows of one sequence, and what they see of it."""

    place: TorchPlace
    first: int  # row
    at: list[int]
    visible: torch.Tensor  # [rows, places] bool


class TorchChainHead:
    def __init__(
        self,
        config: LayeredConfig,
        tensors: Mapping[str, torch.Tensor],
        decoder: Any,
        feature_norm: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        self.config, self.device, self._embed = config, device, embedder(decoder)
        probe = self._embed(torch.zeros(1, dtype=torch.int64, device=device))
        self._dtype = probe.dtype
        self._tensors = {
            name: t.to(device) if name == "draft_ids" else t.to(device, self._dtype)
            for name, t in tensors.items()
        }
        self._feature_norm = None if feature_norm is None else feature_norm.to(device)
        self._tables = [
            t.to(device) for t in rotary_tables(config.rope, config.head_dim, decoder.config.max_context)
        ]
        self._layers = (
            [f"layers.{i}." for i in range(config.num_layers)]
            if isinstance(config, DraftConfig)
            else ["midlayer."]
        )

    def place(self) -> TorchPlace:
        shape = (len(self._layers), 0, self.config.num_kv_heads, self.config.head_dim)
        return TorchPlace(torch.empty(shape, dtype=self._dtype, device=self.device))

    def fork(self, place: TorchPlace, length: int) -> TorchPlace:
        fresh = self.place()
        fresh.keys, fresh.values = place.keys[:, :length].clone(), place.values[:, :length].clone()
        return fresh

    def can_guess(self, temperature: float) -> bool:
        return temperature == 0

    def read(self, feeds: Sequence[Feed]) -> None:
        self.outputs(feeds)

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> Said:
        return self._speak(self.outputs(feeds))

    @torch.inference_mode()
    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """[feeds, hidden] after the last row of each."""
        spans, first = [], 0
        for feed in feeds:
            count, end = len(feed.tokens), feed.start + len(feed.tokens)
            seen = (
                torch.arange(end, device=self.device)
                <= torch.arange(feed.start, end, device=self.device)[:, None]
            )
            spans.append(_Span(feed.place, first, list(range(feed.start, end)), seen))
            first += count
        tokens = torch.tensor([t for feed in feeds for t in feed.tokens], device=self.device)
        positions = torch.tensor([at for span in spans for at in span.at], device=self.device)
        features = self._features([row for feed in feeds for row in feed.rows])
        out = self._run(tokens, positions, features, spans, is_true=True)
        return out[[span.first + len(span.at) - 1 for span in spans]]

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> Said:
        order = sorted(range(len(nodes)), key=lambda i: id(nodes[i].place))
        rows, spans = [nodes[i] for i in order], []  # type: list[Node], list[_Span]
        for i, node in enumerate(rows):
            if not i or node.place is not rows[i - 1].place:
                together = [n for n in rows[i:] if n.place is node.place]
                spans.append(_Span(node.place, i, [n.at for n in together], self._visible(together)))
        tokens, positions = (
            torch.tensor(column, device=self.device)
            for column in ([n.token for n in rows], [n.position for n in rows])
        )
        out = self._run(tokens, positions, torch.stack([n.source for n in rows]), spans, is_true=False)
        back = torch.empty_like(out)
        back[order] = out
        return self._speak(back)

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, least: float) -> Guesses:
        """The likeliest tokens; the device is waited for once, after the last step."""
        said, tokens, chances = self.begin(feeds), [], []
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        reach, ids = torch.ones(len(feeds), device=self.device), self._tensors.get("draft_ids")
        for step in range(steps):
            values, best = said.logits.float().softmax(-1).max(-1)
            reach = reach * values
            chosen = best if ids is None else ids[best]
            tokens.append(chosen)
            chances.append(reach)
            if step + 1 == steps:
                break
            spans = [
                _Span(f.place, i, [ends[i] + step], self._all(ends[i] + step + 1))
                for i, f in enumerate(feeds)
            ]
            positions = torch.tensor([end + step for end in ends], device=self.device)
            said = self._speak(
                self._run(chosen, positions, torch.stack(list(said.outputs)), spans, is_true=False)
            )
        return Guesses(torch.stack(tokens).tolist(), torch.stack(chances).tolist())

    def _all(self, length: int) -> torch.Tensor:
        return torch.ones((1, length), dtype=torch.bool, device=self.device)

    def _visible(self, nodes: Sequence[Node]) -> torch.Tensor:
        seen = torch.zeros((len(nodes), max(n.at for n in nodes) + 1), dtype=torch.bool)
        for i, node in enumerate(nodes):
            seen[i, : node.seen] = True
            seen[i, list(node.others)] = True
        return seen.to(self.device)

    def _features(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, taps * hidden] of the target."""
        if not self.config.hidden_layers:
            return torch.empty((len(rows), 0), device=self.device)
        features = features_of(rows, self.config.hidden_layers).to(self._dtype)
        return (
            features
            if self._feature_norm is None
            else rms_norm(features, self._feature_norm, self.config.rms_eps)
        )

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._tensors[f"{name}.weight"], self.config.rms_eps)

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        spans: Sequence[_Span],
        *,
        is_true: bool,
    ) -> torch.Tensor:
        """Outputs [T, hidden]; features are the target's, or outputs of this head."""
        for span in spans:
            span.place.reserve(max(span.at) + 1)
        embedded = self._embed(tokens).to(self._dtype)
        if isinstance(self.config, Eagle1Config):
            x = first = self._product(torch.cat([embedded, features], -1), "fc")
        elif isinstance(self.config, EagleConfig):
            x = self._product(features, "fc") if is_true else features
            normed = self._norm(x, "midlayer.hidden_norm")
            first = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed], -1)
            x = normed if self.config.norm_before_residual else x
        else:
            x, first = embedded, self._norm(embedded, "layers.0.input_layernorm")
        for i, name in enumerate(self._layers):
            x = x + self._attend(
                i, name, first if i == 0 else self._norm(x, f"{name}input_layernorm"), positions, spans
            )
            z = self._norm(x, f"{name}post_attention_layernorm")
            gated = functional.silu(self._product(z, f"{name}mlp.gate_proj")) * self._product(
                z, f"{name}mlp.up_proj"
            )
            x = x + self._product(gated, f"{name}mlp.down_proj")
        return x

    def _attend(
        self, i: int, name: str, x: torch.Tensor, positions: torch.Tensor, spans: Sequence[_Span]
    ) -> torch.Tensor:
        dim, group = self.config.head_dim, self.config.num_heads // self.config.num_kv_heads
        q, k, v = (self._product(x, f"{name}self_attn.{p}_proj").unflatten(-1, (-1, dim)) for p in "qkv")
        if f"{name}self_attn.q_norm.weight" in self._tensors:
            q, k = self._norm(q, f"{name}self_attn.q_norm"), self._norm(k, f"{name}self_attn.k_norm")
        cos, sin = (table[positions].to(q.dtype) for table in self._tables)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        parts = []
        for place, first, at, visible in spans:
            rows, length = slice(first, first + len(at)), visible.shape[1]
            place.keys[i, at], place.values[i, at] = k[rows], v[rows]
            keys, values = (
                t[i, :length].repeat_interleave(group, 1).transpose(0, 1)[None]
                for t in (place.keys, place.values)
            )
            out = functional.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None], keys, values, attn_mask=visible
            )
            parts.append(out[0].transpose(0, 1))
        return self._product(torch.cat(parts).flatten(1), f"{name}self_attn.o_proj")

    def _speak(self, x: torch.Tensor) -> Said:
        normed = self._norm(x, "norm") if "norm.weight" in self._tensors else x
        is_normed = isinstance(self.config, EagleConfig) and self.config.norm_output
        return Said(self._product(normed, "lm_head"), list(normed if is_normed else x))


def embedder(decoder: Any) -> Any:
    """ids -> [n, hidden]: what enters the target's first layer, from the weights that the target holds."""
    if hasattr(decoder, "embed"):
        return decoder.embed
    return lambda ids: functional.embedding(ids, decoder.weights.embedding) * decoder.config.embed_scale


def features_of(rows: Sequence[Row], layers: Sequence[int]) -> torch.Tensor:
    """[rows, layers * hidden]; rows of one pass are taken together."""
    parts, first = [], 0
    while first < len(rows):
        hidden = rows[first].hidden
        last = next((i for i in range(first, len(rows)) if rows[i].hidden is not hidden), len(rows))
        index = [row.at for row in rows[first:last]]
        parts.append(torch.cat([hidden[layer][index] for layer in layers], -1))
        first = last
    return torch.cat(parts)
