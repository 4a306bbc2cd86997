"""The files of a learned head: a folder with config.json and safetensors, read tensor by tensor.

Invariant: names, types and shapes are checked against what the head's config asks for before anything is
read, every number that is read is finite, and nothing but safetensors is ever opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline.core.errors import ModelFileError
from paceline.heads.config import HeadConfig
from paceline.loaders.fetch import whole
from paceline.loaders.fields import Fields, Shapes, check_shapes, read_json
from paceline.loaders.stored import TYPES, read_tensor, tensors_of, weight_files
from paceline.models.quantize import GROUP, STORED, padded

EXPECTED = "give the folder of a head: config.json and .safetensors"
Tensors = dict[str, torch.Tensor]


class Head(NamedTuple):
    """A head as it is run: our names and shapes, whatever wrote the files."""

    config: HeadConfig
    tensors: Tensors  # float32; `draft_ids` int64
    where: str
    dialect: str


class HeadInput(NamedTuple):
    """What a backend makes a head of."""

    head: Head
    decoder: Any  # the target
    num_blocks: int  # of K/V
    steps: int  # tokens of the longest chain that will be asked for, 0 for trees alone
    norm: torch.Tensor | None = None  # the target's last, for heads that read what comes out of it


def write_tensors(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Beside the file first, and moved into place when all of it is there."""
    with whole(path) as part:
        try:
            save_file(tensors, part, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written ({error})") from None
        part.chmod(0o644)  # the library makes files that only their owner can read


def scales_of(name: str) -> str:
    """Where the scales of a tensor of integers lie."""
    return f"{name.removesuffix('.weight')}.scales"


class HeadFiles:
    """A folder that may hold a head."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)
        if not (folder / "config.json").is_file():
            raise ModelFileError(f"{folder} has no config.json; {EXPECTED}")
        self.values = read_json(folder / "config.json")
        self.fields = Fields(str(folder / "config.json"), self.values)
        self.found = tensors_of(weight_files(folder))

    def has(self, name: str) -> bool:
        return name in self.found

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {message}")

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.found:
            raise self.error(f"missing tensor {name}; the file is incomplete or of another kind of head")
        return self.found[name].shape

    def read(self, shapes: Shapes, stored: Mapping[str, str] | None = None) -> Tensors:
        """The tensors of these shapes; `stored` gives the name in the file where it is another."""
        names = {name: (stored or {}).get(name, name) for name in shapes}
        wanted = {names[name]: shape for name, shape in shapes.items()}
        there = {name: self._shape(name, shape) for name, shape in wanted.items() if self.has(name)}
        check_shapes(self.folder, there, wanted)
        for name, shape in wanted.items():
            is_whole = name.endswith(("draft_ids", "d2t", "token_map"))
            allowed = ("I8",) if self._is_scaled(name, shape) else ("I32", "I64") if is_whole else TYPES
            if self.found[name].dtype not in allowed:
                kind = self.found[name].dtype
                raise self.error(f"tensor {name} has type {kind}; use one of {', '.join(allowed)}")
        return {name: self._tensor(names[name], shape) for name, shape in shapes.items()}

    def _is_scaled(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and self.has(scales_of(name))

    def _shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """As if it were stored in floats: integers are filled up to whole groups."""
        shape = self.found[name].shape
        if not self._is_scaled(name, wanted):
            return shape
        width = padded(wanted[1], GROUP[8])
        stored = (wanted[0], width), (wanted[0], width // GROUP[8])
        return wanted if (shape, self.found[scales_of(name)].shape) == stored else shape

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Floats and scaled integers as float32, other integers as int64."""
        raw = read_tensor(self.found[name].file, name)
        if self._is_scaled(name, shape):
            scales = self._tensor(scales_of(name), ()) / STORED
            grouped = raw.to(torch.float32).unflatten(1, (-1, GROUP[8])) * scales[:, :, None]
            return grouped.flatten(1)[:, : shape[1]].contiguous()
        if not raw.is_floating_point():
            return raw.to(torch.int64)
        weight = raw.to(torch.float32)
        if not bool(torch.isfinite(weight).all()):
            raise self.error(f"tensor {name} holds numbers that are not finite; the file is damaged")
        return weight
