"""Tensor parallelism on GPUs: a product of which every rank computes some outputs, and the exchanges around
it (models/shard.py).

Invariant: a rank cuts a dot product as one rank alone does, by the size of the whole matrix, so that in exact
mode no bit depends on the number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.cuda.linear import Matrix
from paceline.cuda.pack import PackedWeight
from paceline.models.shard import Group


class Gathered(NamedTuple):
    """A product with the interface of a Matrix."""

    part: Matrix
    group: Group
    outputs: list[int]  # of every rank
    inputs: list[int] | None = None  # of every rank, where x is in parts, too

    @property
    def weight(self) -> PackedWeight:
        return self.part.weight

    @property
    def num_bytes(self) -> int:
        return self.part.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return self.group.gather(self.part(self._whole(x)), self.outputs)

    def parts(self, x: Tensor, *, is_early: bool = False) -> Tensor:
        """x [T, K] -> [S, T, N], as those of a Matrix."""
        return self.group.gather(self.part.parts(self._whole(x), is_early=is_early), self.outputs)

    def _whole(self, x: Tensor) -> Tensor:
        return x if self.inputs is None else self.group.gather(x, self.inputs)
