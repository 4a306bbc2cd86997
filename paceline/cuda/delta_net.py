"""A recurrent layer of a model on a GPU: its products, its state and its ffn.

Invariant: rates and steps are products of the activations' type, whatever the other weights are packed to: a
state multiplies by what comes of them again and again.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.cuda import rows
from paceline.cuda.experts import DenseFfn, Experts
from paceline.cuda.gates import gated
from paceline.cuda.linear import Matrix
from paceline.cuda.recurrent import Rule, Versions, recur
from paceline.models.attention import LayerCache

EARLY_ROWS = 64  # up to which the large product lets the next kernel start at its own start, as attention's


class DeltaNet(NamedTuple):
    eps: float
    attention_norm: Tensor  # of the layer's input
    mixed: Matrix  # queries, keys and values, then gates
    rates: Matrix  # rates, then steps
    rule: Rule
    norm: Tensor  # [value]: of what is read of a state, float32
    out: Matrix
    mlp_norm: Tensor
    ffn: DenseFfn | Experts
    scale: float  # of what this and the ffn add
    after_mlp: Tensor | None = None
    scalar: float = 1.0  # of the stream after the layer

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.mixed, self.rates, self.out, *self.ffn.matrices

    def run(self, x: Tensor, versions: Versions, cache: LayerCache, normed: Tensor) -> Tensor:
        """Add what rows read of their states to the residual stream x [T, hidden] -> [parts, T, hidden]: what
        the MLP adds. `normed` [T, hidden], the layer's input, is overwritten."""
        width = self.rule.sizes.mixed_width
        rates = self.rates.parts(normed)
        mixed = self.mixed.parts(normed, is_early=len(x) <= EARLY_ROWS)
        read = recur(mixed, rates, versions, cache, self.rule, x.dtype)
        added = self.out.parts(gated(read, mixed[:, :, width:], x.dtype, self.norm, self.eps))
        rows.add_norm(x, added, None, self.mlp_norm, self.eps, normed, self.scale)
        return self.ffn(normed)
