"""What the quantized formats share: the tensors that stand for a weight, and w = (q - z) * s.

Invariant: types and shapes are checked when a model is opened, and reading needs little memory beside what it
returns. Integers (and their zeros) become float32 exactly, as do scales, so a weight is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.core.errors import ModelFileError
from paceline.loaders.stored import StoredTensor, read_tensor
from paceline.models.kept import Kept

FLOAT8, INT8 = "F8_E4M3", "I8"
SCALES = ("F32", "F16", "BF16", "F8_E8M0")
STEP = 1 << 22  # values that are worked on at once
Reader = Callable[[slice], Tensor]  # rows with a start and a stop -> float32 [rows, inputs]
Shape = tuple[int, ...]


@runtime_checkable
class KeepingReader(Protocol):
    """A reader that may give the numbers as they are stored."""

    def kept(self, rows: slice) -> Kept | None: ...


@dataclass(slots=True)
class Module:
    """The tensors of one linear layer; its weight has `shape` [outputs, inputs]."""

    where: Path
    found: Mapping[str, StoredTensor]
    stem: str  # begins their names
    shape: Shape
    used: set[str] = field(default_factory=set)

    def type_of(self, part: str) -> str | None:
        """None where there is no such tensor."""
        found = self.found.get(self.stem + part)
        return None if found is None else found.dtype

    def shape_of(self, part: str) -> Shape:
        """() where there is no such tensor."""
        found = self.found.get(self.stem + part)
        return () if found is None else found.shape

    def take(self, part: str, types: tuple[str, ...], *shapes: Shape) -> Part:
        """One of the tensors, of one of these types and shapes."""
        name = self.stem + part
        if name not in self.found:
            raise ModelFileError(f"{self.where}: missing tensor {name}; it is incomplete, fetch it again")
        file, dtype, shape = self.found[name]
        if dtype not in types:
            wanted = " or ".join(types)
            raise ModelFileError(f"{file}: tensor {name} has type {dtype}; use a model with {wanted}")
        if shape not in shapes:
            wanted = " or ".join(str(list(each)) for each in shapes)
            problem = f"has shape {list(shape)} where a weight of {list(self.shape)} asks for {wanted}"
            raise ModelFileError(f"{file}: tensor {name} {problem}; fetch the model again")
        self.used.add(name)
        return Part(file, name, dtype, shape)

    def take_any(self, part: str, types: tuple[str, ...], shape: Shape) -> Part | None:
        """The same where there is such a tensor."""
        return None if self.type_of(part) is None else self.take(part, types, shape)

    def num_groups(self, part: str, axis: int, is_even: bool = True) -> int:
        """Of inputs that have scales; is_even: all are of one size."""
        count = (*self.shape_of(part)[axis:], 0)[0]
        if count < 1 or (is_even and self.shape[1] % count):
            problem = f"has {count} groups, which a weight of {list(self.shape)} cannot have"
            raise self.refuse(part, f"{problem}; fetch the model again")
        return count

    def refuse(self, part: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: tensor {self.stem}{part} {problem}")


class Part(NamedTuple):
    """A tensor that was checked."""

    file: Path
    name: str
    dtype: str
    shape: Shape

    def read(self, *index: int | slice) -> Tensor:
        return read_tensor(self.file, self.name, *index)


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales, each for some rows and a group of inputs."""

    scales: Tensor  # [blocks of rows, groups] float32
    zeros: Tensor | None = None  # the same
    block: int = 1  # rows that share scales
    first: int = 0  # row of the weight that is our row 0, counted from the first block here
    groups: Tensor | None = None  # [inputs]: the group of each; None: equal groups, one after the other

    def scale(self, codes: Tensor, rows: slice) -> None:
        """codes [rows, inputs] float32 become weights, in place."""
        blocks = (torch.arange(rows.start, rows.stop) + self.first) // self.block
        each = codes.unflatten(1, (self.scales.shape[1], -1)) if self.groups is None else codes
        if self.zeros is not None:
            each.sub_(self._spread(self.zeros, blocks))
        each.mul_(self._spread(self.scales, blocks))

    def _spread(self, values: Tensor, blocks: Tensor) -> Tensor:
        here = values if self.block == 1 and len(blocks) == len(values) else values[blocks]
        return here[:, :, None] if self.groups is None else here.index_select(1, self.groups)


def dequantize(codes: Callable[[slice], Tensor], grid: Grid, shape: tuple[int, int]) -> Tensor:
    """Weights [rows, inputs]; `codes` gives those of some rows, counted from the first that was asked for."""
    weights = torch.empty(shape)
    step = max(STEP // max(shape[1], 1), 1)
    for first in range(0, shape[0], step):
        rows = slice(first, min(first + step, shape[0]))
        weights[rows] = codes(rows)
        grid.scale(weights[rows], rows)
    return weights
