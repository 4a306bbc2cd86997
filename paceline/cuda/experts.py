"""A mixture of experts on a GPU: router, grouped products, and the sum of what a row's experts say.

An expert that every row wakes is several of the others' width, chosen by all: its gate is one more row of the
router. Invariant: a row's experts are added in the order of its own choice, by what reads them as parts of a
product (cuda/rows.py), so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cuda.gathered import Gathered
from paceline.cuda.linear import Matrix, add_up, expert_tile, splits_of, tile_of
from paceline.cuda.norms import add_normed, norm_each
from paceline.cuda.route import route
from paceline.models.config import Activation, ExpertsConfig

MOST_ROWS = 2048  # at a time: bounds the memory for what experts say, one by one
_SHORTEST = 128  # inputs of a part of the router's product: it is small, and all else waits for it


class DenseFfn(NamedTuple):
    gate_up: Matrix
    down: Matrix | Gathered
    activation: Activation = "silu"

    @property
    def matrices(self) -> tuple[Matrix, Matrix | Gathered]:
        return self.gate_up, self.down

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [parts, T, hidden]."""
        return self.down.parts(self.gate_up(x, self.activation))


class Experts(NamedTuple):
    config: ExpertsConfig
    router: Matrix  # [count, or one more: the shared experts' gate, hidden] of the activations' dtype
    correction: Tensor | None  # [count] float32
    scales: Tensor | None  # [count] float32: of each expert's shares
    counts: Tensor  # [count + 1] int32: zeros between passes
    woken: Tensor  # [1] int32: experts that the last pass woke, but for those of every row
    gate_up: Matrix  # [experts * 2 * inner, hidden]: those that every row wakes are the last
    down: Matrix  # [experts * hidden, inner]
    activation: Activation

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.router, self.gate_up, self.down

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [parts, T, hidden]; routed [T, hidden]: what the router reads, if it is not x."""
        routed = x if routed is None else routed
        if len(x) > MOST_ROWS:
            pairs = zip(x.split(MOST_ROWS), routed.split(MOST_ROWS), strict=True)
            return torch.cat([add_up(self(*pair), None, x.dtype) for pair in pairs])[None]
        num_shared = self.gate_up.weight.shape[0] // (2 * self.config.inner) - self.config.count
        splits = max(splits_of(self.router.weight, _SHORTEST), 2)  # in several parts sums stay float32
        logits = self.router.multiply(routed, tile_of(len(x), self.router.weight, x.dtype, splits), splits)
        first, second = (expert_tile(len(x), each.weight, x.dtype) for each in (self.gate_up, self.down))
        of_choice = self.correction, self.scales, self.counts
        grouped = route(logits, *of_choice, self.config, num_shared, first.block_t, self.woken)
        gated = self.gate_up.multiply(x, first, 1, self.activation, grouped=grouped._replace(shares=None))
        said = self.down.multiply(gated[0], second, 1, grouped=grouped)
        said = said.view(-1, *x.shape)
        return said if len(said) > 1 else said.to(x.dtype)


class BesideExperts(NamedTuple):
    """Gemma 4's dense MLP and the experts beside it: these, it and the router read the residual stream
    through a norm each, and what both add is normed."""

    experts: Experts
    dense: DenseFfn
    before: Tensor  # [2, hidden] float32: norms of what the router and the MLP read
    after: Tensor  # [2, hidden] float32: of what the experts and the MLP add
    eps: float

    @property
    def matrices(self) -> tuple[Matrix | Gathered, ...]:
        return *self.experts.matrices, *self.dense.matrices

    @property
    def woken(self) -> Tensor:
        return self.experts.woken

    def __call__(self, x: Tensor, stream: Tensor) -> Tensor:
        """x [T, hidden]: what experts read of the stream [T, hidden] -> [1, T, hidden]."""
        routed, inputs = norm_each(stream, self.before, self.eps)
        added = torch.empty_like(x)
        add_normed(self.experts(x, routed), self.dense(inputs), self.after, self.eps, added)
        return added[None]
