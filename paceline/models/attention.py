"""Attention of one pass in plain torch. Norm and rotate queries and keys, write keys and values at the
batch's slots, attend.

The oracle of the compiled attention in paceline/cpu/paged.py. Built once a pass from the batch and called
once a layer. A row sees its request's cached prefix, its ancestors, itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.core.types import BatchTensors
from paceline.models.rope import RotaryTables, rotate

LARGEST_WEIGHT = 16383  # as in paceline/cpu/value_tiles.py
LayerCache = tuple[
    torch.Tensor, torch.Tensor
]  # keys and values of a layer, [num_slots, num_kv_heads, head_dim]


class Heads(NamedTuple):
    """What attention in a layer needs to know beside its input."""

    tables: RotaryTables
    norms: tuple[torch.Tensor, torch.Tensor] | None  # [head_dim], for queries and keys
    eps: float
    scale: float
    window: int | None  # a row sees this many positions, itself included
    # queries and keys as int8 with a scale for each half, values with one, as the CPU kernels have them
    is_rounded: bool = False


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def round_halves(x: torch.Tensor) -> torch.Tensor:
    """x [..., dim] as paceline/cpu/key_tiles.py sees it; halves end at a multiple of 16."""
    first = -(-x.shape[-1] // 32) * 16
    return torch.cat([_rounded(part) for part in (x[..., :first], x[..., first:]) if part.shape[-1]], -1)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    top = x.abs().amax(-1, keepdim=True)
    return (x * torch.where(top == 0, 0.0, 127.0 / top)).round() * (top / 127.0)


def round_weights(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [kv_heads, group, n, C] of rounded values [C, kv_heads, dim] as paceline/cpu/value_tiles.py
    sees them: a weight times its value's scale has 14 bits of the largest such product of its row."""
    scales = values.abs().amax(-1).T[:, None, None]  # [kv_heads, 1, 1, C], 127 times as large
    scaled = weights * scales
    units = scaled.amax(-1, keepdim=True) / LARGEST_WEIGHT
    return torch.where(scales * units > 0, (scaled / units).round() * units / scales, 0.0)


class _Span(NamedTuple):
    """One request's rows and what they may see."""

    rows: slice
    slots: torch.Tensor  # [C]: the cached prefix, then the rows of this pass
    visible: torch.Tensor  # [n, C] bool
    distance: torch.Tensor  # [n, C]: positions back


class TorchAttention:
    def __init__(self, batch: BatchTensors) -> None:
        self.batch = batch
        starts, prefixes = batch.starts.tolist(), batch.prefix_lens.tolist()
        self.spans = [
            self._span(r, slice(starts[r], starts[r + 1]), prefix) for r, prefix in enumerate(prefixes)
        ]

    def _span(self, request: int, rows: slice, prefix: int) -> _Span:
        batch, size = self.batch, self.batch.block_size
        cached = torch.arange(prefix, device=batch.slots.device)
        slots = torch.cat(
            [batch.block_tables[request][cached // size] * size + cached % size, batch.slots[rows]]
        )
        above = _ancestors(batch.parents[rows].tolist(), rows.start).to(slots.device)
        visible = torch.cat([above.new_ones(len(above), prefix), above], 1)
        positions = torch.cat([cached, batch.positions[rows]])
        return _Span(rows, slots, visible, batch.positions[rows][:, None] - positions)

    def __call__(self, qkv: torch.Tensor, cache: LayerCache, heads: Heads) -> torch.Tensor:
        """qkv [T, (heads + 2 * kv_heads) * dim] -> [T, heads * dim]."""
        keys, values = cache
        _, kv_heads, dim = keys.shape
        q, k, v = qkv.view(len(qkv), -1, dim).tensor_split((-2 * kv_heads, -kv_heads), 1)
        if heads.norms is not None:
            q, k = rms_norm(q, heads.norms[0], heads.eps), rms_norm(k, heads.norms[1], heads.eps)
        cos, sin = (table[self.batch.positions].to(q.dtype) for table in heads.tables)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if heads.is_rounded:
            q, k, v = round_halves(q), round_halves(k), _rounded(v)
        keys[self.batch.slots], values[self.batch.slots] = k.to(keys.dtype), v.to(values.dtype)
        return torch.cat([self._attend(q, keys, values, span, heads) for span in self.spans]).flatten(1)

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: _Span, heads: Heads
    ) -> torch.Tensor:
        query = q[span.rows].unflatten(1, (keys.shape[1], -1))  # [n, kv_heads, group, dim]
        k, v = keys[span.slots].to(q.dtype), values[span.slots].to(q.dtype)  # [C, kv_heads, dim]
        scores = torch.einsum("nkgd,ckd->kgnc", query, k).float() * heads.scale
        visible = span.visible if heads.window is None else span.visible & (span.distance < heads.window)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        weights = (round_weights(weights, v) if heads.is_rounded else weights).to(q.dtype)
        return torch.einsum("kgnc,ckd->nkgd", weights, v).flatten(1, 2)


def _ancestors(parents: list[int], start: int) -> torch.Tensor:
    """[n, n] bool: row i is below row j, or is it. Parents come before their children."""
    above = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            above[i] |= above[parent - start]
    return above
