"""A mixture of experts on a GPU: router, grouped products, and the sum of what a row's experts say.

An expert that every row wakes is several of the others' width, chosen by all: its gate is one more row of the
router. Invariant: a row's experts are added in the order of its own choice, by what reads them as parts of a
product (cuda/rows.py), so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cuda.linear import Matrix, add_up, expert_tile, splits_of, tile_of
from paceline.cuda.route import route
from paceline.models.config import Activation, ExpertsConfig

MOST_ROWS = 2048  # at a time: bounds the memory for what experts say, one by one
_SHORTEST = 128  # inputs of a part of the router's product: it is small, and all else waits for it


class DenseFfn(NamedTuple):
    gate_up: Matrix
    down: Matrix
    activation: Activation = "silu"

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.gate_up, self.down

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [parts, T, hidden]."""
        return self.down.parts(self.gate_up(x, self.activation))


class Experts(NamedTuple):
    config: ExpertsConfig
    router: Matrix  # [count, or one more: the shared experts' gate, hidden] of the activations' dtype
    correction: Tensor | None  # [count] float32
    counts: Tensor  # [count + 1] int32: zeros between passes
    gate_up: Matrix  # [experts * 2 * inner, hidden]: those that every row wakes are the last
    down: Matrix  # [experts * hidden, inner]
    activation: Activation

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.router, self.gate_up, self.down

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [parts, T, hidden]."""
        if len(x) > MOST_ROWS:
            return torch.cat([add_up(self(some), None, x.dtype) for some in x.split(MOST_ROWS)])[None]
        num_shared = self.gate_up.weight.shape[0] // (2 * self.config.inner) - self.config.count
        splits = max(splits_of(self.router.weight, _SHORTEST), 2)  # in several parts sums stay float32
        logits = self.router.multiply(x, tile_of(len(x), self.router.weight, x.dtype, splits), splits)
        first, second = (expert_tile(len(x), each.weight, x.dtype) for each in (self.gate_up, self.down))
        grouped = route(logits, self.correction, self.counts, self.config, num_shared, first.block_t)
        gated = self.gate_up.multiply(x, first, 1, self.activation, grouped=grouped._replace(shares=None))
        said = self.down.multiply(gated[0], second, 1, grouped=grouped)
        said = said.view(-1, *x.shape)
        return said if len(said) > 1 else said.to(x.dtype)
