"""A layer of a model on a GPU, and the weights of a model.

Invariant: a layer works in place on the residual stream; what its MLP adds is added by the next layer's norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cuda import rows
from paceline.cuda.attention import Attending, attend
from paceline.cuda.batch import DeviceBatch
from paceline.cuda.delta_net import DeltaNet
from paceline.cuda.experts import BesideExperts, DenseFfn, Experts
from paceline.cuda.gates import gated
from paceline.cuda.gathered import Gathered
from paceline.cuda.linear import Matrix
from paceline.models.attention import LayerCache
from paceline.models.rope import Angles

# Up to these numbers of rows products let the next kernel start at their own start (measured on an H200).
PLAIN_ROWS, CHECKED_ROWS = 8, 64

Ffn = DenseFfn | Experts | BesideExperts


class Layer(NamedTuple):
    eps: float
    attention_norm: Tensor
    qkv: Matrix
    qk_norms: tuple[Tensor | None, Tensor | None]
    rotary: Angles
    out: Matrix | Gathered
    after_attention: Tensor | None
    mlp_norm: Tensor
    ffn: Ffn
    after_mlp: Tensor | None
    window: int | None = None
    sinks: Tensor | None = None  # [heads] float32, times log2(e)
    gates: Matrix | None = None  # of queries, by the same input
    scale: float = 1.0  # of what attention and the ffn add
    scalar: float = 1.0  # of the stream after the layer
    norms_values: bool = False
    early_rows: int = PLAIN_ROWS  # up to which products let the next kernel start at their own start

    @property
    def matrices(self) -> list[Matrix | Gathered]:
        gates = [] if self.gates is None else [self.gates]
        return [self.qkv, *gates, self.out, *self.ffn.matrices]

    def queries(self, x: Tensor, where: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        """x [T, width] at positions and slots [T]: K/V to the cache -> queries [T, heads, dim]."""
        qkv = self.qkv.parts(x, is_early=len(x) <= self.early_rows)
        dim = 2 * self.rotary.cos.shape[1]
        num_heads = self.qkv.weight.shape[0] // dim - 2 * cache[0].shape[1]
        q = torch.empty((len(x), num_heads, dim), dtype=x.dtype, device=x.device)
        rows.place(qkv, where, self.rotary, cache, self.qk_norms, self.eps, q, self.norms_values)
        return q

    def run(
        self, x: Tensor, q: Tensor, batch: DeviceBatch, cache: LayerCache, how: Attending, normed: Tensor
    ) -> Tensor:
        """Add attention of the queries q to the residual stream x [T, hidden] -> [parts, T, hidden]: what the
        MLP adds. `normed` [T, hidden], the layer's input where there are gates, is overwritten."""
        out = torch.empty_like(q)
        attend(q, cache, batch, how._replace(window=self.window, sinks=self.sinks), out)
        if self.gates is not None:
            out = gated(out, self.gates.parts(normed), x.dtype)
        is_early = PLAIN_ROWS < len(x) <= self.early_rows and self.out.weight.is_whole
        attended = self.out.parts(out.view(len(out), -1), is_early=is_early)
        rows.add_norm(x, attended, self.after_attention, self.mlp_norm, self.eps, normed, self.scale)
        return self.ffn(normed, x) if isinstance(self.ffn, BesideExperts) else self.ffn(normed)


class Weights(NamedTuple):
    dtype: torch.dtype  # of activations
    embedding: Tensor  # [vocab, hidden]
    layers: list[Layer | DeltaNet]
    norm: Tensor
    head: Matrix | Gathered
