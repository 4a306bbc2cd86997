"""What a paged cache holds, and attention of one pass over it in plain torch: the oracle of the compiled one
in paceline/cpu/paged.py. Built once a pass from the batch and called once a layer.

Invariant: a row sees its request's cached prefix, its ancestors and itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.types import BLOCK_SIZE, SCALE_BYTES, ColumnsOf
from paceline.models.config import ModelConfig

LARGEST_WEIGHT = 16383  # as in paceline/cpu/value_tiles.py
LayerCache = tuple[Tensor, Tensor]  # keys and values: [num_slots, num_kv_heads, width]


class KvFormat(NamedTuple):
    """In which numbers a cache keeps keys and values. Integers have scales behind them; how many, their
    writers and readers agree."""

    keys: torch.dtype
    values: torch.dtype
    has_value_scales: bool = True  # if values are integers; else theirs lie behind the keys too


FLOATS = KvFormat(torch.float32, torch.float32)


def row_widths(config: ModelConfig, kept: KvFormat) -> tuple[int, int]:
    """Elements a head of one token takes, of its key and its value."""
    keys, values = (SCALE_BYTES if dtype == torch.int8 else 0 for dtype in (kept.keys, kept.values))
    return config.head_dim + keys, config.head_dim + values * kept.has_value_scales


def bytes_per_token(config: ModelConfig, kept: KvFormat) -> int:
    total, kinds = 0, config.kinds
    for i in (i for i in range(config.num_layers) if not config.is_recurrent(i)):
        keys, values = row_widths(own := kinds[config.kind_of(i)], kept)
        total += own.num_kv_heads * (keys * kept.keys.itemsize + values * kept.values.itemsize)
    return total


class Masking(NamedTuple):
    """What attention in a layer needs to know beside its input."""

    scale: float
    window: int | None  # a row sees this many positions, itself included
    # queries and keys as int8 with a scale for each half, values with one, as the CPU kernels have them
    is_rounded: bool = False
    sinks: Tensor | None = None  # [heads]: scores that weigh and have no value


def round_halves(x: Tensor) -> Tensor:
    """x [..., dim] as paceline/cpu/tiles.py sees it; halves end at a multiple of 16."""
    first = -(-x.shape[-1] // 32) * 16
    return torch.cat([_rounded(part) for part in (x[..., :first], x[..., first:]) if part.shape[-1]], -1)


def _rounded(x: Tensor) -> Tensor:
    top = x.abs().amax(-1, keepdim=True)
    return (x * torch.where(top == 0, 0.0, 127.0 / top)).round() * (top / 127.0)


def round_weights(weights: Tensor, values: Tensor) -> Tensor:
    """weights [kv_heads, group, n, C] of rounded values [C, kv_heads, dim] as paceline/cpu/value_tiles.py
    sees them: a weight times its value's scale has 14 bits of the largest such product of its row."""
    scales = values.abs().amax(-1).T[:, None, None]  # [kv_heads, 1, 1, C], 127 times as large
    scaled = weights * scales
    units = scaled.amax(-1, keepdim=True) / LARGEST_WEIGHT
    return torch.where(scales * units > 0, (scaled / units).round() * units / scales, 0.0)


class _Span(NamedTuple):
    """One request's rows and what they may see."""

    rows: slice
    slots: Tensor  # [C]: the cached prefix, then the rows of this pass
    visible: Tensor  # [n, C] bool
    distance: Tensor  # [n, C]: positions back


class TorchAttention:
    def __init__(self, batch: ColumnsOf[Tensor]) -> None:
        self.batch = batch
        starts, prefixes = batch.starts.tolist(), batch.prefix_lens.tolist()
        self.spans = [self._span(r, slice(*starts[r : r + 2]), prefix) for r, prefix in enumerate(prefixes)]

    def _span(self, request: int, rows: slice, prefix: int) -> _Span:
        batch, size = self.batch, BLOCK_SIZE
        cached = torch.arange(prefix, device=batch.slots.device)
        cached_slots = batch.block_tables[request][cached // size] * size + cached % size
        slots = torch.cat([cached_slots, batch.slots[rows]])
        parents = batch.parents[rows].tolist()
        above = torch.eye(len(parents), dtype=torch.bool)  # [n, n]: row i is below row j, or is it
        for i, parent in enumerate(parents):
            if parent >= 0:  # parents come before their children
                above[i] |= above[parent - rows.start]
        visible = torch.cat([above.new_ones(len(above), prefix), above], 1).to(slots.device)
        positions = torch.cat([cached, batch.positions[rows]])
        return _Span(rows, slots, visible, batch.positions[rows][:, None] - positions)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, masking: Masking) -> Tensor:
        """q [T, heads, dim], k and v [T, kv_heads, dim] -> [T, heads, dim]."""
        keys, values = cache
        if masking.is_rounded:
            q, k, v = round_halves(q), round_halves(k), _rounded(v)
        keys[self.batch.slots], values[self.batch.slots] = k.to(keys.dtype), v.to(values.dtype)
        return torch.cat([self._attend(q, keys, values, span, masking) for span in self.spans])

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, span: _Span, masking: Masking) -> Tensor:
        query = q[span.rows].unflatten(1, (keys.shape[1], -1))  # [n, kv_heads, group, dim]
        k, v = keys[span.slots].to(q.dtype), values[span.slots].to(q.dtype)  # [C, kv_heads, dim]
        scores = torch.einsum("nkgd,ckd->kgnc", query, k).float() * masking.scale
        visible = span.visible if masking.window is None else span.visible & (span.distance < masking.window)
        scores = scores.masked_fill(~visible, float("-inf"))
        if masking.sinks is None:
            weights = scores.softmax(-1)
        else:
            sinks = masking.sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        weights = (round_weights(weights, v) if masking.is_rounded else weights).to(q.dtype)
        return torch.einsum("kgnc,ckd->nkgd", weights, v).flatten(1, 2)
